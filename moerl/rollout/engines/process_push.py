"""A push in the processes of an engine that hold its model: which tensors each of them needs, as the engine spreads experts over them, and
the steps, which come through the engine's own channel as a name and the JSON of moerl.rollout.server.wire."""

from collections.abc import Iterable
from dataclasses import replace

from moerl.rollout.server import wire
from moerl.types.push import Needs
from moerl.weights.plan.tensor_specs import expert_of
from moerl.weights.weight_session import WeightSession


def needs_of_processes(names: Iterable[str], *, num_processes: int, expert_parallel: int) -> Needs:
    """Needs of all processes of a server, from the `names` of its model's tensors: all but experts of others. Neighbouring processes share
    experts, and those of each share are consecutive: the order of vLLM and SGLang without redundant experts."""
    experts = {name: expert_of(name) for name in names}
    num_experts = 1 + max((expert for expert in experts.values() if expert is not None), default=0)
    sharing, size = num_processes // expert_parallel, num_experts // expert_parallel
    return tuple(
        tuple(name for name, expert in experts.items() if expert is None or expert // size == process // sharing)
        for process in range(num_processes)
    )


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
        session.finish(int(body))
