"""Whatever is written over a shipped recipe gives a configuration or a ConfigError: overrides drawn over the whole schema.

A change runs one part of sixteen, the one that MOERL_SHARD draws; together they have over 5,000 examples.
"""

import copy
import functools
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import shards
import yaml
from drawn_settings import overrides, words
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from moerl.check import checked_run
from moerl.config.compose import compose, options
from moerl.config.load import build, to_plain, to_yaml
from moerl.config.rules import engine_rules
from moerl.config.summary import summary
from moerl.rollout.server_commands import described
from moerl.types.errors import ConfigError

RECIPES = options("recipe")
EXAMPLES = 350
"""Of a part."""
CPU_SECONDS = 10.0
"""An example that takes longer counts over something that a person wrote: the check would not end."""

group = shards.drawn(os.environ.get("MOERL_SHARD"))
PARTS = range(1, shards.NUM_GROUPS + 1) if group is None else [group]


@functools.cache
def composed(recipe: str) -> dict[str, Any]:
    return compose([f"recipe={recipe}"])


def written_over(plain: dict[str, Any], changes: list[tuple[tuple[str, ...], Any]]) -> dict[str, Any]:
    """As overrides of the command line are, without Hydra, which takes 0.1 s to read a recipe again."""
    plain = copy.deepcopy(plain)
    for path, value in changes:
        section: Any = plain
        for name in path[:-1]:
            if not isinstance(section.get(name), dict):
                section[name] = {}
            section = section[name]
        section[path[-1]] = value
    return plain


@contextmanager
def limited() -> Iterator[None]:
    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise AssertionError(f"the check has computed for {CPU_SECONDS} s")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS, 0.5)  # again: one that is raised inside a callback is lost
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def gives_a_configuration_or_says_why_not(plain: dict[str, Any], *, starts: bool) -> bool:
    """Whether it is a configuration: one that can be printed, and read again."""
    with limited():
        try:
            config = checked_run(plain, starts=starts)
            refused = None
        except ConfigError as error:
            refused = error
        if refused is not None:
            assert refused.problems
            str(refused).encode()
            return False
        summary(config, described(config)).encode()
        assert to_yaml(build(yaml.safe_load(to_yaml(config)))) == to_yaml(config)
        assert to_plain(config).keys() == plain.keys() | to_plain(config).keys()
        return True


@pytest.fixture(autouse=True)
def _no_environments(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Of engines: each of their arguments would be read by a process of its own, for 5 s."""
    monkeypatch.setattr(engine_rules, "_CHECKOUT", tmp_path_factory.getbasetemp())


@pytest.mark.parametrize("part", PARTS)
def test_any_override_gives_a_configuration_or_says_why_not(part: int):
    @seed(part)
    @settings(max_examples=EXAMPLES, database=None, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(RECIPES), overrides(), st.booleans())
    def holds(recipe: str, changes: list[tuple[tuple[str, ...], Any]], starts: bool) -> None:
        gives_a_configuration_or_says_why_not(written_over(composed(recipe), changes), starts=starts)

    holds()


@pytest.mark.parametrize(
    "word", ["num_steps=" + "9" * 5000, "name=" + "[" * 2000 + "]" * 2000, "name=\udcff", "~eval=False", "x" * 300 + "=1"]
)
def test_a_word_that_ends_the_parser_is_refused(word: str):
    with pytest.raises(ConfigError) as caught:
        compose(["recipe=grpo-tiny-moe-1n2g-sync", word])
    str(caught.value).encode()


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "x" * 300},
        {"output_dir": "x" * 300},
        {"model": {"path": "x" * 300, "max_context": 4096}},
        {"reward": {"terms": {"sum": {"kind": "format", "pattern": "a{99999999999}"}}}},
        {"placement": {"topology": "x" * 300}},
        {"placement": {"nodes": 7168, "gpus_per_node": 16}},
        {"num_steps": 2**63},
        {"seed": 10**5000},
    ],
    ids=lambda changes: ".".join(changes),
)
def test_what_ended_the_check_once(changes: dict[str, Any]):
    assert not gives_a_configuration_or_says_why_not(composed("grpo-deepseek-v3-32n8g-sync") | changes, starts=True)


@pytest.mark.parametrize("part", PARTS)
def test_any_words_of_a_command_are_composed_or_refused(part: int):
    @seed(part)
    @settings(max_examples=40, database=None, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(RECIPES), st.lists(words(), max_size=2))
    def holds(recipe: str, further: list[str]) -> None:
        with limited():
            try:
                compose([f"recipe={recipe}", *further])
            except ConfigError as error:
                str(error).encode()

    holds()
