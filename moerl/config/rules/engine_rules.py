"""Rules of rollout.engine: environments and arguments of vllm and sglang, the models each serves, the routes it returns, and the files
with which servers encrypt."""

import functools
import json
import math
import os
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from moerl.config.derive.model_shape import ModelShape
from moerl.config.derive.package_versions import versions_here, versions_there
from moerl.config.rules.facts import Facts
from moerl.config.rules.megatron_rules import replay_problems_of
from moerl.config.schema.rollout_config import RolloutConfig, TLSConfig
from moerl.config.schema.run_config import RunConfig
from moerl.types.engine_traits import TRAITS
from moerl.types.errors import Problem, can_be, problem

CHECK_SECONDS = 120.0
"""Limit of importing an engine and its argument parser; it takes about 5 s."""

_CHECKOUT = Path(__file__).parents[3]


def interpreter(rollout: RolloutConfig) -> str:
    """Python that the servers are started with."""
    if rollout.python is not None:
        return rollout.python
    return str(_CHECKOUT / f".venv-{rollout.engine}" / "bin" / "python") if rollout.traits.has_environment else sys.executable


def engine_problems(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    """Every rule rollout.engine breaks, for the model if it is known. Asks the engine's environment, some seconds: about its version, its
    arguments, and the model's sizes.

    A model that is only named (model.published without a path) cannot be started, and a login node that checks its recipe needs no
    environment: what belongs to starting is asked for with model.path, or listed by `moerl check` (`unserved`). Nor does one that launches
    a job with an image, which has it.
    """
    rollout, shape = config.rollout, facts.shape
    if not rollout.traits.has_environment:
        if rollout.engine_args:
            reason = f"rollout.engine={rollout.engine} has no arguments of its own"
            yield problem(
                "rollout.engine_args", rollout.engine_args, "has no effect", reason, "rollout.engine=vllm or sglang, or leave it out"
            )
        return
    if config.deterministic:
        reason = f"{rollout.engine}'s results depend on which requests share a batch"
        yield problem("deterministic", True, f"cannot be kept by rollout.engine={rollout.engine}", reason, "rollout.engine=hf")
    if config.model.is_only_named:
        return
    yield from unserved(rollout, shape)
    python = Path(interpreter(rollout))
    if can_be(python) and python.is_file():
        model = facts.hf if shape is not None and shape.model_type in rollout.traits.accepted else None
        yield from _found_there(str(python), rollout.engine, json.dumps(rollout.engine_args, sort_keys=True), json.dumps(model))
    elif rollout.python is None and not is_in_image(config):  # one that is given and missing is another rule's
        rule = f"needs an environment for rollout.engine={rollout.engine}; there is none at {python.parents[1]}"
        reason = "engines pin packages that a trainer's environment cannot have"
        yield problem("rollout.python", None, rule, reason, f"make engines ENGINES={rollout.engine}, or rollout.python=/path/to/its/python")


def is_in_image(config: RunConfig) -> bool:
    """Whether the engine's environment is in the image of a job, and this process outside of one."""
    in_slurm = config.slurm.container is not None and "SLURM_JOB_ID" not in os.environ
    return in_slurm or (config.kubernetes.image is not None and "KUBERNETES_SERVICE_HOST" not in os.environ)


def unserved(rollout: RolloutConfig, shape: ModelShape | None) -> Iterator[Problem]:
    """Why the engine cannot serve a model of `shape`, whose checkpoint need not be there."""
    if rollout.traits.has_environment and shape is not None and shape.model_type not in rollout.traits.accepted:
        rule = f"serves {', '.join(rollout.traits.accepted)}; the model is {shape.model_type}"
        reason = "whether every pushed byte arrives in the engine's own layout is tested for these only"
        yield problem("rollout.engine", rollout.engine, rule, reason, "rollout.engine=hf, or fake to exercise the trainer")


@functools.cache
def _found_there(python: str, engine: str, arguments: str, model: str) -> tuple[Problem, ...]:
    """Problems by the engine's own parser, in its environment; nothing is started. `arguments` and `model` (or null) are JSON."""
    module = f"moerl.rollout.engines.{engine}.{engine}_server"
    command = [python, "-m", module, "--check", "--engine-args", arguments, "--model-config", model]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_SECONDS, check=True)
        return tuple(TypeAdapter(list[Problem]).validate_json(ended.stdout))
    except subprocess.CalledProcessError as error:
        reason = "it ended with " + "\n".join(error.stderr.splitlines()[-3:])
    except subprocess.TimeoutExpired:
        rule = f"did not answer within {CHECK_SECONDS:g} s what moerl.rollout.engines.{engine} takes"
        reason = "it imports the engine for that, some 5 s; the disk it is on is slow, or the machine has much else to do"
        return (problem("rollout.python", python, rule, reason, "the same command again, or an environment on a faster disk"),)
    except (OSError, ValidationError) as error:
        reason = str(error)
    fix = f"make engines ENGINES={engine}, or install moerl there: {python} -m pip install --no-deps moerl"
    return (problem("rollout.python", python, f"cannot start moerl.rollout.engines.{engine}", reason, fix),)


def joins_by_nccl(config: RunConfig) -> bool:
    """Whether a push makes one communicator of trainer and servers on GPUs; where they share these, the trainer's ranks make it alone."""
    transport, placement = config.weights.transport, config.placement
    goes = transport == "nccl" or (transport == "auto" and placement.nodes > 1)
    return goes and placement.mode == "separate" and placement.device != "cpu" and config.rollout.traits.has_environment


def nccl_problems(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    """Trainer and engine with different NCCL, by what their environments have installed; nothing where one has none, as on CPU."""
    rollout, python = config.rollout, Path(interpreter(config.rollout))
    if not joins_by_nccl(config) or config.model.is_only_named or not (can_be(python) and python.is_file()):
        return
    own, theirs = versions_here(()).get("NCCL"), _nccl_there(str(python))
    if own is not None and theirs is not None and own != theirs:
        rule = f"cannot join NCCL {own} of this environment and NCCL {theirs} of {rollout.engine}'s"
        reason = "NCCL refuses a communicator of ranks with different versions, at the first push"
        fix = f"make gpu and make engines, both with ENGINES={rollout.engine}: their locks have the same; or weights.transport=disk"
        yield problem("weights.transport", config.weights.transport, rule, reason, fix)


@functools.cache
def _nccl_there(python: str) -> str | None:
    with suppress(OSError, ValueError, subprocess.SubprocessError):  # engine_problems says that it does not run
        return versions_there(python, ()).get("NCCL")
    return None


def replay_problems(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    """Every rule train.router_replay breaks, for the model if it is known."""
    mode, path, shape = config.train.router_replay, "train.router_replay", facts.shape
    if mode == "off":
        return
    if shape is not None and shape.routes is None:
        yield problem(path, mode, "must be off for a dense model", "there are no experts to choose", f"{path}=off")
    if mode == "rollout" and (reason := config.rollout.traits.no_routes):
        able = [engine for engine, traits in TRAITS.items() if not traits.no_routes]
        fix = f"{path}=trainer, or rollout.engine={able[0]}"
        yield problem(path, mode, f"needs rollout.engine of {', '.join(able)}", reason, fix)
    yield from replay_problems_of(config.train.megatron, mode)


def server_problems(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    rollout = config.rollout
    last = rollout.port + rollout.num_servers - 1
    if rollout.port and last > 65535:
        reason = f"{rollout.num_servers} servers count up from it, and the last port would be {last}"
        fix = f"rollout.port={65536 - rollout.num_servers} or lower, or 0"
        yield problem("rollout.port", rollout.port, f"must be at most {65536 - rollout.num_servers}", reason, fix)
    if not 0 < rollout.cache_high <= 1:
        reason = "it is a share of a server's cache, and above it servers get one request at a time"
        yield problem("rollout.cache_high", rollout.cache_high, "must be above 0 and at most 1", reason, "rollout.cache_high=0.9")
    if rollout.python is not None and not (can_be(Path(rollout.python)) and Path(rollout.python).is_file()) and not is_in_image(config):
        reason = "the servers are started with it"
        yield problem("rollout.python", rollout.python, "is not a file", reason, "the path of an interpreter, or leave it out for this one")
    yield from _temperature_problems(config)


def _temperature_problems(config: RunConfig) -> Iterator[Problem]:
    engine, (low, high) = config.rollout.engine, config.rollout.traits.temperatures
    asked = {"rollout.temperature": config.rollout.temperature}
    if config.eval is not None:
        asked["eval.temperature"] = config.eval.temperature
    for path, value in asked.items():
        if value and not low <= value <= high:
            reason = f"{engine} samples at another temperature than it is asked for, or not at all, outside of these"
            bounds = f"at least {low:g}" if high == math.inf else f"in [{low:g}, {high:g}]"
            fix = f"{path}={low if value < low else high:g}, or rollout.engine=hf"
            yield problem(path, value, f"must be {bounds} with rollout.engine={engine}", reason, fix)


def tls_problems(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    """Faults of the files of rollout.tls. Whether the certificate has a server's host is found when that is connected to."""
    tls = config.rollout.tls
    if tls is None:
        return
    if config.rollout.traits.runs_in_driver:
        reason = "rollout.engine=fake answers inside the driver, over no network"
        yield problem("rollout.tls", vars(tls), "has no effect", reason, "rollout.tls=null, or another engine")
        return
    files = {f"rollout.tls.{name}": value for name, value in vars(tls).items()}
    faults = [fault for path, value in files.items() for fault in _file_problems(path, value)]
    yield from faults if faults else _pem_problems(tls)


def _file_problems(path: str, value: str) -> Iterator[Problem]:
    file = Path(value)
    if not file.is_absolute():
        reason = "servers and collectors read it too, from other directories and on other nodes"
        yield problem(path, value, "must be an absolute path", reason, f"{path}=/ABSOLUTE/PATH")
    elif not can_be(file) or not file.is_file():
        fix = "the path of a file, or rollout.tls=null for HTTP that is not encrypted"
        yield problem(path, value, "is not a file", "TLS needs all three", fix)
    elif not os.access(file, os.R_OK):
        yield problem(path, value, "cannot be read", "the run's processes read it as this user", "a file that this user may read")


def _pem_problems(tls: TLSConfig) -> Iterator[Problem]:
    """Faults of what is in files that can be read."""
    faults = [fault for name in ("certificate", "authority") for fault in _certificate_problems(f"rollout.tls.{name}", getattr(tls, name))]
    if faults:
        yield from faults
        return
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        server.load_cert_chain(tls.certificate, tls.key, password=lambda: "")  # without, OpenSSL asks the terminal for a passphrase
    except ssl.SSLError as error:
        rule = "must be the private key of rollout.tls.certificate, in PEM and without a passphrase"
        yield problem("rollout.tls.key", tls.key, rule, f"OpenSSL says: {error}", "the key that the certificate was made with")
        return
    refusal = _refusal(server, ssl.create_default_context(cafile=tls.authority))
    if refusal is not None:
        rule = f"is refused by who trusts rollout.tls.authority = {tls.authority!r}"
        fix = "a certificate that this authority has signed, and that is in date"
        yield problem("rollout.tls.certificate", tls.certificate, rule, f"OpenSSL says: {refusal}", fix)


def _certificate_problems(path: str, file: str) -> Iterator[Problem]:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(file)
    except ssl.SSLError as error:
        yield problem(path, file, "must hold certificates in PEM", f"OpenSSL says: {error}", "a file that has -----BEGIN CERTIFICATE-----")


def _refusal(server: ssl.SSLContext, client: ssl.SSLContext) -> str | None:
    """Reason for which the client takes no connection to the server, whatever its host; None if it does. In memory."""
    client.check_hostname = False
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True)
    for side in sides * 2:  # the client's hello, what the server shows, the client's judgement
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLError as error:
            return getattr(error, "verify_message", str(error))
    return None


def delta_problems(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    if config.weights.transport != "disk" or not config.weights.disk_delta:
        return
    if config.rollout.traits.has_environment:
        rule = f"cannot be kept with rollout.engine={config.rollout.engine}"
        reason = "a delta is laid over what the model holds under the checkpoint's names, and this engine does not give that back"
        yield problem("weights.disk_delta", True, rule, reason, "weights.disk_delta=false")
    elif config.placement.mode != "separate":
        reason = "a delta is laid over the weights of the push before, and servers drop them while the trainer has their GPUs"
        yield problem("weights.disk_delta", True, "needs placement.mode=separate", reason, "weights.disk_delta=false")
