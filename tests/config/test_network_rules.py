"""What network.variables may hold."""

import pytest

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
