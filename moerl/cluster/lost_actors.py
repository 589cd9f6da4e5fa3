"""Words of Ray on an actor whose process is gone: whether it was killed or crashed, and, of a kill for memory, what the node had.

Ray kills processes itself when the memory of their node is nearly full. That error is no RayActorError, and has 90 lines.
"""

import re
from collections.abc import Sequence

from ray.exceptions import ActorUnschedulableError, OutOfMemoryError, RayActorError

LOST = (RayActorError, ActorUnschedulableError, OutOfMemoryError)
"""A call to an actor ends with one of them when its process is gone, or the node that it is to be on."""

_PID = re.compile(r"^\s*pid: (?P<pid>\d+)$", re.MULTILINE)
_LOST_NODE = re.compile(r"died because its node has died\..*?the actor's node was (?P<why>[^\n]+)", re.DOTALL)
_NODE = re.compile(r"Memory on the node \(IP: (?P<node>[^,)]+).*?\) was (?P<used>[\d.]+GB) used / (?P<limit>[\d.]+GB)")
_THRESHOLD = re.compile(r"exceeded threshold of \d+B \((?P<share>[\d.]+%)")
_KILLED = re.compile(
    r"^(?:Selected to kill: )?\(.*?task name=(?P<task>[^,]*),.*?pid=(?P<pid>\d+), actual memory used=(?P<used>[\d.]+GB)", re.M
)
_USERS = re.compile(r"^(?P<pid>\d+)\t(?P<used>[\d.]+)\t(?P<command>.*)$", re.MULTILINE)
_MOST_USERS, _COMMAND_LENGTH = 3, 60


def was_killed(error: BaseException) -> bool:
    """By a signal, for memory, or by a crash: not by an exception of its own."""
    return isinstance(error, OutOfMemoryError) or (isinstance(error, RayActorError) and not error.actor_init_failed)


def is_lost(error: BaseException) -> bool:
    """Whether the process was killed, or the node is gone that it was to be on: the same command may go on."""
    return was_killed(error) or isinstance(error, ActorUnschedulableError)


def lost_node(error: BaseException) -> str | None:
    """Ray's word on how the node of the actor was lost; None: that is not why it is gone."""
    found = _LOST_NODE.search(str(error))
    return None if found is None else found["why"]


def pid_of(error: RayActorError) -> str:
    """The number of its process."""
    found = _PID.search(str(error))
    return "?" if found is None else found["pid"]


def node_of(error: OutOfMemoryError) -> str:
    """Its address."""
    found = _NODE.search(str(error))
    return "?" if found is None else found["node"]


def memory_report(error: OutOfMemoryError) -> Sequence[str]:
    """Who was killed, where, and what memory the node had. Ray's own first lines, should another release of it word them differently."""
    text = str(error)
    node, threshold = _NODE.search(text), _THRESHOLD.search(text)
    if node is None or threshold is None:
        return text.splitlines()[:2]
    killed = ", ".join(f"process {each['pid']} ({each['task']}, {each['used']})" for each in _KILLED.finditer(text))
    users = [f"{user['used']}GB {user['command'][:_COMMAND_LENGTH]}" for user in _USERS.finditer(text)][:_MOST_USERS]
    return [
        f"Ray killed {killed or 'it'} for lack of memory on node {node['node']}: {node['used']} of {node['limit']} were used",
        f"it does so above {threshold['share']} (RAY_memory_usage_threshold), before the kernel does; the largest: {'; '.join(users)}",
    ]
