import base64
import hashlib
import json
import os
import re
import resource
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from html.parser import HTMLParser

import pytest
import yaml

from moerl.config.load import load, to_yaml
from moerl.config.schema.layout import Layout
from moerl.observe import report
from moerl.observe.observer import Observer
from moerl.observe.report import report_finished, write_report
from moerl.types.errors import ReportError

HOSTILE = "</script><img src=https://example.org/x onerror=alert(1)><!-- \u2028 ]]> {{ 7 * 7 }} & <b>"


class Page(HTMLParser):
    """Tags with their attributes, and the text of each script."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[str | None, str]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append((dict(attrs).get("type"), ""))

    def handle_data(self, data):
        if self.cdata_elem == "script":
            kind, text = self.scripts[-1]
            self.scripts[-1] = (kind, text + data)

    @property
    def data(self):
        return json.loads(next(text for kind, text in self.scripts if kind == "application/json"))


@pytest.fixture
def make_run(make_config, make_group, make_sample, make_stats):
    """The directory of a run, made by an Observer."""

    def make(*, num_steps=3, text="77", name="run", **stats):
        config = make_config(name=name, dump_every=1)
        with Observer(config) as observe:
            for version in range(1, num_steps + 1):
                with observe.phase("rollout"):
                    pass
                observe.step(version, [make_group(make_sample(0.5, text=text, prefix=0.5), prompt=text)], make_stats(**stats))
        (config.run_dir / "config.yaml").write_text(to_yaml(config))
        return config.run_dir

    return make


def page_of(path):
    return Page(path.read_text(encoding="utf-8"))


def test_the_page_refers_to_nothing_outside_itself(make_run):
    page = page_of(write_report(make_run()))
    references = [value for _, attributes in page.tags for name, value in attributes.items() if name in ("src", "href", "srcset", "data")]
    assert references == []
    assert not {"link", "iframe", "base", "object", "embed"} & {tag for tag, _ in page.tags}
    assert "@import" not in report._file("report.css") and "url(" not in report._file("report.css")


def test_the_throughput_on_top_is_all_tokens_by_all_seconds_however_unlike_the_steps_are():
    """A mean of 100 and 1 tokens per second would be 50.5."""
    rows = [
        {"step": 1, "tokens/response": 100.0, "time/step": 1.0, "tokens/per_second": 100.0},
        {"step": 2, "tokens/response": 100.0, "time/step": 99.0, "tokens/per_second": 100 / 99},
    ]
    assert ("Throughput", "2", "tokens/s, last 2") in report._tiles(rows, {})
    assert all(label != "Throughput" for label, _, _ in report._tiles([{"step": 1, "reward/mean": 1.0}], {}))


def test_the_policy_admits_exactly_the_scripts_of_the_page(make_run):
    page = page_of(write_report(make_run(text=HOSTILE)))
    policy = next(attributes["content"] for tag, attributes in page.tags if attributes.get("http-equiv") == "Content-Security-Policy")
    scripts = [text for kind, text in page.scripts if kind is None]
    hashes = {"'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'" for text in scripts}
    assert len(scripts) == 2
    directives = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert directives["default-src"] == "'none'"
    assert set(directives["script-src"].split()) == hashes


def test_hostile_text_is_only_data(make_run):
    plain = page_of(write_report(make_run(name="plain")))
    hostile = page_of(write_report(make_run(name=HOSTILE.replace("/", "_"), text=HOSTILE)))
    assert [tag for tag, _ in hostile.tags] == [tag for tag, _ in plain.tags], "it adds no element"
    sample = hostile.data["dumps"][0]["samples"][0]
    assert sample["response"] == sample["prompt"] == HOSTILE


def test_the_page_never_makes_html_of_text():
    script = report._file("report.js")
    assert not [name for name in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(") if name in script]


def test_charts_hold_the_numbers_of_the_run(make_run):
    data = page_of(write_report(make_run(mismatch_mean=0.25, kl_reference=0.125))).data
    charts = {chart["title"]: chart for chart in data["charts"]}
    assert {
        "Reward",
        "Reward terms",
        "Response length",
        "KL",
        "Mismatch",
        "Time per step",
        "Entropy",
        "Gradient norm",
        "Throughput",
    } <= charts.keys()
    assert charts["Mismatch"]["log"] and charts["Mismatch"]["traces"][0]["y"] == [0.25] * 3
    assert [trace["name"] for trace in charts["KL"]["traces"]] == ["kl_old", "kl_reference"]
    assert [trace["name"] for trace in charts["Time per step"]["traces"]] == ["rollout", "other"]
    assert charts["Reward"]["x"] == [1, 2, 3]
    band = charts["Reward"]["traces"][1]
    assert band["y"] == band["upper"] == [0.5] * 3, "one sample has no spread"


def test_numbers_of_different_steps_are_told_apart(make_config, make_group, make_sample, make_stats):
    """The first, the last ten, and the largest ever; the band of rewards ends at the lowest and the highest."""
    config = make_config()
    with Observer(config) as observe:
        for version in range(1, 13):
            with observe.phase("rollout"):
                pass
            rewards = (0.0, 0.0, 0.0, 1.0) if version == 1 else (0.0, 1.0, 1.0, 1.0)
            stats = make_stats(mismatch_mean=1.0 if version == 1 else 0.5, mismatch_max=8.0 if version == 2 else 4.0)
            observe.step(version, [make_group(*map(make_sample, rewards))], stats)
    text = (path := write_report(config.run_dir)).read_text()
    assert "last 10; 0.25 at first" in text and "last 10; largest ever 8" in text
    traces = {trace["name"]: trace for trace in page_of(path).data["charts"][0]["traces"]}
    band, spread = traces["one standard deviation"], 0.1875**0.5
    assert (band["y"][0], band["upper"][0]) == pytest.approx((0.0, 0.25 + spread))
    assert (band["y"][-1], band["upper"][-1]) == pytest.approx((0.75 - spread, 1.0))
    assert (traces["min"]["y"], traces["max"]["y"]) == ([0.0] * 12, [1.0] * 12)


def test_phases_of_a_single_step_are_bars(make_run):
    """An area has nothing to show between one step and no other."""

    def phases(num_steps):
        found = page_of(write_report(make_run(num_steps=num_steps, name=f"steps-{num_steps}"))).data["charts"]
        return next(chart for chart in found if chart["title"] == "Time per step")

    assert (phases(1)["kind"], phases(2)["kind"]) == ("bars", "stacked")
    assert [len(trace["y"]) for trace in phases(1)["traces"]] == [1, 1]


def test_the_layout_is_told_by_what_was_set(make_run):
    run_dir = make_run()
    settings = yaml.safe_load((run_dir / "config.yaml").read_text())
    settings["train"]["layout"] = asdict(Layout(ranks=4, pp=2, last_stage_layers=3, loss_as_layer=True))
    (run_dir / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    text = write_report(run_dir).read_text()
    assert "<dd>ranks 4, pp 2, last_stage_layers 3, loss_as_layer True</dd>" in text


def test_a_run_that_is_still_going_can_be_shown(make_run):
    run_dir = make_run()
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rewa')
    (run_dir / "config.yaml").unlink()
    page = page_of(write_report(run_dir, run_dir / "elsewhere" / "page.html"))
    assert page.data["charts"][0]["x"] == [1, 2, 3]


def test_a_report_for_which_the_disk_has_no_room_leaves_the_one_before(make_run):
    run_dir = make_run()
    before = write_report(run_dir).read_text()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_report(run_dir)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (run_dir / "report.html").read_text() == before
    assert not list(run_dir.glob(".report*"))


def test_a_report_goes_through_links_and_into_what_is_no_file(make_run, tmp_path):
    run_dir, link, pipe = make_run(), tmp_path / "link.html", tmp_path / "pipe"
    (tmp_path / "page.html").touch()
    link.symlink_to(tmp_path / "page.html")
    write_report(run_dir, link)
    os.mkfifo(pipe)
    with ThreadPoolExecutor() as threads:
        read = threads.submit(pipe.read_text)
        write_report(run_dir, pipe)
    assert read.result() == link.read_text() and link.is_symlink()


def test_values_that_were_not_finite_leave_a_gap(make_run):
    data = page_of(write_report(make_run(entropy=float("nan")))).data
    assert "Entropy" not in {chart["title"] for chart in data["charts"]}


def test_dumps_too_large_for_a_browser_are_thinned_evenly_back_from_the_last(make_run, monkeypatch):
    run_dir = make_run(num_steps=8)
    size = max(path.stat().st_size for path in (run_dir / "samples").iterdir())
    monkeypatch.setattr(report, "SAMPLE_BYTES", 3 * size)
    path = write_report(run_dir)
    assert [dump["step"] for dump in page_of(path).data["dumps"]] == [4, 8]
    assert "2 of 8 dumps are shown" in path.read_text()


def test_a_directory_without_a_run_is_refused(tmp_path):
    with pytest.raises(ReportError, match=r"must hold metrics\.jsonl"):
        write_report(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("config.yaml", "a: [", "config.yaml = damaged: must be YAML, as the run wrote it"),
        ("config.yaml", "day: 2026-99-99", "config.yaml = damaged: must be YAML, as the run wrote it: month must be in"),
        ("config.yaml", "- 1", "must hold the settings of the run, and holds list"),
        ("metrics.jsonl", '{"x": 1}', "metrics.jsonl record 1 = \"{'x': 1}\": must be a step's metrics"),
        ("metrics.jsonl", "3", "metrics.jsonl record 1 = '3': must be a step's metrics"),
    ],
)
def test_a_damaged_file_of_a_run_is_named(make_run, name, text, told):
    run_dir = make_run()
    (run_dir / name).write_text(text + "\n")
    with pytest.raises(ReportError, match=re.escape(told)):
        write_report(run_dir)


def test_settings_with_a_byte_that_is_no_text_are_shown_without_it(make_run):
    run_dir = make_run()
    with (run_dir / "config.yaml").open("ab") as settings:
        settings.write(b"# \xff\n")
    assert "# \ufffd" in write_report(run_dir).read_text()


def test_a_run_before_its_first_step_is_refused(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "re')
    with pytest.raises(ReportError, match="at least one step"):
        write_report(tmp_path)


def test_a_run_has_finished_when_its_last_step_is_saved_and_evaluated(tmp_path):
    config = replace(load(["recipe=grpo-tiny-moe-1n2g-sync", "num_steps=3"]), output_dir=str(tmp_path))
    evaluated = replace(
        load(["recipe=grpo-tiny-moe-1n2g-sync", "num_steps=3", "eval=tiny-repeat", "eval.every=2"]), output_dir=str(tmp_path)
    )
    (config.run_dir / "checkpoints" / "step-000002").mkdir(parents=True)
    (config.run_dir / "metrics.jsonl").write_text('{"step": 3, "reward/mean": 0.5}\n')
    assert report_finished(config) is None
    (config.run_dir / "checkpoints" / "step-000003").mkdir()
    (config.run_dir / "failure.txt").touch()
    assert report_finished(evaluated) is None
    assert (path := report_finished(config)) is not None and path.is_file()
    assert not (config.run_dir / "failure.txt").exists()
    with (config.run_dir / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 3, "eval/pass@1": 0.5}\n')
    assert report_finished(evaluated) == path


def test_an_evaluation_before_the_first_step_is_no_step_of_the_report(make_config, make_group, make_sample, make_stats):
    """Numbers on top, the column of the first step and the chart of phases are as without it."""

    def report_of(name, *, evaluates):
        config = make_config(name=name)
        with Observer(config) as observe:
            if evaluates:
                observe.evaluated(0, {"eval/typo_errors/reward": 0.25, "eval/typo_errors/pass@1_error": 0.125})
            for version in (1, 2):
                with observe.phase("rollout"):
                    pass
                observe.step(version, [make_group(make_sample(0.5))], make_stats())
        text = (path := write_report(config.run_dir)).read_text()
        return text, {chart["title"]: chart for chart in page_of(path).data["charts"]}

    (plain, plain_charts), (text, charts) = report_of("plain", evaluates=False), report_of("evaluated", evaluates=True)
    for told in ("last 2; 0.5 at first", "tokens, last 2; 4 at first", " per step, last 2"):
        assert told in plain and told in text
    assert '<td><code>reward/mean</code></td><td class="num">0.5</td>' in text
    assert '<td><code>eval/typo_errors/reward</code></td><td class="num">0.25</td>' in text
    assert charts["Time per step"]["x"] == plain_charts["Time per step"]["x"] == [1, 2]
    assert [trace["name"] for trace in charts["Evaluation"]["traces"]] == ["typo_errors/reward"], "data sets may be named after errors"


def test_a_part_of_a_phase_is_not_stacked_upon_it(make_run):
    run_dir = make_run(whole_minibatch_seconds=0.5)
    charts = {chart["title"]: chart for chart in page_of(write_report(run_dir)).data["charts"]}
    assert [trace["name"] for trace in charts["Time per step"]["traces"]] == ["rollout", "other"]


def test_numbers_of_a_verifier_keep_their_whole_names(make_config, make_group, make_sample, make_stats):
    """Also those with a slash, and as text: Plotly would take them for HTML."""
    config = make_config()
    sample = make_sample(0.5, **{"f.strict/<b>": 1.0, "g.strict/<b>": 0.0})
    with Observer(config) as observe:
        with observe.phase("rollout"):
            pass
        observe.step(1, [make_group(sample)], make_stats())
    charts = {chart["title"]: chart for chart in page_of(write_report(config.run_dir)).data["charts"]}
    assert [trace["name"] for trace in charts["Reward terms"]["traces"]] == ["f.strict/<b>", "g.strict/<b>"]
    script = report._file("report.js")
    assert script.count("name: escaped(trace.name)") == 3 and "name: trace.name" not in script
