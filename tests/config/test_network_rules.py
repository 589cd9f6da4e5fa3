"""What network.variables, train.environment and rollout.environment may hold."""

import pytest
from typer.testing import CliRunner

from moerl.__main__ import app
from moerl.config.load import load
from moerl.types.errors import ConfigError

DEMO = "recipe=grpo-tiny-moe-1n2g-sync"


def problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load([DEMO, *overrides])
    return [problem.path for problem in caught.value.problems]


def test_variables_of_any_library_can_be_given_as_text_or_number():
    network = load([DEMO, "network.variables.NCCL_IB_SL=3", "network.variables.NCCL_DEBUG=WARN"]).network
    assert network.variables == {"NCCL_IB_SL": 3, "NCCL_DEBUG": "WARN"}


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "a-b"])
def test_names_that_moerl_sets_or_no_library_reads_are_refused(name: str):
    assert problems(f"+network.variables.{name}=1") == [f"network.variables.{name}"]


def test_an_interface_is_given_once():
    path = "network.variables.NCCL_SOCKET_IFNAME"
    assert problems("network.interface=lo", f"{path}=lo") == [path]
    assert load([DEMO, f"{path}=lo"]).network.interface is None


SEGMENTS = "PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True'"


def test_ranks_and_servers_have_variables_of_their_own():
    config = load([DEMO, f"train.environment.{SEGMENTS}", "rollout.environment.VLLM_LOGGING_LEVEL=DEBUG"])
    assert config.train.environment == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert config.rollout.environment == {"VLLM_LOGGING_LEVEL": "DEBUG"}


@pytest.mark.parametrize(
    ("words", "paths"),
    [
        (("+train.environment.RANK=1", "+rollout.environment.a-b=1"), ["train.environment.RANK", "rollout.environment.a-b"]),
        (("+network.variables.X=1", "+train.environment.X=2"), ["train.environment.X"]),
        (("+train.environment.LD_LIBRARY_PATH=/lib",), ["train.environment.LD_LIBRARY_PATH"]),
    ],
)
def test_a_variable_that_cannot_be_or_would_do_nothing_is_refused(words, paths):
    assert problems(*words) == paths


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
@pytest.mark.parametrize("where", ["network.variables", "rollout.environment"])
def test_sglang_has_no_expandable_segments(where, name):
    """The ranks may. PyTorch has two names for its settings."""
    words = (f"+{where}.{name}='expandable_segments:True'", "rollout.engine=sglang", "deterministic=false")
    assert f"{where}.{name}" in problems(*words)


def test_who_asks_what_variables_of_ranks_are_hears_which_pushes_expandable_segments_go_with():
    told = CliRunner().invoke(app, ["explain", "train.environment"]).output
    assert "pidfd_getfd" in told
    assert "ptrace_scope" in told
