"""The process that has imported torch and transformers, and becomes one of a run's processes by a fork at each request.

It is forked from the driver, which imports neither, and imports them while the driver goes on. It has one thread, holds no GPU and has
not imported Ray, which reads a worker's environment when it is imported. A request is one connection: what would be executed comes with its
three standard files, the answer is the pid, and later the exit code. Whoever has not this process's user is not answered. It ends with the
process that started it, and what it forked with it.
"""

import atexit
import ctypes
import gc
import importlib
import json
import logging
import os
import random
import runpy
import secrets
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from moerl.cluster.descendants import end_with_parent
from moerl.cluster.forks.title import set_title

logger = logging.getLogger(__name__)

VARIABLE = "MOERL_FORK_SERVER"
"""In the environment: where the server listens. Empty: every process is executed."""
_SHARED = (
    "torch", "torch._dynamo", "torch.distributed.checkpoint", "aiohttp", "moerl.rollout.fleet.collector", "moerl.rollout.server.messages",
    "moerl.weights.weight_session",
)  # fmt: skip
"""Modules that both servers need, or collectors. By their names: packages of this one's level, of which none imports Ray."""
_OF_SERVERS = (
    "transformers", "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "moerl.rollout.server.server_main", "moerl.rollout.engines.hf.forward",
    "moerl.rollout.engines.hf.fp8_weights", "moerl.rollout.engines.hf.hf_model", "moerl.rollout.engines.hf.scheduler",
    "moerl.rollout.server.app", "moerl.rollout.engines.hf.hf_core", "moerl.models.transformers_tokenizer", "moerl.scratch_model",
)  # fmt: skip
"""Modules of rollout.engine=hf, and of the process that reads the model."""
_OF_RAY = ("google.protobuf.text_format", "google.protobuf.json_format", "jsonschema", "requests", "msgpack", "filelock")
"""Packages that Ray imports when a worker does, half of what its own import takes."""
_TABLE, _RANK_IMPORTS = "moerl.models.transformers_table", "moerl.train.rank_imports"
_REQUEST_SECONDS = 10.0
_BACKLOG = 128
_KILLED_BY_EXCEPTION = 1


@contextmanager
def forking(*, apart: bool = False) -> Iterator[None]:
    """Context with a server forked from this process, which imports meanwhile what it preloads. Its address is in the environment.

    A fork runs this process's exit functions at its own end, as those of the modules that it would have imported: call it first.
    Nothing is started, and every process is executed, where the environment already says where to fork, or nowhere; where ranks are
    started by a cluster of several nodes; and where a fork would not be a good copy of this process. `apart`: the server is executed, in a
    program that is not moerl's own: whose threads, open files and exit functions no process of a run may have.
    """
    if VARIABLE in os.environ or "RAY_ADDRESS" in os.environ:
        yield
        return
    if not apart and (reason := unfit()) is not None:
        logger.info("every process is executed: %s", reason)
        yield
        return
    with executed_servers() if apart else _forked_servers(new_name()) as name:
        os.environ[VARIABLE] = name
        try:
            yield
        finally:
            del os.environ[VARIABLE]


@contextmanager
def executed_servers() -> Iterator[str]:
    """The name of servers, for the block, that are forked from an interpreter of their own."""
    name = new_name()
    command = [sys.executable, "-c", f"from {__name__} import serve_until_eof; serve_until_eof({name!r})"]
    # A session of its own: Ctrl-C in the terminal goes to this process alone.
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as owner:
        assert owner.stdout is not None
        owner.stdout.readline()  # they listen; nothing is there if they could not be started, and then every process is executed
        yield name


def serve_until_eof(name: str) -> None:
    """The whole of a process: its input ends with the process that started it."""
    with _forked_servers(name):
        print("listening", flush=True)
        sys.stdin.buffer.read()


@contextmanager
def _forked_servers(name: str) -> Iterator[str]:
    """Two servers under the `name`, of which that for Ray's workers is a fork of the other, made when that has torch: no worker needs
    transformers, and both import the rest side by side. They listen already, and answer when they have imported what
    their processes will."""
    listener, for_ranks = listen(name), listen(for_workers(name))

    def prepared() -> None:
        gc.disable()  # until everything is imported: its collections would take a fifth of the time, and find little
        _import(_SHARED)
        fork_server(for_ranks, partial(_fit_after, preload_for_ranks))
        _fit_after(preload)

    with for_ranks:
        server = fork_server(listener, prepared)
    try:
        yield name
    finally:
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)


def _fit_after(imports: Callable[[], object]) -> None:
    imports()
    if (reason := unfit()) is not None:
        sys.stderr.write(f"{VARIABLE}: processes are executed: after its imports {reason}\n")
        os._exit(1)


def fork_server(listener: socket.socket, before: Callable[[], object] = lambda: None) -> int:
    """Its pid; it answers when it has done `before`. The listener is its own from here on. If it fails, processes are executed."""
    with listener:
        parent, server = os.getpid(), os.fork()
        if server == 0:
            try:
                os.setsid()  # Ctrl-C in the terminal goes to the driver alone
                end_with_parent()
                if os.getppid() == parent:
                    before()
                    ForkServer(listener).run()
            finally:
                os._exit(1)
    return server


def for_workers(name: str) -> str:
    """Where the server listens that Ray's workers are forked from."""
    return f"{name}-workers" if name else ""


def preload() -> None:
    _import(_SHARED)
    importlib.import_module(_TABLE).keep_table()
    _import(_OF_SERVERS)


def _import(names: Sequence[str]) -> None:
    for name in names:
        importlib.import_module(name)


def preload_for_ranks() -> None:
    """Imports of Ray's workers. Megatron where no GPU is: with one it asks for it when it is imported, and a process that has opened a GPU
    cannot be forked."""
    _import(_SHARED + _OF_RAY)
    if list(Path("/dev").glob("nvidia[0-9]*")):
        return
    importlib.import_module(_RANK_IMPORTS).load_quietly()


def unfit() -> str | None:
    """Why forks of this process would not do."""
    if threading.active_count() > 1:
        return "this process has threads"
    if "ray" in sys.modules:
        return "this process has imported Ray"
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if os.readlink(link).startswith("/dev/nvidia"):
                return "this process has opened a GPU"
    return None


def new_name() -> str:
    """Nobody can guess it, and nothing of it stays."""
    return f"moerl-forks-{secrets.token_hex(16)}"


def listen(name: str) -> socket.socket:
    """Under a name of Linux's own, which is no file."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(b"\0" + name.encode())
    listener.listen(_BACKLOG)
    return listener


class ForkServer:
    def __init__(self, listener: socket.socket):
        self._listener = listener
        self._selector = selectors.DefaultSelector()

    def run(self) -> NoReturn:
        set_title(["moerl.cluster.forks"])
        gc.collect()
        gc.freeze()  # the collector would write to every page that forks share
        gc.enable()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        while True:
            for key, _ in self._selector.select():
                key.data()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        try:
            if user_of(connection) != os.getuid():
                connection.close()
                return
            connection.settimeout(_REQUEST_SECONDS)
            request, files = receive_request(connection)
            try:
                child = os.fork()
                if child == 0:
                    become(request, files, os.getppid())
            finally:
                _close(files)
            self._watch(child, connection)
            connection.sendall(b"%d\n" % child)
        except (OSError, ValueError) as error:
            connection.close()
            sys.stderr.write(f"{VARIABLE}: {error}\n")

    def _watch(self, child: int, connection: socket.socket) -> None:
        file = os.pidfd_open(child)
        self._selector.register(file, selectors.EVENT_READ, partial(self._ended, file, child, connection))

    def _ended(self, file: int, child: int, connection: socket.socket) -> None:
        self._selector.unregister(file)
        os.close(file)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with connection, suppress(OSError):  # whoever asked may be gone
            connection.sendall(b"%d\n" % code)


def _close(files: Sequence[int]) -> None:
    for file in files:
        os.close(file)


def receive_request(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """ValueError for one that is not whole, OSError for one that does not come; no file of it stays open then."""
    files: list[int] = []
    try:
        _, files, _, _ = socket.recv_fds(connection, 1, 3)
        with connection.makefile("rb") as sent:
            request: dict[str, Any] = json.loads(sent.readline())  # of one that ends early there is none
    except (OSError, ValueError):
        _close(files)
        raise
    return request, files


def become(request: Mapping[str, Any], files: Sequence[int], parent: int) -> NoReturn:
    """In the child: what a new interpreter would have been, up to its exit code."""
    code = _KILLED_BY_EXCEPTION
    try:
        end_with_parent()
        if os.getppid() == parent:
            _take_place(request, files)
            code = _exit_code_of(request["argv"])
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(code)


def _take_place(request: Mapping[str, Any], files: Sequence[int]) -> None:
    if request["session"]:
        os.setsid()
    else:
        os.setpgrp()  # a raylet that loses a worker kills its process group, in which nobody else may be
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.closerange(3, max(int(name) for name in os.listdir("/proc/self/fd")) + 1)
    os.chdir(request["cwd"])
    _set_signals(ignored=request["ignored"], blocked=request["blocked"])
    _set_environment(request["env"])
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        buffering = 1 if number == 2 else -1
        stream = open(number, "w" if number else "r", buffering=buffering, closefd=False)  # noqa: SIM115 - as long as the process
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    if request["titled"]:
        set_title(request["argv"])
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _set_signals(*, ignored: Sequence[int], blocked: Sequence[int]) -> None:
    """As Python has them at its start: it ignores SIGPIPE, and SIGINT raises KeyboardInterrupt."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if signal.getsignal(number) not in (signal.SIG_DFL, None):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for left_out in ignored:
        signal.signal(left_out, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _set_environment(environment: Mapping[str, str]) -> None:
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [path for path in paths if path and path not in sys.path]  # this interpreter was started with another
    os.environ.clear()
    ctypes.CDLL(None).clearenv()  # C code may have added some that Python does not know
    os.environ.update(environment)
    threads = environment.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(threads))  # the library has read the variable already


def _exit_code_of(argv: Sequence[str]) -> int:
    try:
        _execute(argv)
        code = 0
    except SystemExit as ended:
        code = _code_of(ended)
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        code = 128 + signal.SIGINT
    except BaseException:
        traceback.print_exc()
        code = _KILLED_BY_EXCEPTION
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    return code


def _code_of(ended: SystemExit) -> int:
    if ended.code is None or isinstance(ended.code, int):
        return (ended.code or 0) & 0xFF
    sys.stderr.write(f"{ended.code}\n")
    return 1


def _execute(argv: Sequence[str]) -> None:
    """`argv` is that of an interpreter: PYTHON -m MODULE ..., or PYTHON FILE ..."""
    sys.orig_argv = list(argv)
    if argv[1] == "-m":
        sys.argv = list(argv[2:])
        sys.path[0] = os.getcwd()
        runpy.run_module(argv[2], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(argv[1:])
        sys.path[0] = str(Path(argv[1]).parent)
        runpy.run_path(argv[1], run_name="__main__")


def user_of(connection: socket.socket) -> int:
    """Who is at its other end."""
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(user)
