"""Which tensors a process of an engine needs, when the engine spreads experts over its processes."""

from collections.abc import Iterable

from moerl.types.push import Needs
from moerl.weights.plan.tensor_specs import expert_of


def needs_of_processes(names: Iterable[str], *, num_processes: int, expert_parallel: int) -> Needs:
    """Of all processes of a server, from the `names` of its model's tensors."""
    names = tuple(names)
    return tuple(needed_names(names, process=p, num_processes=num_processes, expert_parallel=expert_parallel) for p in range(num_processes))


def needed_names(names: Iterable[str], *, process: int, num_processes: int, expert_parallel: int) -> tuple[str, ...]:
    """All but experts of others. Neighbouring processes share experts, and those of each share are consecutive: the order of vLLM
    and SGLang without redundant experts."""
    names = tuple(names)
    num_experts = 1 + max((expert for name in names if (expert := expert_of(name)) is not None), default=0)
    share, size = process // (num_processes // expert_parallel), num_experts // expert_parallel
    return tuple(name for name in names if (expert := expert_of(name)) is None or expert // size == share)
