"""Way of a run's pushes (weights.transport), from the hosts of its sides."""

import socket
from collections.abc import Sequence
from typing import Literal

from moerl.types.errors import WeightError
from moerl.types.push import Transport


def resolve_transport(
    transport: Literal["auto", "ipc", "nccl", "disk"], *, source_hosts: Sequence[str], receiver_hosts: Sequence[str], shares_gpus: bool
) -> Transport:
    """auto: ipc if every trainer rank and every receiver run on one host, else nccl. That is relay if servers share the trainer's GPUs and
    every one has a rank on each of its hosts. WeightError for a host name that does not resolve."""
    if transport == "auto":
        common = set.intersection(*(_addresses(host) for host in (*source_hosts, *receiver_hosts)))
        transport = "ipc" if common else "nccl"
    return "relay" if transport == "nccl" and shares_gpus and set(receiver_hosts) <= set(source_hosts) else transport


def _addresses(host: str) -> set[str]:
    """The host's addresses; "here" stands for all of this host's own."""
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError as error:
        raise WeightError(f"host = {host!r}: does not resolve ({error}); give an address this host can reach") from error
    return {"here" if _is_local(address) else address for address in found}


def _is_local(address: str) -> bool:
    """Only an address of this host can be bound."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
