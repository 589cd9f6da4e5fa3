"""How servers start, fail and end. Each test starts its own."""

import asyncio
import json
import os
import select
import signal
import socket
import subprocess
import sys

import pytest
from tiny_servers import hf_engine, server_command, until

from moerl.cluster.run_secret import RunSecret
from moerl.rollout.server.client import HTTPEngine
from moerl.rollout.server.server_main import listen
from moerl.rollout.server.server_process import ServerProcess
from moerl.rollout.server.spread_process import NodeOfServer
from moerl.types.completion import SamplingParams
from moerl.types.errors import EngineError

pytestmark = pytest.mark.usefixtures("forked")

SAMPLING = SamplingParams(max_tokens=240, seed=0)


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def small_server(tmp_path, code, **options):
    """A child that runs `code` instead of a model: the same owner, in milliseconds."""
    options = {"secret": RunSecret.new(), "label": "server", "log_path": tmp_path / "log", "start_seconds": 20, **options}
    return ServerProcess([sys.executable, "-c", code], **options)


def test_a_server_that_dies_while_it_starts_is_reported_with_its_last_log_lines(run, tmp_path):
    engine = hf_engine(tmp_path / "no-such-model", tmp_path / "logs" / "log")
    with pytest.raises(EngineError, match=r"(?s)127\.0\.0\.1:0: the server ended with exit code 1\nlast lines of .*no-such-model"):
        run(engine.start())
    assert not is_alive(engine._process.pid)


@pytest.mark.parametrize(
    ("environment", "told"),
    [({"CUDA_VISIBLE_DEVICES": ""}, "optimize 0, forked True"), ({"PYTHONOPTIMIZE": "1"}, "optimize 1, forked False")],
)
def test_a_server_with_variables_of_its_own_is_executed_since_they_are_read_at_the_start(environment, told, run, tmp_path, monkeypatch):
    (tmp_path / "told_server.py").write_text("import sys; sys.exit(f'optimize {sys.flags.optimize}, forked {\"torch\" in sys.modules}')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    options = {"secret": RunSecret.new(), "label": "server", "log_path": tmp_path / "log", "start_seconds": 20}
    with pytest.raises(EngineError, match=told):
        run(ServerProcess([sys.executable, "-m", "told_server"], environment=environment, **options).start())


def test_only_the_last_lines_of_the_log_are_shown(run, tmp_path):
    code = "import sys; [print(f'line {i}', file=sys.stderr) for i in range(100)]; sys.exit(3)"
    with pytest.raises(EngineError, match="exit code 3") as error:
        run(small_server(tmp_path, code).start())
    lines = [line.strip() for line in str(error.value).splitlines() if line.startswith("    ")]
    assert lines == [f"line {i}" for i in range(80, 100)]


def test_the_errors_before_the_last_are_shown_first_because_one_of_them_is_the_cause(run, tmp_path):
    """As engines of several processes die: the one that fails says why, and each that waited for it says that one failed."""
    code = """
import sys, traceback
def log(error, before=""):
    try:
        raise error
    except Exception:
        print("".join(before + line for line in traceback.format_exc().splitlines(keepends=True)), end="", file=sys.stderr)
log(RuntimeError("expect weight to be bfloat16"), "(Worker pid=7) ERROR [executor.py:953] ")
log(MemoryError("no room"), "(Worker pid=8) ERROR [executor.py:953] ")
log(MemoryError("no room"), "(Worker pid=9) ERROR [executor.py:953] ")
[print("no Error: this is a sentence", file=sys.stderr) for _ in range(30)]
raise RuntimeError("engine core initialization failed")
"""
    (tmp_path / "log").write_text("ValueError: of an earlier start\n")
    with pytest.raises(EngineError) as error:
        run(small_server(tmp_path, code, has_log=True).start())
    causes, last = str(error.value).split("last lines of ")
    assert causes.splitlines()[1:] == [
        "the first errors in it:", "    RuntimeError: expect weight to be bfloat16", "    MemoryError: no room",
        "    RuntimeError: engine core initialization failed",
    ]  # fmt: skip
    assert "earlier start" not in last


def test_a_model_the_engine_cannot_run_is_refused_with_a_reason(run, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    refusal = r"^model_type = 'gpt2' of .*: must be one of qwen2, qwen2_moe, qwen3, .*; .* Use another rollout.engine"
    with pytest.raises(EngineError, match=refusal):
        run(hf_engine(tmp_path, tmp_path / "log").start())


def test_a_port_in_use_is_refused_with_what_to_do(run, checkpoints, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        engine = hf_engine(checkpoints["dense"].directory, tmp_path / "log", port=port)
        with pytest.raises(EngineError, match=rf"rollout.port = {port}: port is in use on 127.0.0.1; .* Set rollout.port=0"):
            run(engine.start())
    assert not is_alive(engine._process.pid)


def test_a_server_that_is_never_ready_is_ended_at_the_deadline(run, tmp_path):
    process = small_server(tmp_path, "import time; time.sleep(60)", start_seconds=0.5)
    with pytest.raises(EngineError, match=r"not ready after deadlines.start_seconds = 0.5"):
        run(process.start())
    assert not is_alive(process.pid)


def test_an_interpreter_that_does_not_exist_is_named(run, tmp_path):
    engine = HTTPEngine(
        [NodeOfServer(command=["/no/such/python"])], secret=RunSecret.new(), port=0, log_path=tmp_path / "log", start_seconds=5
    )
    with pytest.raises(EngineError, match=r"cannot run '/no/such/python'.*check rollout.python"):
        run(engine.start())


def test_a_child_that_writes_something_else_than_its_port_is_ended(run, tmp_path):
    process = small_server(tmp_path, "import time; print('hello', flush=True); time.sleep(60)")
    with pytest.raises(EngineError, match=r"wrote b'hello\\n' instead of its port"):
        run(process.start())
    assert not is_alive(process.pid)


DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('{\"port\": 1}', flush=True); time.sleep(60)"


def test_a_server_that_ignores_sigterm_is_killed(run, tmp_path):
    process = small_server(tmp_path, DEAF, close_seconds=0.2)
    assert run(process.start()) == 1
    run(process.close())
    assert not is_alive(process.pid)
    run(process.close())


def test_a_server_of_whose_end_nobody_hears_is_left_after_a_while(run, tmp_path, monkeypatch, caplog):
    """As one that the kernel holds, or that a stopped process forked."""
    process = small_server(tmp_path, DEAF, close_seconds=0.2)

    async def scenario():
        await process.start()
        monkeypatch.setattr(process._process, "wait", asyncio.Event().wait)
        async with asyncio.timeout(10):
            await process.close()

    run(scenario())
    assert f"server (process {process.pid}) is not known to have ended by SIGKILL, and is left" in caplog.text


def test_close_before_start_and_twice_does_nothing(run, tmp_path):
    engine = hf_engine(tmp_path, tmp_path / "log")
    run(engine.close())
    run(engine.close())
    with pytest.raises(EngineError, match="not running; start it first"):
        run(engine.health())


def test_close_ends_requests_and_the_server_with_exit_code_zero(run, checkpoints, tmp_path):
    engine = hf_engine(checkpoints["dense"].directory, tmp_path / "log", "--load", "checkpoint")

    async def scenario():
        await engine.start()
        port = int(engine.name.rsplit(":", 1)[1])
        health = await engine.health()
        await engine.pause("keep")
        held = asyncio.create_task(engine.generate((1, 2, 3), SAMPLING, "held"))
        await until(engine, lambda health: health.num_waiting == 1)
        os.kill(engine._process.pid, signal.SIGTERM)
        with pytest.raises(EngineError, match=r"held: the server is shutting down|the server ended with exit code 0"):
            await held
        await engine.close()
        return port, health

    port, health = run(scenario())
    assert (health.status, health.version) == ("healthy", 0)
    assert not is_alive(engine._process.pid)
    with socket.create_server(("127.0.0.1", port)):
        pass  # the port is free again


def test_a_server_heeds_sigterm_though_its_owner_is_kept_from_it(run, checkpoints, tmp_path):
    """As Ray's processes in a Slurm job are, to which Slurm sends the signals that are meant for the driver."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        server = ServerProcess(
            server_command(checkpoints["dense"].directory), secret=RunSecret.new(), label="r", log_path=tmp_path / "log", start_seconds=120
        )

        async def scenario():
            await server.start()
            process = server._process
            await server.close()
            return process.returncode

        assert run(scenario()) == 0
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_a_server_that_dies_in_a_request_is_named_with_its_signal_and_log(run, checkpoints, tmp_path):
    engine = hf_engine(checkpoints["dense"].directory, tmp_path / "log", "--load", "checkpoint")

    async def scenario():
        await engine.start()
        await engine.pause("keep")
        held = [asyncio.create_task(engine.generate((1, 2, 3), SAMPLING, f"r{i}")) for i in range(3)]
        await until(engine, lambda health: health.num_waiting == 3)
        os.kill(engine._process.pid, signal.SIGKILL)
        errors = await asyncio.gather(*held, return_exceptions=True)
        with pytest.raises(EngineError, match="by signal 9"):
            await engine.health()
        await engine.close()
        return errors

    for error in run(scenario()):
        assert isinstance(error, EngineError)
        assert str(error).startswith(f"{engine.name}: the server ended by signal 9 (Killed)\nlast lines of {tmp_path / 'log'}:\n")
        assert "serving on port" in str(error)


def test_a_server_ends_when_its_owner_is_killed(checkpoints, tmp_path):
    """The owner is a process of its own, killed by SIGKILL: no handler of it can run."""
    code = f"""
import asyncio, sys
from pathlib import Path
from moerl.cluster.run_secret import RunSecret
from moerl.rollout.server.server_main import listen
from moerl.rollout.server.client import HTTPEngine
from moerl.rollout.server.spread_process import NodeOfServer

async def main():
    nodes, log = [NodeOfServer(command=sys.argv[1:])], Path({str(tmp_path / "log")!r})
    engine = HTTPEngine(nodes, secret=RunSecret.new(), port=0, log_path=log, start_seconds=100)
    await engine.start()
    print(engine._process.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""
    command = server_command(checkpoints["dense"].directory, "--load", "checkpoint")
    with subprocess.Popen([sys.executable, "-c", code, *command], stdout=subprocess.PIPE) as owner:
        server = os.pidfd_open(int(owner.stdout.readline()))
        owner.kill()
    wait_for_exit(server, seconds=20)
    assert "the owner of this server is gone" in (tmp_path / "log").read_text()


def wait_for_exit(pidfd, *, seconds):
    with os.fdopen(pidfd, "rb", buffering=0):
        ended, _, _ = select.select([pidfd], [], [], seconds)
    assert ended, f"still running after {seconds} s"


def test_answers_do_not_wait_for_acknowledgements():
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
