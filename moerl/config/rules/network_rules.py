"""The rules of network.variables: names that can be set, and that are not moerl's own."""

import re
from collections.abc import Iterator

from moerl.config.rules.facts import Facts
from moerl.config.schema.run_config import RunConfig
from moerl.types.errors import Problem, problem

_OWNED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES")
_INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def network_problems(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    """Every rule of `network` that is broken."""
    network = config.network
    for name, value in network.variables.items():
        path = f"network.variables.{name}"
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            reason = "letters, digits and underscores are what a shell and every library can read"
            yield problem(path, value, "is not the name of an environment variable", reason, "network.variables.NCCL_IB_TIMEOUT=22")
        elif name in _OWNED:
            reason = "moerl and Ray tell each rank its place"
            yield problem(path, value, "cannot be set", reason, "leave it out")
        elif name in _INTERFACES and network.interface is not None:
            reason = f"network.interface={network.interface} sets it"
            yield problem(path, value, "is given twice", reason, "one of the two")
