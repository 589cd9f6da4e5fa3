"""Stand-in for an agent of Ray's on one host: says that it serves no port, and ends with the raylet, which would end without it. Ray's own
notice only after a minute that the raylet is gone; the one that takes this one's place has its death signal too.

    PYTHON ray_agent.py PYTHON AGENT.py --session-dir=... --node-id=...

Of the dashboard's agent (metrics, jobs, pages of the dashboard) a run reads nothing. That for runtime environments is asked when a task has
one, which none of a run has: whoever brings such tasks finds its port, and the first connection makes this process the agent itself.
It imports the standard library alone, as it is executed beside everything else that starts.
"""

import ctypes
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence

from moerl.cluster.forks.title import set_title

_PR_SET_PDEATHSIG = 1
_NOT_SERVED = -1
_UNSERVED = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
_SERVED = "runtime_env_agent_port"


def main(command: Sequence[str]) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(os.environ["RAY_RAYLET_PID"]):  # it was killed before, and nobody will tell of it again
        return
    options = dict(word[2:].split("=", 1) for word in command if word.startswith("--") and "=" in word)
    if "runtime-env-agent-port" not in options:
        set_title(["ray::DashboardAgent"])
        for name in _UNSERVED:
            _tell_port(options, name, _NOT_SERVED)
        while True:
            signal.pause()
    set_title(["ray::RuntimeEnvAgent"])
    address = socket.getaddrinfo(options["node-ip-address"], int(options["runtime-env-agent-port"]), type=socket.SOCK_STREAM)[0]
    with socket.socket(*address[:3]) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address[4])
        listener.listen()
        port = listener.getsockname()[1]
        _tell_port(options, _SERVED, port)
        select.select([listener], [], [])
    served = [f"--runtime-env-agent-port={port}" if word.startswith("--runtime-env-agent-port=") else word for word in command]
    os.execv(served[0], served)  # whoever has connected is refused, and Ray asks again


def _tell_port(options: dict[str, str], name: str, port: int) -> None:
    """As Ray's own persist_port: a file of the session that the raylet waits for. It appears with what is in it."""
    file = os.path.join(options["session-dir"], f"{name}_{options['node-id']}")
    with open(f"{file}.tmp", "w") as written:
        written.write(str(port))
    os.replace(f"{file}.tmp", file)


if __name__ == "__main__":
    main(sys.argv[1:])
