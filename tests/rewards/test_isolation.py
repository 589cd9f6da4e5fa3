"""What a check can reach, tried by checks: of each level of `reward.terms.*.isolation`, on the kernel that runs the tests."""

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from moerl.config.schema.data_config import Isolation, RewardConfig, RewardTerm
from moerl.rewards import worker_sandbox
from moerl.rewards.reward_pool import RewardPool
from moerl.types.groups import Prompt, Score

FUNCTIONS = """
import ctypes, fcntl, os, pathlib, signal, socket, subprocess, sys, tempfile, threading, time

libc = ctypes.CDLL(None, use_errno=True)

def call(number, *arguments):
    # A system call of x86-64 or ARM, by number, since Python has no function for it.
    if libc.syscall(number, *arguments) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

def run(data_source, solution_str, ground_truth, extra_info):
    # The response is executed: what a function, or a completion that a function evaluates, could do.
    names = {**globals(), "place": ground_truth, "driver": extra_info["driver"]}
    exec(solution_str, names)
    return names.get("value", 1.0)

def bomb(data_source, solution_str, ground_truth, extra_info):
    while True:  # each child goes on to fork
        os.fork()

def escape(data_source, solution_str, ground_truth, extra_info):
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.setsid()
        escaped = os.fork()
        if escaped == 0:
            time.sleep(600)
        os.write(writing, str(escaped).encode())
        os._exit(0)
    os.wait()
    return float(os.read(reading, 20))
"""
X86 = os.uname().machine == "x86_64"
NUMBERS = {"ptrace": 101 if X86 else 117, "io_uring_setup": 425, "bpf": 321 if X86 else 280, "unshare": 272 if X86 else 97}

REFUSED_EVERYWHERE = {
    "file outside": "open(place + '/new', 'w')",
    "file outside, by a child": "subprocess.run(['/bin/sh', '-c', f'echo > {place}/new'], check=True)",
    "directory outside": "os.mkdir(place + '/new')",
    "file of somebody emptied": "open(place + '/kept', 'r+').truncate(0)",
    "file of somebody emptied by path": "os.truncate(place + '/kept', 0)",
    "flags of a file": "fcntl.ioctl(os.open(place + '/kept', os.O_RDONLY), 0x40086602, bytes(8))",
    "version of a file": "fcntl.ioctl(os.open('/etc/passwd', os.O_RDONLY), 0x40087602, bytes(8))",
    "lease of a file, for which others wait": "fcntl.fcntl(os.open(sys.modules['moerl_reward_checks'].__file__, 0), fcntl.F_SETLEASE, 1)",
    "file removed": "os.remove(place + '/kept')",
    "file renamed": "os.rename(place + '/kept', tempfile.gettempdir() + '/taken')",
    "link into the own directory": "os.link(place + '/kept', tempfile.gettempdir() + '/linked')",
    "mode changed": "os.chmod(place + '/kept', 0o777)",
    "times changed": "os.utime(place + '/kept', (0, 0))",
    "owner changed": "os.chown(place + '/kept', 0, 0)",
    "file read": "open(place + '/kept').read()",
    "home listed": "os.listdir(os.path.expanduser(f'~{__import__(\"pwd\").getpwuid(os.getuid()).pw_name}'))",
    "environment of the driver": "open(f'/proc/{driver}/environ').read()",
    "memory of the driver": "open(f'/proc/{driver}/mem', 'rb')",
    "driver signalled": "os.kill(driver, 0)",
    "supervisor killed": "os.kill(os.getppid(), signal.SIGKILL)",
    "driver limited": "import resource; resource.prlimit(driver, resource.RLIMIT_CPU)",
    "driver moved to one core": "os.sched_setaffinity(driver, {0})",
    "priority of all": "os.setpriority(os.PRIO_USER, 0, 19)",
    "message to a socket by name": ("socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'a', place + '/none')"),
    "memory of the worker, by a child": "subprocess.run([sys.executable, '-c', f'open(\"/proc/{os.getpid()}/mem\", \"rb\")'], check=True)",
    "driver traced": f"call({NUMBERS['ptrace']}, 16, driver, 0, 0)",
    "io_uring": f"call({NUMBERS['io_uring_setup']}, 8, 0)",
    "bpf": f"call({NUMBERS['bpf']}, 0, 0, 0)",
    "namespace": f"call({NUMBERS['unshare']}, 0x10000000)",
    "namespace of a clone": f"call({56 if X86 else 220}, 0x10000000 | 17, 0, 0, 0, 0)",
    "local socket": "socket.socket(socket.AF_UNIX)",
    "packets": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "netlink": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "family with high bits": f"call({41 if X86 else 198}, ctypes.c_uint64(1 << 32 | 1), 1, 0)",
    "larger limit": "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2 ** 40, 2 ** 40))",
}
REFUSED_IN_STRICT = {
    "TCP": "socket.create_connection(('127.0.0.1', 9))",
    "TCP listening": "socket.create_server(('127.0.0.1', 0))",
    "UDP": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
    "IPv6": "socket.socket(socket.AF_INET6)",
}
ALLOWED = {
    "temporary files": "with tempfile.TemporaryDirectory() as d: pathlib.Path(d, 'a').write_text('b'); os.rename(d + '/a', d + '/c')",
    "home": "pathlib.Path('~/a').expanduser().write_text('b')",
    "Python in a child": "value = float(subprocess.run([sys.executable, '-c', 'print(1.0)'], capture_output=True, check=True).stdout)",
    "a program": "subprocess.run(['ls', '/usr'], check=True, stdout=subprocess.DEVNULL)",
    "a shell with a pipe": "subprocess.run('echo a | grep -q a', shell=True, check=True)",
    "threads": "thread = threading.Thread(target=int); thread.start(); thread.join()",
    "package imported late": "import sympy, decimal, sqlite3",
    "file beside the function": "assert 'def run' in open(sys.modules['moerl_reward_checks'].__file__).read()",
    "pair of sockets": "socket.socketpair()",
    "smaller limit": "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (99, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))",
    "own descriptors": "os.listdir('/proc/self/fd')",
    "child signalled": "child = subprocess.Popen(['sleep', '600']); child.kill(); assert child.wait() == -9",
    "numbers of chance": "os.urandom(4); open('/dev/urandom', 'rb').read(4); open('/dev/null', 'w').write('a')",
    "no secret": "assert not {'WANDB_API_KEY', 'HF_TOKEN'} & set(os.environ), os.environ",
}


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("HF_TOKEN", "secret")
    file = tmp_path / "code" / "checks.py"
    file.parent.mkdir()
    file.write_text(FUNCTIONS)
    return file


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    place = tmp_path / "elsewhere"
    place.mkdir()
    (place / "kept").write_text("kept")
    return place


def terms(functions: Path, name: str, *levels: Isolation) -> dict[str, RewardTerm]:
    return {level: RewardTerm(kind="function", path=f"{functions}:{name}", isolation=level) for level in levels}


def score_all(terms: dict[str, RewardTerm], texts: dict[str, str], place: Path) -> dict[str, Score]:
    prompt = Prompt(index=0, token_ids=(1,), text="", data_source="", ground_truth=str(place), extra_info={"driver": os.getpid()})

    async def main() -> dict[str, Score]:
        async with RewardPool(RewardConfig(terms=terms, timeout_seconds=30.0)) as pool:
            return {name: await pool.score(prompt, text) for name, text in texts.items()}

    return asyncio.run(main())


def not_refused(scores: dict[str, Score]) -> dict[str, Score]:
    errors = ("PermissionError", "CalledProcessError", "Invalid cross-device link", "ValueError: not allowed to raise maximum limit")
    return {name: score for name, score in scores.items() if not any(said in str(score.error) for said in errors)}


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_strict_check_reaches_nothing_outside_and_does_its_work(functions, elsewhere):
    refused = REFUSED_EVERYWHERE | REFUSED_IN_STRICT
    scores = score_all(terms(functions, "run", "strict"), refused | ALLOWED, elsewhere)
    assert not_refused({name: scores[name] for name in refused}) == {}
    assert {name: scores[name].error for name in ALLOWED if scores[name].reward != 1.0} == {}
    assert [(file.name, file.read_text()) for file in elsewhere.iterdir()] == [("kept", "kept")]


def test_a_check_with_network_connects_and_is_strict_otherwise(functions, elsewhere):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        connect = {"TCP": f"socket.create_connection(('127.0.0.1', {port}))", "name": f"socket.create_connection(('localhost', {port}))"}
        scores = score_all(terms(functions, "run", "network"), REFUSED_EVERYWHERE | connect | ALLOWED, elsewhere)
    assert not_refused({name: scores[name] for name in REFUSED_EVERYWHERE}) == {}
    assert {name: scores[name].error for name in (*connect, *ALLOWED) if scores[name].reward != 1.0} == {}
    assert [(file.name, file.read_text()) for file in elsewhere.iterdir()] == [("kept", "kept")]


def test_of_a_working_directory_that_is_searched_for_modules_the_modules_alone_are_read(functions, elsewhere, monkeypatch):
    """As `python -m moerl train` does, in jobs of Slurm: the run's directory lies there, with the token of the job."""
    (elsewhere / "package").mkdir()
    (elsewhere / "package" / "__init__.py").write_text("from package import inner")
    (elsewhere / "package" / "inner.py").touch()
    (elsewhere / "module.py").touch()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setattr(sys, "path", [*sys.path, str(elsewhere)])
    texts = {"file": "open(place + '/kept').read()", "modules": "import module, package"}
    scores = score_all(terms(functions, "run", "strict"), texts, elsewhere)
    assert not_refused({"file": scores["file"]}) == {}
    assert scores["modules"].error is None


def test_a_function_in_a_package_without_init_reads_what_lies_beside_it(elsewhere, monkeypatch):
    (folder := elsewhere / "unmarked" / "deep").mkdir(parents=True)
    (folder / "later.py").write_text("value = 0.5")
    (folder / "function.py").write_text("def run(**_):\n    from unmarked.deep.later import value\n    return value\n")
    monkeypatch.chdir(elsewhere)
    monkeypatch.setattr(sys, "path", [*sys.path, str(elsewhere)])
    term = RewardTerm(kind="function", path="unmarked.deep.function:run", isolation="strict")
    assert score_all({"own": term}, {"any": ""}, elsewhere)["any"] == Score(reward=0.5, parts={"own": 0.5})


def test_modules_of_a_working_directory_are_found_whatever_else_lies_there(elsewhere, monkeypatch):
    """A mount whose server is away, or a folder that goes meanwhile, kept every worker from starting; extension modules were missed."""
    names = {"away": None, "data": "table.json", "fast": "inner.cpython-311-x86_64-linux-gnu.so", "package": "inner.py"}
    for folder, file in names.items():
        (elsewhere / folder).mkdir()
        if file is not None:
            (elsewhere / folder / file).touch()
    for file in ("extension.abi3.so", "module.py"):
        (elsewhere / file).touch()

    def unless_away(listed):
        def lists(path="."):
            if os.path.basename(path) == "away":
                raise OSError(errno.ENOTCONN, "Transport endpoint is not connected", str(path))
            return listed(path)

        return lists

    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, unless_away(getattr(os, name)))
    found = {path.relative_to(elsewhere).name for path, _ in worker_sandbox._modules_of(elsewhere)}
    assert found == {"", "extension.abi3.so", "fast", "module.py", "package"}


def test_each_term_has_its_own_level(functions, elsewhere):
    text = """
value = {}
for name, attempt in (("network", "socket.socket()"), ("file", "open(place + '/new', 'w')"), ("secret", "os.environ['WANDB_API_KEY']")):
    try:
        value[name] = eval(attempt) is not None
    except (OSError, KeyError):
        value[name] = False
value["score"] = 1.0
"""
    score = score_all(terms(functions, "run", "strict", "off", "network"), {"": text}, elsewhere)[""]
    assert score.error is None and score.reward == 3.0
    found = {level: [score.parts[f"{level}.{name}"] for name in ("network", "file", "secret")] for level in ("strict", "network", "off")}
    assert found == {"strict": [0.0, 0.0, 0.0], "network": [1.0, 0.0, 0.0], "off": [1.0, 1.0, 1.0]}


def test_a_bomb_of_forks_is_bounded_and_gone_with_the_pool(functions, elsewhere):
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    score = score_all(terms(functions, "bomb", "strict"), {"": ""}, elsewhere)[""]
    assert score.error is not None and "more than 256 processes and threads" in score.error
    assert {process.pid for process in psutil.Process().children(recursive=True)} <= before


@pytest.mark.parametrize("level", ["strict", "network"])
def test_what_a_check_prints_arrives_and_the_file_it_goes_to_is_out_of_reach(functions, elsewhere, level, capfd):
    """Standard error of a driver is a file here, as in a job of Slurm."""
    texts = {
        "read": "os.pread(2, 9, 0)",
        "truncated": "os.ftruncate(2, 0)",
        "opened": "open('/proc/self/fd/2', 'r+').seek(0)",
        "printed": "print('said by a check'); sys.stdout.flush(); subprocess.run('echo said by a child >&2', shell=True, check=True)",
        "flood": "for _ in range(64): os.write(2, b'a' * 2 ** 16)",
    }
    os.write(2, b"of the driver\n")
    scores = score_all(terms(functions, "run", level), texts, elsewhere)
    assert [name for name, score in scores.items() if score.error is None] == ["printed", "flood"]
    said = capfd.readouterr().err
    assert said.startswith("of the driver\nsaid by a check\nsaid by a child\n") and len(said) < 1.1 * 2**20
    assert said.endswith("nothing more of it is shown]\n")


@pytest.mark.parametrize("level", ["strict", "off"])
def test_a_child_in_a_session_of_its_own_ends_with_the_pool(functions, elsewhere, level, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    prompt = Prompt(index=0, token_ids=(1,), text="", data_source="", ground_truth="", extra_info={})

    async def main() -> int:
        async with RewardPool(RewardConfig(terms=terms(functions, "escape", level))) as pool:
            escaped = int((await pool.score(prompt, "")).reward)
            assert is_running(escaped)
            assert list(tmp_path.glob("moerl-reward-*"))
            return escaped

    assert not is_running(asyncio.run(main()))
    assert not list(tmp_path.glob("moerl-reward-*"))


def test_a_worker_whose_supervisor_is_killed_is_killed(functions, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    async def main() -> None:
        async with RewardPool(RewardConfig(terms=terms(functions, "run", "strict"))) as pool:
            [worker] = pool._slots[0].workers.values()
            [inner] = psutil.Process(worker.pid).children()
            os.kill(worker.pid, signal.SIGKILL)
            deadline = time.monotonic() + 60
            while is_running(inner.pid):
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)

    asyncio.run(main())
    assert not list(tmp_path.glob("moerl-reward-*"))


LACKING = """
import asyncio, errno, os, sys
from moerl.config.schema.data_config import RewardConfig, RewardTerm
from moerl.rewards import seccomp_filter
from moerl.rewards.reward_pool import RewardPool
from moerl.rewards.reward_rules import check_reward
from moerl.types.errors import ConfigError
from moerl.types.groups import Prompt

library = seccomp_filter._library()
context = library.seccomp_init(seccomp_filter._ALLOW)
seccomp_filter._refuse(library, context, "landlock_create_ruleset", errno=errno.ENOSYS)
library.seccomp_load(context)

async def score(term):
    try:
        async with RewardPool(RewardConfig(terms={"a": term})) as pool:
            return (await pool.score(Prompt(index=0, token_ids=(1,), text="", data_source="", ground_truth="", extra_info={}), "")).reward
    except ConfigError as error:
        return error.problems[0].reason

def function(isolation):
    return RewardTerm(kind="function", path=sys.argv[1], isolation=isolation)

for term in (function("strict"), function("off"), RewardTerm(kind="exact")):
    config = RewardConfig(terms={"a": term})
    print(*[problem.path + ": " + problem.reason for problem in check_reward(config)], asyncio.run(score(term)), sep="|")
"""


def test_without_landlock_functions_are_refused_unless_isolation_is_off_and_pure_terms_run(functions):
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", LACKING, f"{functions}:run"]
    functions.write_text("def run(data_source, solution_str, ground_truth, extra_info):\n    return 1.0\n")
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, check=True)
    refused, off, pure = done.stdout.splitlines()
    assert refused.startswith("reward.terms.a.isolation: it lacks Landlock of Linux 6.2 or newer (this kernel has none")
    assert "|isolation=strict: Landlock of Linux 6.2 or newer" in refused
    assert (off, pure) == ("1.0", "1.0")
    assert "checks without isolation, as set: reward.terms a" in done.stderr
    assert "checks without isolation: reward.terms a: this machine lacks Landlock" in done.stderr


def test_a_module_that_starts_threads_when_it_is_imported_is_refused(functions, elsewhere):
    from moerl.types.errors import ConfigError

    functions.write_text(FUNCTIONS + "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n")
    with pytest.raises(ConfigError) as caught:
        score_all(terms(functions, "run", "strict"), {}, elsewhere)
    assert "1 threads were started" in caught.value.problems[0].reason


def test_this_machine_lacks_nothing():
    assert worker_sandbox.missing() == []
