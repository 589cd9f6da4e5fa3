"""What is forked instead of executed cannot tell: environment, directory, files, signals, exit code; and it ends with its server."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from moerl.cluster.forks.fork_client import CannotForkError, ForkedChild, ForkedProcess, can_fork
from moerl.cluster.forks.fork_server import VARIABLE, forking, new_name

SECONDS = 60
HEAD = "import os, signal, sys, time, json\n"


OWNER = """
import sys
import numpy
from moerl.cluster.forks.fork_server import fork_server, listen
print(fork_server(listen(sys.argv[1])), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def server(monkeypatch):
    """The pid of one without what a run's preloads. Not a fork of this process, whose exit functions its forks would run."""
    name = new_name()
    monkeypatch.setenv(VARIABLE, name)
    with subprocess.Popen([sys.executable, "-c", OWNER, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        yield int(owner.stdout.readline())


@pytest.fixture
def program(tmp_path, server):
    """program(source, **settings): it runs as a script; what it prints is in the file `out`."""

    def start(source, *arguments, **settings):
        file = tmp_path / "program.py"
        file.write_text(HEAD + source)
        with (tmp_path / "out").open("w") as out:
            return ForkedProcess([sys.executable, str(file), *arguments], stdin=0, stdout=out.fileno(), stderr=out.fileno(), **settings)

    return start


def printed(tmp_path, text, process):
    """What the program has printed, once `text` is in it."""
    for _ in range(SECONDS * 100):
        if text in (said := (tmp_path / "out").read_text()):
            return said
        assert process.poll() is None, said
        signal.sigtimedwait([], 0.01)
    raise AssertionError(said)


@pytest.mark.parametrize("sent", [b"", b"\0", b'\0{"argv": [', b"\0[}\n"], ids=["nothing", "no line", "half", "no JSON"])
def test_a_request_that_is_not_whole_ends_nothing(sent, server, program, tmp_path):
    """Of a client that was killed before it had said all."""
    running = program("print('here', flush=True); time.sleep(600)")
    printed(tmp_path, "here", running)
    open_files = len(os.listdir(f"/proc/{server}/fd"))
    with socket.socket(socket.AF_UNIX) as client:
        client.connect("\0" + os.environ[VARIABLE])
        if sent:
            socket.send_fds(client, [sent], [0, 1])
    again = program("sys.exit(7)")
    assert again.wait(SECONDS) == 7
    deadline = time.monotonic() + SECONDS
    while len(os.listdir(f"/proc/{server}/fd")) > open_files:  # what it keeps of the one that has ended it closes a moment later
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert running.poll() is None
    running.terminate()
    assert running.wait(SECONDS) == -15


ENDS = {
    "pass": 0, "sys.exit(7)": 7, "sys.exit('why')": 1, "raise ValueError('why')": 1, "os._exit(9)": 9,
    "os.kill(os.getpid(), signal.SIGKILL)": -9, "os.kill(os.getpid(), signal.SIGTERM)": -15, "raise KeyboardInterrupt": -2,
}  # fmt: skip


@pytest.mark.parametrize("source", ENDS)
def test_every_end_has_the_exit_code_of_an_executed_program(source, program, tmp_path):
    process = program(source)
    assert process.wait(SECONDS) == ENDS[source]
    assert process.poll() == process.returncode == ENDS[source]
    executed = subprocess.run([sys.executable, str(tmp_path / "program.py")], capture_output=True, text=True)
    assert executed.returncode == ENDS[source]
    assert (tmp_path / "out").read_text().splitlines()[-1:] == executed.stderr.splitlines()[-1:]


def test_it_has_the_arguments_the_environment_and_the_directory_that_were_asked_for(program, tmp_path):
    source = "print(sys.argv[1:], sorted(os.environ), os.environ['A'], os.getcwd())"
    assert program(source, "x", "y z", environment={"A": "1", "PATH": "/bin"}, cwd=Path("/")).wait(SECONDS) == 0
    assert (tmp_path / "out").read_text() == "['x', 'y z'] ['A', 'PATH'] 1 /\n"


def test_it_imports_what_its_own_python_path_has(program, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "only_there.py").write_text("")
    assert program("import only_there", environment={"PYTHONPATH": str(tmp_path / "there")}).wait(SECONDS) == 0


def test_what_it_starts_has_its_environment(program, tmp_path):
    assert program("os.execv('/usr/bin/env', ['env'])", environment={"A": "1" * 5000}).wait(SECONDS) == 0
    assert (tmp_path / "out").read_text() == f"A={'1' * 5000}\n"


def test_it_has_no_file_of_another_process(program, tmp_path):
    assert program("print(sorted(map(int, os.listdir('/proc/self/fd')))[:-1])").wait(SECONDS) == 0
    assert (tmp_path / "out").read_text() == "[0, 1, 2]\n"


def test_it_has_the_signals_of_who_asked_and_no_handler_of_the_server(program, tmp_path):
    source = "print(signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGHUP), signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    try:
        assert program(source).wait(SECONDS) == 0
    finally:
        signal.signal(signal.SIGHUP, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    assert (tmp_path / "out").read_text().startswith("0 1 {<Signals.SIGUSR2")


def test_two_of_them_draw_different_numbers_and_numpy_too(program, tmp_path):
    drawn = set()
    for _ in range(2):
        assert program("import random, numpy; print(random.random(), numpy.random.random())").wait(SECONDS) == 0
        drawn |= set((tmp_path / "out").read_text().split())
    assert len(drawn) == 4


def test_the_system_shows_its_own_command_line_and_session(program, tmp_path):
    process = program("print('up', flush=True); time.sleep(99)", "x" * 100, session=True)
    printed(tmp_path, "up", process)
    assert " ".join(psutil.Process(process.pid).cmdline()).split()[1:] == [str(tmp_path / "program.py"), "x" * 100]
    assert os.getsid(process.pid) == process.pid
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.05)
    process.terminate()
    assert process.wait(SECONDS) == -signal.SIGTERM
    process.kill()  # of nobody: it has ended


def test_what_ends_its_process_group_ends_no_other_and_not_the_server(program, server, tmp_path):
    """Ray does that to the group of a worker that it lost."""
    process = program("print('up', flush=True); time.sleep(99)")
    printed(tmp_path, "up", process)
    assert os.getpgid(process.pid) == process.pid
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(SECONDS) == -signal.SIGTERM
    assert program("pass").wait(SECONDS) == 0


def test_it_ends_with_its_server_and_is_said_to_be_killed(program, server, tmp_path):
    process = program("print('up', flush=True); time.sleep(99)")
    printed(tmp_path, "up", process)
    child = psutil.Process(process.pid)
    os.kill(server, signal.SIGKILL)
    assert process.wait(SECONDS) == -signal.SIGKILL
    child.wait(SECONDS)


def test_the_server_ends_with_the_process_that_started_it(tmp_path):
    source = (
        "from moerl.cluster.forks.fork_server import fork_server, listen, new_name; "
        "print(fork_server(listen(new_name())), flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        server = psutil.Process(int(owner.stdout.readline()))
        owner.kill()
        server.wait(SECONDS)


def test_pipes_of_a_forked_child_are_those_of_asyncio(program, server, tmp_path):
    file = tmp_path / "program.py"
    file.write_text(HEAD + "print('heard', sys.stdin.readline(), end='', flush=True); sys.stdin.read(); sys.exit(5)")

    async def use():
        with (tmp_path / "log").open("wb") as log:
            how = {"stderr": log.fileno(), "environment": dict(os.environ), "stdin_begins": b"this\n"}
            child = await ForkedChild.start([sys.executable, str(file)], **how)
        line = await child.stdout.readline()
        assert child.returncode is None
        child.terminate()
        return line, await child.wait(), child.returncode

    assert asyncio.run(use()) == (b"heard this\n", -signal.SIGTERM, -signal.SIGTERM)


@pytest.mark.parametrize("address", ["", "nobody-listens-here"])
def test_without_a_server_nothing_is_started(address, monkeypatch):
    monkeypatch.setenv(VARIABLE, address)
    with pytest.raises(CannotForkError):
        ForkedProcess([sys.executable, "-c", "pass"], stdin=0, stdout=1, stderr=2)


def test_programs_of_another_interpreter_are_executed(monkeypatch):
    monkeypatch.setenv(VARIABLE, "name")
    assert can_fork([sys.executable, "-m", "moerl.rollout.engines.hf"])
    assert not can_fork(["/usr/bin/python3", "-m", "moerl.rollout.engines.hf"])
    monkeypatch.setenv(VARIABLE, "")
    assert not can_fork([sys.executable, "-m", "moerl.rollout.engines.hf"])


def test_a_process_that_already_knows_where_to_fork_or_nowhere_starts_no_server(monkeypatch):
    for name, value in ((VARIABLE, ""), (VARIABLE, "another"), ("RAY_ADDRESS", "10.0.0.1:6379")):
        with monkeypatch.context() as patch:
            patch.delenv(VARIABLE, raising=False)
            patch.setenv(name, value)
            before = dict(os.environ)
            with forking():
                assert dict(os.environ) == before


def test_what_is_imported_before_the_forks_starts_no_thread_and_imports_no_ray():
    """A pool of threads would be gone in a fork, which would wait for it for good. numpy's own library restarts its pool."""
    source = "import os, sys; from moerl.cluster.forks.fork_server import preload, preload_for_ranks; preload(); preload_for_ranks()"
    says = "; print(len(os.listdir('/proc/self/task')), 'ray' in sys.modules, 'moerl.train.megatron_engine' in sys.modules)"
    environment = os.environ | {"OMP_NUM_THREADS": "8", "OPENBLAS_NUM_THREADS": "1"}
    imported = subprocess.run([sys.executable, "-c", source + says], capture_output=True, text=True, env=environment, timeout=SECONDS * 2)
    assert imported.stdout == "1 False True\n", imported.stderr


def test_servers_begin_before_the_settings_are_read_and_end_with_settings_that_are_refused(tmp_path):
    (tmp_path / "own.py").write_text(f"import os\n\nopen('seen', 'w').write(os.environ['{VARIABLE}'])\n")
    mark = new_name()
    environment = {name: value for name, value in os.environ.items() if name not in (VARIABLE, "RAY_ADDRESS")} | {"MARK": mark}
    objective = ("~algorithm.objective", "+algorithm.objective={kind: custom, path: 'own.py:Nothing'}")
    command = [sys.executable, "-m", "moerl", "train", "recipe=grpo-tiny-moe-1n2g-sync", *objective]
    refused = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert (tmp_path / "seen").read_text()
    assert refused.returncode == 2 and "own.py:Nothing" in refused.stderr
    assert [process.pid for process in psutil.process_iter() if _has(process, mark)] == []


def _has(process, mark):
    """Whether it was started with a MARK of that name; a zombie has ended."""
    try:
        return process.environ().get("MARK") == mark
    except psutil.Error:
        return False
