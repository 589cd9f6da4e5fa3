"""Stacks of experts: their parts by name, in any order, make the whole again."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from moerl.models.expert_stacks import restack, stack_of, stack_templates, stored_names
from moerl.models.families.family_table import FAMILIES
from moerl.models.hf_checkpoint import HFCheckpoint


@given(st.permutations(range(5)), st.permutations(range(3)))
def test_parts_in_any_order_make_their_stack_when_the_last_one_came(first, second):
    stacks = {"a": torch.arange(5 * 6).reshape(5, 2, 3), "b": torch.arange(3.0)}
    parts = [(f"a[{i}]", stacks["a"][i]) for i in first]
    parts += [("plain", torch.ones(2))] + [(f"b[{i}]", stacks["b"][i]) for i in second]
    found = dict(restack(parts, {"a": 5, "b": 3}))
    assert list(found) == ["a", "plain", "b"] == stored_names(name for name, _ in parts)
    assert all(found[name].equal(stacks[name]) for name in stacks)


def test_a_stack_with_a_part_missing_is_never_passed_on():
    with pytest.raises(AssertionError, match="parts are missing of a"):
        list(restack([("a[0]", torch.ones(1))], {"a": 2}))


def test_a_checkpoint_gives_a_part_of_a_stack(tmp_path):
    stack = torch.arange(24.0).reshape(4, 2, 3)
    save_file({"experts": stack}, tmp_path / "model.safetensors")
    with HFCheckpoint(tmp_path) as held:
        assert held.read("experts[2]").equal(stack[2])
        assert held.read("experts").equal(stack)


def test_names_of_parts_are_those_of_rules_alone():
    assert (stack_of("layers.0.w[12]"), stack_of("layers.0.w"), stack_of("w[x]")) == (("layers.0.w", 12), None, None)
    assert [len(stack_templates(FAMILIES[name])) for name in ("gpt_oss", "mixtral")] == [4, 0]
