"""Page and file of a memory plan hold every figure, and say without colour what is what."""

import json
import re
from html.parser import HTMLParser

import pytest
from typer.testing import CliRunner

from moerl.__main__ import app
from moerl.config.load import load
from moerl.planner.fixed_memory import GIB
from moerl.planner.memory_page import page, write_plan
from moerl.planner.memory_plan import memory_plan
from moerl.planner.rank_memory import PHASES


class Parts(HTMLParser):
    """Titles of the parts of bars, and the letters shown in them."""

    def __init__(self):
        super().__init__()
        self.titles, self.tags, self._open = [], set(), []

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self._open.append(tag)

    def handle_data(self, data):
        if self._open and self._open[-1] == "title" and ":" in data:
            self.titles.append(data)

    def handle_endtag(self, tag):
        while self._open and self._open.pop() != tag:
            pass


@pytest.fixture(scope="module")
def plan():
    return memory_plan(load(["recipe=grpo-qwen3-235b-16n8g-sync", "algorithm=ppo"]))


def test_the_page_has_a_bar_for_every_stage_and_phase_with_every_kind(plan):
    parts = Parts()
    parts.feed(page(plan))
    sizes = [(kind, float(size.split()[0])) for kind, size in (title.split(": ") for title in parts.titles)]
    wanted = []
    seen = set()
    for rank in plan.ranks:  # neighbours that need alike are drawn once
        key = json.dumps([rank.phases, rank.margins])
        if key not in seen:
            for phase in rank.phases:
                wanted += [(kind, round(size / GIB, 2)) for kind, size in rank.phases[phase].items() if size]
                wanted.append(("margin", round(rank.margins[phase] / GIB, 2)))
        seen.add(key)
    assert sizes == wanted
    assert "script" not in parts.tags


def test_every_kind_has_a_letter_and_a_pattern_of_its_own(plan):
    text = page(plan)
    legend = re.findall(r"url\(#p(\d+)\)\" stroke=\"#333\"/></svg>(\w+)", text)
    patterns = re.findall(r'<pattern id="p\d+".*?</pattern>', text, re.DOTALL)
    assert len({number for number, _ in legend}) == len({letter for _, letter in legend}) == len(legend) == len(patterns)
    without_colour = [re.sub(r'fill="#\w{6}"|id="p\d+"', "", pattern) for pattern in patterns]
    assert len(set(without_colour)) == len(patterns)


def test_the_file_has_bytes_of_every_stage_phase_and_node(plan, tmp_path):
    write_plan(plan, tmp_path / "sub" / "plan.json", tmp_path / "other" / "plan.html")
    assert (tmp_path / "other" / "plan.html").read_text() == page(plan)
    read = json.loads((tmp_path / "sub" / "plan.json").read_text())
    assert read == plan.to_json()
    for rank, found in zip(plan.ranks, read["ranks"], strict=True):
        assert {phase: sum(kinds.values()) for phase, kinds in found["phases"].items()} == {phase: rank.device(phase) for phase in PHASES}
        assert set(rank.phases) == set(PHASES)
    assert read["worst"] == {"stage": plan.worst.stage, "phase": plan.worst.worst, "bytes": plan.worst.most}
    assert read["server"]["requests_of_max_context"] == plan.server.requests(8192)


def test_a_recipe_without_a_model_beside_its_policy_has_a_page():
    memory = memory_plan(load(["recipe=grpo-tiny-moe-1n2g-sync"]))
    parts = Parts()
    parts.feed(page(memory))
    assert {"weights", "optimizer", "margin"} <= {title.split(":")[0] for title in parts.titles}


def test_a_file_of_the_memory_is_refused_where_the_memory_is_left_out(tmp_path):
    told = CliRunner().invoke(app, ["plan", "recipe=grpo-tiny-moe-1n2g-sync", "--only=push", f"--html={tmp_path}/plan.html"])
    assert told.exit_code == 2 and "--html" in told.output
