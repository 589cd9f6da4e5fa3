"""What `moerl eval` and the section `eval` refuse, and that the evaluation of a run has a directory and settings of its own."""

import fcntl
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moerl.check import load_checked, load_evaluation
from moerl.config.derive.scratch_config import scratch_config
from moerl.config.load import load
from moerl.config.rules.run_rules import eval_problems
from moerl.config.schema.data_config import _DataBase
from moerl.config.schema.model_config import ScratchModel
from moerl.evaluation.evaluator import evaluation_prompts, num_alike, record_of
from moerl.evaluation.request import kind_of
from moerl.evaluation.results import RESULTS, keep_samples_of, write_results
from moerl.rewards.reward_rules import source_files
from moerl.run import evaluate
from moerl.scratch_model import write_scratch_model
from moerl.starting_model import load_model
from moerl.train.checkpoint import checkpoint_dirs
from moerl.train.checkpoint.checkpoint_check import read_state
from moerl.types.errors import CheckpointError, ConfigError, DataError, MoerlError
from moerl.types.groups import Prompt, Score
from moerl.types.json_text import read_object

DEMO, EVAL = "recipe=grpo-tiny-moe-1n2g-sync", "eval=tiny-repeat"


def problems_of(*overrides: str, directory: Path | None = None) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        load_evaluation(overrides, checkpoint=directory, out=None)
    return {problem.path: str(problem) for problem in caught.value.problems}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a tiny Hugging Face model."""
    directory = tmp_path_factory.mktemp("hf") / "tiny"
    write_scratch_model(ScratchModel(num_layers=2, hidden_size=32, num_experts=4), 32, directory, 0)
    return directory


def save(run_dir: Path, version: int, model: dict[str, object]) -> Path:
    temporary = checkpoint_dirs.begin(run_dir / "checkpoints", version)
    (temporary / "weights").write_text("x" * 100)
    files = checkpoint_dirs.digest_files(temporary, ["weights"])
    return checkpoint_dirs.commit(temporary, files, {"version": version}, model, keep=9)


def test_everything_that_is_wrong_is_said_at_once(tmp_path: Path):
    wrong = (
        "eval.temperature=0", "eval.datasets.repeat.pass_at=[1,8]", "eval.seed=0", "eval.max_response_tokens=30",
        "eval.datasets.repeat.reward={terms: {x: {kind: gym}}}", f"output_dir={tmp_path}",
        "eval.datasets.more={data: {kind: files, files: [gone.jsonl], max_prompt_tokens: 1}, reward: {terms: {}}}",
    )  # fmt: skip
    found = problems_of(DEMO, EVAL, *wrong, directory=tmp_path / "gone")
    first, second = "eval.datasets.repeat", "eval.datasets.more"
    assert set(found) == {
        "--checkpoint", f"{first}.pass_at.1", f"{first}.samples", "eval.seed", f"{first}.data.max_prompt_tokens",
        f"{first}.reward.terms.x.kind", f"{second}.data.files.0", f"{second}.reward.terms",
    }  # fmt: skip
    assert "must be at most 4" in found[f"{first}.pass_at.1"]
    assert "every sample of a prompt is the same" in found[f"{first}.samples"]
    assert "rows that the run trains on" in found["eval.seed"]
    assert "must be at most 2" in found[f"{first}.data.max_prompt_tokens"]
    assert "is not a directory" in found["--checkpoint"]


@dataclass(frozen=True, kw_only=True)
class _OwnData(_DataBase):
    """As `docs/add-an-environment.md` says: a kind, and whatever fields it needs."""

    kind: str = "own"


def test_a_kind_of_data_without_a_task_has_rules_for_the_seed_too():
    config = load((DEMO, EVAL))
    assert config.eval is not None
    own = _OwnData(max_prompt_tokens=16)
    datasets = {"own": replace(config.eval.datasets["repeat"], data=own)}
    config = replace(config, data=own, eval=replace(config.eval, seed=config.seed, datasets=datasets))
    assert [problem.path for problem in eval_problems(config, SimpleNamespace())] == ["eval.seed"]


def test_the_reward_of_the_run_must_fit_the_data_set_too(tmp_path: Path):
    data = "data={kind: gym, task: chain_sum, max_prompt_tokens: 16}"
    found = problems_of(DEMO, EVAL, "~data", data, "reward.terms.repeat.kind=gym", f"output_dir={tmp_path}")
    assert "needs eval.datasets.repeat.data.kind=gym" in found["eval.datasets.repeat.reward.terms.repeat.kind"]


def test_what_a_fix_says_to_write_is_the_data_set_s_own_and_not_the_run_s(tmp_path: Path):
    data = "{kind: files, files: [], chat_template: false, chat_template_kwargs: {b: 1}, max_prompt_tokens: 8}"
    reward = "{terms: {f: {kind: function}, e: {kind: exact, pattern: x}}}"
    found = problems_of(DEMO, f"eval={{datasets: {{own: {{data: {data}, reward: {reward}}}}}}}", f"output_dir={tmp_path}")
    fixes = [text.partition("fix: ")[2] for path, text in found.items() if path.startswith("eval.")]
    assert sorted(fixes) == [
        "eval.datasets.own.data.chat_template=true, or leave it out",
        "eval.datasets.own.data.files=[train.parquet]",
        "eval.datasets.own.reward.terms.f.path=rewards.py:score, or eval.datasets.own.reward.terms.f.path=package.module:score",
        "leave it out, or eval.datasets.own.reward.terms.e.kind=format",
    ]


def test_why_a_setting_is_wrong_is_told_with_the_data_set_s_own_too(tmp_path: Path):
    data = "{kind: gym, task: basic_arithmetic, args: {size: 8}}"
    found = problems_of(DEMO, f"eval={{datasets: {{own: {{data: {data}}}}}}}", f"output_dir={tmp_path}")
    assert "why: the number of rows is eval.datasets.own.data.size" in found["eval.datasets.own.data.args.size"]


def test_a_prompt_that_is_too_long_is_told_with_the_settings_of_its_data_set(tmp_path: Path):
    (tmp_path / "long.jsonl").write_text('{"prompt": [{"role": "user", "content": "0123456789"}], "reward_model": {"ground_truth": "3"}}\n')
    data = f"{{kind: files, files: [{tmp_path}/long.jsonl], chat_template: false, max_prompt_tokens: 4}}"
    config = load([DEMO, f"+eval={{datasets: {{own: {{data: {data}}}}}}}", f"output_dir={tmp_path}"])
    with pytest.raises(DataError) as error:
        evaluation_prompts(config, load_model(config).tokenizer)
    assert "(eval.datasets.own.data.max_prompt_tokens=4)" in str(error.value)
    assert "or write eval.datasets.own.data.overlong_prompts=drop\n" in str(error.value)


def test_without_data_sets_or_a_checkpoint_there_is_nothing_to_evaluate(tmp_path: Path):
    found = problems_of(DEMO, f"output_dir={tmp_path}")
    assert "configs/eval" in found["eval"]
    assert "holds no checkpoint of this run" in found["--checkpoint"]
    assert "needs a data set" in problems_of(DEMO, "eval={datasets: {}}", f"output_dir={tmp_path}")["eval.datasets"]


def test_a_checkpoint_of_megatron_is_told_to_be_converted(tmp_path: Path):
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / ".metadata").touch()
    said = problems_of(DEMO, EVAL, directory=tmp_path / "saved")["--checkpoint"]
    assert f"fix: moerl convert {tmp_path / 'saved'} FOLDER --files-from MODEL" in said and "then --checkpoint=FOLDER" in said


def test_the_directory_of_a_run_is_answered_with_its_newest_checkpoint(tmp_path: Path):
    newest = save(tmp_path / "run", 7, {})
    assert f"--checkpoint={newest}" in problems_of(DEMO, EVAL, directory=tmp_path / "run")["--checkpoint"]
    assert f"--checkpoint={newest}" in problems_of(DEMO, EVAL, directory=tmp_path / "run" / "checkpoints")["--checkpoint"]


def test_links_to_a_checkpoint_and_in_place_of_one_are_taken_for_it(tmp_path: Path):
    checkpoint = save(tmp_path / "run", 7, {})
    (tmp_path / "best").symlink_to(checkpoint)
    assert kind_of(checkpoint) == kind_of(tmp_path / "best") == "run"
    checkpoint.rename(tmp_path / "archive")
    checkpoint.symlink_to(tmp_path / "archive")
    assert kind_of(checkpoint) == "run"
    assert kind_of(tmp_path / "archive") is kind_of(tmp_path / "gone") is None


def test_a_checkpoint_of_another_model_and_a_damaged_one_are_refused(tmp_path: Path):
    other = save(tmp_path / "run", 3, {"num_hidden_layers": 3})
    assert "model.scratch: num_hidden_layers" in problems_of(DEMO, EVAL, f"output_dir={tmp_path}", directory=other)
    (other / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match="manifest.json"):
        load_evaluation((DEMO, EVAL, f"output_dir={tmp_path}"), checkpoint=other, out=None)


def test_a_checkpoint_that_its_run_deletes_meanwhile_is_not_called_damaged(tmp_path: Path):
    words = (DEMO, EVAL, f"output_dir={tmp_path}")
    run_dir = load_checked(words).run_dir
    model = scratch_config(ScratchModel(), 32)
    first = save(run_dir, 1, model)
    evaluation = load_evaluation(words, checkpoint=None, out=None)
    save(run_dir, 2, model)
    shutil.rmtree(first)
    with pytest.raises(CheckpointError, match="step-000001 is not there any more"):
        evaluation.identity()
    with pytest.raises(CheckpointError, match="step-000001 is not there any more"):
        read_state(first)


def test_an_evaluation_leaves_the_directory_of_the_run_to_the_run(folder: Path, tmp_path: Path):
    words = (DEMO, EVAL, f"output_dir={tmp_path}", "observe.wandb=off")
    evaluation = load_evaluation(words, checkpoint=folder, out=None)
    assert evaluation.config.run_dir == load_checked(words).run_dir / "eval" / "checkpoint-tiny"
    assert evaluation.config.model.path == str(folder) and evaluation.config.model.scratch is None
    assert evaluation.checkpoint is None
    assert load_evaluation(words, checkpoint=folder, out=tmp_path / "out").config.run_dir == tmp_path / "out"


def test_a_place_for_results_that_is_a_file_is_told_by_its_own_name(folder: Path, tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as error:
        load_evaluation((DEMO, EVAL, f"output_dir={tmp_path}"), checkpoint=folder, out=tmp_path / "file")
    assert [(each.path, each.rule) for each in error.value.problems] == [("--out", "must be a directory")]


def test_rows_that_cannot_be_used_are_told_of_every_data_set(tmp_path: Path):
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "other.jsonl").write_text('{"question": "1+1"}\n')
    rest = "chat_template: false, max_prompt_tokens: 16}, samples: 1, pass_at: [1]}"
    sets = ", ".join(f"{name}: {{data: {{kind: files, files: [{tmp_path}/{name}.jsonl], {rest}" for name in ("empty", "other"))
    config = load([DEMO, f"+eval={{datasets: {{{sets}}}}}", f"output_dir={tmp_path}"])
    with pytest.raises(DataError) as error:
        evaluation_prompts(config, load_model(config).tokenizer)
    assert "eval.datasets.empty: " in str(error.value) and "eval.datasets.other: " in str(error.value)


def test_a_value_that_no_template_reads_is_told_by_the_data_set(tmp_path: Path):
    data = "{kind: tiny, task: repeat, size: 4, max_prompt_tokens: 16, chat_template_kwargs: {thinking: no}}"
    config = load([DEMO, f"+eval={{datasets: {{own: {{data: {data}}}}}}}", f"output_dir={tmp_path}"])
    with pytest.raises(ConfigError) as error:
        evaluation_prompts(config, load_model(config).tokenizer)
    assert [each.path for each in error.value.problems] == ["eval.datasets.own.data.chat_template_kwargs.thinking"]


@pytest.mark.parametrize("name", ["checkpoints", "logs", "samples"])
def test_a_folder_of_the_run_that_cannot_be_written_is_told_before_anything_starts(name: str, tmp_path: Path):
    """Else what it trained until its first checkpoint would be lost."""
    directory = load([DEMO, f"output_dir={tmp_path}"]).run_dir
    directory.mkdir(parents=True)
    (directory / name).symlink_to(tmp_path / "unmounted")
    with pytest.raises(ConfigError) as error:
        load_checked((DEMO, f"output_dir={tmp_path}"), starts=True)
    assert [(each.path, each.value) for each in error.value.problems] == [("output_dir", str(directory / name))]


def test_what_changes_the_samples_changes_the_identity(folder: Path, tmp_path: Path):
    def identity(*further: str) -> dict[str, object]:
        return load_evaluation((DEMO, EVAL, f"output_dir={tmp_path}", *further), checkpoint=folder, out=None).identity()

    assert identity() == identity("slurm.partition=gpu", "deadlines.eval_seconds=5")
    for further in ("eval.top_p=0.5", "reward.terms.repeat.kind=exact", "rollout.engine=fake", "train.dtype=bfloat16"):
        assert identity() != identity(further), further
    for file in (next(folder.glob("*.safetensors")), *(folder / f"{name}.json" for name in ("config", "generation_config", "tokenizer"))):
        before = identity()
        file.write_bytes(file.read_bytes() + b" ")
        assert identity() != before, file
    checkpoint = save(tmp_path / "run", 1, read_object(folder / "config.json"))

    def of_run() -> dict[str, object]:
        return load_evaluation(
            (DEMO, EVAL, f"output_dir={tmp_path}", f"model.path={folder}", "model.scratch=null"), checkpoint=checkpoint, out=None
        ).identity()

    before = of_run()
    (folder / "generation_config.json").write_bytes((folder / "generation_config.json").read_bytes() + b" ")
    assert of_run() != before
    own = tmp_path / "own.py"
    own.write_text("def score(data_source, solution_str, ground_truth, extra_info): return 0.0\n")
    words = f"reward.terms.repeat={{kind: function, path: '{own}:score'}}"
    before = identity(words)
    own.write_text(own.read_text().replace("0.0", "-1.0"))
    assert identity(words) != before


def test_samples_stay_until_the_first_row_of_which_anything_has_changed():
    completion = SimpleNamespace(num_tokens=1, finish_reason="stop")

    def records_of(prompt: Prompt) -> list[dict[str, Any]]:
        answer: Any = SimpleNamespace(text="", completion=completion)
        return [record_of(prompt, index, answer, Score(reward=0.0), pass_reward=1.0) for index in range(2)]

    prompts = [
        Prompt(index=index, token_ids=(1,), text="1+1", data_source="a", ground_truth="2", extra_info={"tests": [1, 2], "level": index})
        for index in range(3)
    ]
    found = [records_of(prompt) for prompt in prompts]
    assert num_alike(found, prompts) == 3 and num_alike(found[:1], prompts) == 1 and num_alike(found, prompts[:2]) == 2
    other_order = replace(prompts[1], extra_info={"level": 1, "tests": [1, 2]})
    assert num_alike(found, [prompts[0], other_order, prompts[2]]) == 3
    changes: list[dict[str, Any]] = [
        {"text": "1+2"}, {"data_source": "b"}, {"ground_truth": "3"}, {"extra_info": {"tests": [1, 3], "level": 1}},
    ]  # fmt: skip
    for change in changes:
        assert num_alike(found, [prompts[0], replace(prompts[1], **change), prompts[2]]) == 1, change


@pytest.mark.parametrize("name", ["checkpoints", "metrics.jsonl", "samples"])
def test_results_are_written_over_an_evaluation_and_over_nothing_else(folder: Path, tmp_path: Path, name: str):
    words, out = (DEMO, EVAL, f"output_dir={tmp_path}"), tmp_path / "out"
    (out / name).mkdir(parents=True)
    with pytest.raises(ConfigError) as error:
        load_evaluation(words, checkpoint=folder, out=out)
    assert [(each.path, each.rule) for each in error.value.problems] == [("--out", "must be new, or of an evaluation")]
    keep_samples_of(out, {})
    assert load_evaluation(words, checkpoint=folder, out=out).config.run_dir == out


@pytest.mark.parametrize(
    ("has_ended", "identity", "stays"), [(False, {"seed": 1}, True), (False, {"seed": 2}, False), (True, {"seed": 1}, False)]
)
def test_samples_of_an_evaluation_stay_only_if_it_is_the_same_and_was_stopped(tmp_path: Path, has_ended: bool, identity: Any, stays: bool):
    keep_samples_of(tmp_path, {"seed": 1})
    samples = tmp_path / "samples"
    samples.mkdir()
    if has_ended:
        write_results(tmp_path, [], version=3)
    keep_samples_of(tmp_path, identity)
    assert samples.exists() == stays and not (tmp_path / RESULTS).exists()
    samples.mkdir(exist_ok=True)
    keep_samples_of(tmp_path, identity)
    assert samples.exists(), "its own settings are the ones kept"


def test_a_second_process_that_evaluates_into_the_same_directory_is_refused(folder: Path, tmp_path: Path):
    out = tmp_path / "out"
    out.mkdir()
    evaluation = load_evaluation((DEMO, EVAL, f"output_dir={tmp_path}"), checkpoint=folder, out=out)
    with (out / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(MoerlError, match="another process is evaluating into this directory; wait for it, or choose another --out="):
            evaluate(evaluation)


def test_another_state_of_what_a_scoring_function_imports_is_another_evaluation(tmp_path, folder, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "__init__.py").write_text("from .inner import WEIGHT\n")
    (tmp_path / "parts" / "inner.py").write_text("WEIGHT = 1.0\n")
    (tmp_path / "broken.py").write_text("(\n")
    (tmp_path / "other.py").write_text("")
    (tmp_path / "scored.py").write_text(
        "from parts import WEIGHT\n\ntry:\n    import broken\nexcept SyntaxError: ...\n\n\n"
        "def score(data_source, solution_str, ground_truth, extra_info):\n    return WEIGHT\n"
    )

    def identity(path):
        term = f"eval.datasets.repeat.reward={{terms: {{own: {{kind: function, path: '{path}'}}}}}}"
        return load_evaluation((DEMO, EVAL, term), checkpoint=folder, out=None).identity()

    for path in ("scored.py:score", "scored:score"):
        monkeypatch.syspath_prepend(tmp_path)
        before = identity(path)
        (tmp_path / "other.py").write_text(f"# {path}, imported by nobody\n")
        assert identity(path) == before
        (tmp_path / "parts" / "inner.py").write_text(f"WEIGHT = 2.0  # {path}\n")
        assert identity(path) != before


def test_a_data_set_after_which_no_file_can_be_named_is_refused():
    data = "{data: {kind: tiny, task: repeat, size: 4, chat_template: false, max_prompt_tokens: 8}}"
    load_checked([DEMO, f"eval={{datasets: {{{'a' * 200}: {data}}}}}"])
    with pytest.raises(ConfigError, match="must be at most 200 characters"):
        load_checked([DEMO, f"eval={{datasets: {{{'a' * 245}: {data}}}}}"])


def test_a_scoring_function_among_all_installed_packages_is_one_file(tmp_path, monkeypatch):
    """Else all that it imports would be read, and all that that imports: of PyTorch thousands of files."""
    installed = tmp_path / "site-packages"
    installed.mkdir()
    (installed / "large_package.py").write_text("")
    (installed / "installed_score.py").write_text(
        "import large_package\n\n\ndef score(data_source, solution_str, ground_truth, extra_info):\n    return 1.0\n"
    )
    monkeypatch.syspath_prepend(installed)
    assert source_files("installed_score") == {installed / "installed_score.py"}
