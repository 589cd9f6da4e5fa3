"""A push in the processes of an engine that hold its model: which tensors each of them needs, as the engine spreads experts over them, and
the steps, which come through the engine's own channel as a name and the JSON of moerl.rollout.server.wire."""

from collections.abc import Iterable
from dataclasses import replace

from moerl.rollout.server import wire
from moerl.types.push import Needs
from moerl.weights.plan.tensor_specs import expert_of
from moerl.weights.weight_session import WeightSession


def needs_of_processes(names: Iterable[str], *, num_processes: int, expert_parallel: int) -> Needs:
    """Needs of all processes of a server, from the `names` of its model's tensors."""
    names = tuple(names)
    return tuple(needed_names(names, process=p, num_processes=num_processes, expert_parallel=expert_parallel) for p in range(num_processes))


def needed_names(names: Iterable[str], *, process: int, num_processes: int, expert_parallel: int) -> tuple[str, ...]:
    """All but experts of others. Neighbouring processes share experts, and those of each share are consecutive: the order of vLLM
    and SGLang without redundant experts."""
    names = tuple(names)
    num_experts = 1 + max((expert for name in names if (expert := expert_of(name)) is not None), default=0)
    share, size = process // (num_processes // expert_parallel), num_experts // expert_parallel
    return tuple(name for name in names if (expert := expert_of(name)) is None or expert // size == share)


def run_step(session: WeightSession, step: str, body: str, *, process: int) -> None:
    """`step`: connect, begin, install or finish. `process`: number of this one among those of its server that hold parts of the model."""
    if step == "connect":
        offer = wire.OFFER.validate_json(body)
        session.connect(replace(offer, reader=offer.reader + process))
    elif step == "begin":
        session.begin(wire.MANIFEST.validate_json(body))
    elif step == "install":
        session.install()
    else:
        session.finish(wire.FINISH.validate_json(body).version)
