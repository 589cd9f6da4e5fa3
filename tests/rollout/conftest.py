"""One event loop and a few rollout servers for the whole test session."""

import asyncio
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import family_servers
from tiny_servers import (
    CONFIGS,
    NATIVE,
    NATIVE_LONG,
    NATIVE_MAX_CONTEXT,
    NATIVE_PARAMS,
    SERVED,
    SERVER_OPTIONS,
    Checkpoint,
    Served,
    hf_engine,
    native_engine,
    new_fake,
    write_checkpoint,
)

from moerl.cluster.forks.fork_server import VARIABLE
from moerl.rollout.server.client import HTTPEngine


@pytest.fixture(scope="session")
def runner() -> Iterator[asyncio.Runner]:
    """One event loop for all tests: the engines of the session belong to it."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="session")
def run(runner: asyncio.Runner) -> Callable:
    return runner.run


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    """Those of family_servers.py are written when they are asked for."""

    class Checkpoints(dict[str, Checkpoint]):
        def __missing__(self, name: str) -> Checkpoint:
            self[name] = family_servers.write_family(name, tmp_path_factory.mktemp("families"))
            return self[name]

    return Checkpoints({name: write_checkpoint(tmp_path_factory.mktemp(name), name) for name in CONFIGS})


@pytest.fixture(scope="session")
def hf_engines(run, checkpoints, tmp_path_factory, fork_server) -> Iterator[dict[str, HTTPEngine]]:
    logs = tmp_path_factory.mktemp("logs")
    engines = {name: hf_engine(checkpoints[name].directory, logs / name, *options) for name, options in SERVER_OPTIONS.items()}

    async def together(calls):
        await asyncio.gather(*calls)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, fork_server)
        run(together(engine.start() for engine in engines.values()))
    yield engines
    run(together(engine.close() for engine in engines.values()))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one server come together, so that one of them runs at a time."""

    kinds = (*NATIVE, *family_servers.NATIVE)

    def server(item: pytest.Item) -> int:
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        return max((kinds.index(value) + 1 for value in parameters if isinstance(value, str) and value in kinds), default=0)

    items.sort(key=server)


@pytest.fixture(scope="session")
def native_engines(run, checkpoints, tmp_path_factory) -> Iterator[Callable[[str], HTTPEngine]]:
    """One server of another engine at a time: asking for another ends it. A server of vLLM takes its sockets with it."""
    logs = tmp_path_factory.mktemp("native")
    running: dict[str, HTTPEngine] = {}

    def engine_of(kind: str) -> HTTPEngine:
        if kind not in running:
            end()
            engine = native_engine(kind, checkpoints[kind.split("-")[1]], logs / kind)
            run(engine.start())
            running[kind] = engine
        return running[kind]

    def end() -> None:
        while running:
            run(running.popitem()[1].close())
        assert os.listdir(sockets) == []

    # Not pytest's own, whose names are too long for sockets.
    with tempfile.TemporaryDirectory() as sockets, pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_RPC_BASE_PATH", sockets)
        yield engine_of
        end()


@pytest.fixture(params=SERVED)
def served(request, run, checkpoints) -> Iterator[Served]:
    yield from serve(request.param, request, run, checkpoints)


@pytest.fixture(params=["moe", "dense", "latent", *NATIVE_PARAMS])
def served_model(request, run, checkpoints) -> Iterator[Served]:
    yield from serve(request.param, request, run, checkpoints)


@pytest.fixture
def served_moe(request, run, checkpoints) -> Iterator[Served]:
    """The deterministic one."""
    yield from serve("moe", request, run, checkpoints)


def serve(kind: str, request: pytest.FixtureRequest, run: Callable, checkpoints: dict[str, Checkpoint]) -> Iterator[Served]:
    """Servers are shared by all tests, so each starts from the same state and leaves nothing in flight."""
    checkpoint = checkpoints["dense" if kind == "fake" else kind.split("-")[-1]]
    if kind == "fake":
        engine = new_fake(checkpoint)
    elif "-" in kind:
        engine = request.getfixturevalue("native_engines")(kind)
    else:
        engine = request.getfixturevalue("hf_engines")[kind]
    sizes = dict(max_context=NATIVE_MAX_CONTEXT, long=NATIVE_LONG.get(kind, 500)) if "-" in kind else {}
    served = Served(engine=engine, tensors=checkpoint.tensors, **sizes)

    async def begin() -> None:
        if kind == "fake":
            await engine.start()
        await engine.wake()
        await engine.resume()
        await served.push(1)

    run(begin())
    yield served
    run(engine.abort())
    if kind == "fake":
        run(engine.close())
