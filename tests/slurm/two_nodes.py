"""A Slurm of two nodes and a spare one on this machine: each is a set of namespaces (network, hostname, mounts, processes), with an
address of its own.

Controller and nodes hang on a bridge that only they see, so that several such clusters run side by side. Ending the first process of a
node ends every process on it, as a power cut would. Needs root, and Debian's slurm-wlm and munge.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from moerl.cluster.descendants import end_with_parent

NODES = ("n0", "n1")
SPARE = "n2"
"""Slurm knows nothing of it until `add_spare`."""
GPUS = 8
"""Of a node, as Slurm counts them: there are no devices."""
_SLURMS_OWN = ("slurmd", "slurmstepd", "slurmctld", "slurmscriptd")
"""Processes; the one that runs a job's script is called slurm_script, and is the job's."""

_ADDRESSES = {"ctl": "10.77.0.1", "n0": "10.77.0.2", "n1": "10.77.0.3", "n2": "10.77.0.4"}
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "unshare", "nsenter", "ip")
_CONF = """\
ClusterName=test
SlurmctldHost=ctl({ctl})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge.sock
CredType=cred/munge
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool.%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.%n.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
ReturnToService=2
MpiDefault=none
MailProg=/bin/true
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
KillWait=10
SlurmdTimeout=20
NodeName=n0 NodeAddr={n0} CPUs=2 RealMemory=4000 Gres=gpu:{gpus} State=UNKNOWN
NodeName=n1 NodeAddr={n1} CPUs=2 RealMemory=4000 Gres=gpu:{gpus} State=UNKNOWN
NodeName=n2 NodeAddr={n2} CPUs=2 RealMemory=4000 Gres=gpu:{gpus} State=FUTURE
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=90
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
"""


def why_not_here() -> str | None:
    """Why there can be no such cluster here; None if there can."""
    if os.geteuid() != 0:
        return "needs root, for namespaces and daemons"
    absent = [name for name in _PROGRAMS if shutil.which(name) is None]
    return f"not installed: {', '.join(absent)} (make test-slurm installs them)" if absent else None


class TwoNodes:
    """Started by the constructor; `close` ends every process of it."""

    def __init__(self, root: Path):
        self.root = root
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        self._daemons: list[subprocess.Popen[bytes]] = []
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    @property
    def nodes(self) -> list[str]:
        """That are on."""
        return [name for name in (*NODES, SPARE) if name in self._holders]

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.root / "slurm.conf")}

    def run(self, *command: str | Path, node: str = "ctl", **options: object) -> "subprocess.CompletedProcess[str]":
        """On a node, or beside the controller; options as of subprocess.run."""
        options = {"capture_output": True, "text": True, "timeout": 120, "env": self.environment, **options}
        return subprocess.run([*self._enter(node), *map(str, command)], check=False, **options)  # type: ignore[call-overload]

    def start(self, *command: str, node: str, env: dict[str, str]) -> "subprocess.Popen[bytes]":
        """On a node; its output goes nowhere."""
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return subprocess.Popen([*self._enter(node), *command], env=env, **quiet)  # type: ignore[call-overload]

    def processes(self, node: str) -> list[psutil.Process]:
        """Of a node, but for its first and Slurm's own."""
        first = self._first(node)
        namespace = os.readlink(f"/proc/{first}/ns/pid")
        return [
            process
            for process in psutil.process_iter(["name", "pid"])
            if _link(f"/proc/{process.pid}/ns/pid") == namespace and process.pid != first and process.info["name"] not in _SLURMS_OWN
        ]

    def power_off(self, node: str) -> None:
        """Every process of it, Slurm's daemon too, ends at once."""
        psutil.Process(self._first(node)).kill()
        self._holders.pop(node).wait()

    def power_on(self, node: str, *, update: str | None = None) -> None:
        """`update`: a state to set by hand."""
        self._hold(node)
        self._connect(node)
        self._start_slurmd(node)
        if update is not None:
            self.run("scontrol", "update", f"NodeName={node}", f"State={update}")
        self.wait_for(f"{node} to serve", lambda: self.run("sinfo", "-h", "-n", node, "-o", "%T").stdout.strip() in ("idle", "allocated"))

    def add_spare(self) -> None:
        """A third node, for jobs that lost one."""
        self.power_on(SPARE, update="IDLE")

    def remove_spare(self) -> None:
        self.power_off(SPARE)
        self.run("scontrol", "update", f"NodeName={SPARE}", "State=FUTURE")

    def wait_for(self, what: str, condition: Callable[[], bool], seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s\n{self.logs()}"
            time.sleep(0.1)

    def logs(self) -> str:
        return "\n".join(f"== {log.name}\n{log.read_text(errors='replace')[-2000:]}" for log in sorted(self.root.glob("*.log")))

    def close(self) -> None:
        """A namespace's first process takes all others of it along; munged is in none."""
        for holder in self._holders.values():
            for process in psutil.Process(holder.pid).children():
                process.kill()
            holder.wait()
        for daemon in self._daemons:
            daemon.kill()
            daemon.wait()

    # -- parts -------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        (self.root / "state").mkdir()
        (self.root / "slurm.conf").write_text(_CONF.format(root=self.root, gpus=GPUS, **_ADDRESSES))
        (self.root / "gres.conf").write_text(f"Name=gpu File={self.root}/gpu[0-{GPUS - 1}]\n")
        for index in range(GPUS):
            (self.root / f"gpu{index}").touch()
        (self.root / "hosts").write_text("127.0.0.1 localhost\n" + "".join(f"{at} {name}\n" for name, at in _ADDRESSES.items()))
        (self.root / "munge.key").write_bytes(os.urandom(1024))
        (self.root / "munge.key").chmod(0o400)
        for name in ("ctl", *NODES):
            self._hold(name)
        for name in NODES:
            self._connect(name)
        files = [f"--{option}={self.root}/munge.{end}" for option, end in _MUNGE_FILES.items()]
        self._daemon("munged", "munged", "--foreground", "--force", *files)
        self.wait_for("munged", (self.root / "munge.sock").exists)
        self._daemon("slurmctld", *self._enter("ctl"), "slurmctld", "-D", "-f", f"{self.root}/slurm.conf")
        for name in NODES:
            self._start_slurmd(name)
        self.wait_for("two idle nodes", lambda: self.run("sinfo", "-h", "-o", "%D %T").stdout == "2 idle\n")

    def _start_slurmd(self, name: str) -> None:
        (self.root / f"spool.{name}").mkdir(exist_ok=True)
        self._daemon(f"slurmd-{name}", *self._enter(name), "slurmd", "-D", "-N", name, "-f", f"{self.root}/slurm.conf")

    def _hold(self, name: str) -> None:
        """Namespaces that last as long as their first process."""
        namespaces = ["--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        init = Path(__file__).with_name("namespace_init.py")
        command = ["unshare", *namespaces, sys.executable, str(init)]
        self._holders[name] = subprocess.Popen(command, stderr=subprocess.DEVNULL, preexec_fn=end_with_parent)
        self.wait_for(f"namespaces of {name}", lambda: bool(psutil.Process(self._holders[name].pid).children()), 10)
        self._shell(name, f"hostname {name}; mount --bind {self.root}/hosts /etc/hosts; mount -t tmpfs shm /dev/shm; ip link set lo up")
        if name == "ctl":
            self._shell(name, f"ip link add br0 type bridge; ip addr add {_ADDRESSES[name]}/24 dev br0; ip link set br0 up")

    def _connect(self, name: str) -> None:
        pid = self._first(name)
        # By network namespace alone: the pid is one of this process's own namespace.
        into = ["nsenter", "--target", str(self._first("ctl")), "--net", "sh", "-ec"]
        # The end of a node's first process takes its side of the cable along, a little later.
        cable = f"ip link del {name} 2>/dev/null || true; ip link add {name} type veth peer name eth0 netns {pid}"
        subprocess.run([*into, f"{cable}; ip link set {name} master br0 up"], check=True)
        self._shell(name, f"ip addr add {_ADDRESSES[name]}/24 dev eth0; ip link set eth0 up")

    def _first(self, name: str) -> int:
        return psutil.Process(self._holders[name].pid).children()[0].pid

    def _enter(self, name: str) -> list[str]:
        return ["nsenter", "--target", str(self._first(name)), "--net", "--uts", "--mount", "--pid", f"--wd={os.getcwd()}"]

    def _shell(self, name: str, script: str) -> None:
        done = self.run("sh", "-ec", script, node=name)
        assert done.returncode == 0, done.stderr

    def _daemon(self, name: str, *command: str) -> None:
        with (self.root / f"{name}.log").open("wb") as log:
            self._daemons.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environment))


def _link(path: str) -> str | None:
    try:
        return os.readlink(path)
    except OSError:  # it has just ended, or is of the system
        return None


_MUNGE_FILES = {"socket": "sock", "key-file": "key", "pid-file": "pid", "log-file": "munged", "seed-file": "seed"}
