"""Store at which the train ranks make their process groups: torch's TCPStore, on one address.

It knows no secret. moerl's own store does (cluster/secret_store.py), but is called through Python: every rank of a group of gloo's asks it
twice for every other one, and threads of NCCL's would wait for the interpreter of a rank that hangs in it. gloo and NCCL open ports
themselves, which ask for no proof either.
"""

import socket
from datetime import timedelta

from torch.distributed import TCPStore


def open_store(host: str, num_ranks: int) -> TCPStore:
    """On a free port of the address `host`, and on no other: left to itself it listens on all."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = socket.create_server((host, 0), family=family, backlog=2048)
    port = server.getsockname()[1]
    return TCPStore(host, port, num_ranks, is_master=True, wait_for_workers=False, master_listen_fd=server.detach())


def join_store(host: str, port: int, num_ranks: int, seconds: float) -> TCPStore:
    """RuntimeError after `seconds` in which it did not answer."""
    return TCPStore(host, port, num_ranks, is_master=False, timeout=timedelta(seconds=seconds))
