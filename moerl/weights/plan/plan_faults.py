"""Faults of a plan of pushes: a server needs other tensors than was planned, or a rank is to send what it does not hold. Pure."""

from collections.abc import Mapping
from functools import cache

import numpy as np

from moerl.models.expert_stacks import stored_name
from moerl.types.push import Needs
from moerl.weights.plan.tensor_specs import first_few
from moerl.weights.plan.transfer_plan import TransferPlan, holders, readers


def misread(plan: TransferPlan, num_experts: int, needs: Mapping[str, Needs]) -> list[str]:
    """Tensors that the plan brings to a process that does not need them, but another of its server, and the other way round.

    What a whole server needs and the trainer has not, or the other way round, servers find themselves when a push begins.
    """
    planned: list[set[str]] = [set() for _ in range(plan.rollout.num_gpus)]
    for tensor in plan.tensors:
        for gpu in readers(tensor, plan.rollout, num_experts):
            planned[gpu].add(stored_name(tensor.name))
    offered, found = {stored_name(tensor.name) for tensor in plan.tensors}, []
    places = iter(planned)
    for server, processes in needs.items():
        known = offered & {name for names in processes for name in names}
        for index, names in enumerate(processes):
            wanted, mine = known.intersection(names), known & next(places)
            kinds = {"needs and would not get": wanted - mine, "does not need and would get": mine - wanted}
            found += [f"{server}, process {index}, {what} {first_few(sorted(tensors))}" for what, tensors in kinds.items() if tensors]
    return found


def faults(plan: TransferPlan, num_experts: int) -> list[str]:
    """Faults of a plan, for people: a part that a reader lacks, gets twice, or that somebody sends without having it."""
    num_parts = len(plan.parts.tensor)
    arrivals = [plan.network.target.astype(np.int64) * num_parts + plan.network.part]
    arrivals.append(plan.spread.target.astype(np.int64) * num_parts + plan.spread.part)
    found, counts = _counted(np.concatenate(arrivals))
    wanted = np.sort(_wanted(plan, num_experts))
    is_complete = np.array_equal(wanted, found)
    relayed = plan.spread.source.astype(np.int64) * num_parts + plan.spread.part
    nodes = plan.rollout.node_numbers()
    is_across = nodes[plan.spread.source] != nodes[plan.spread.target]
    checks = {
        "arrive more than once": found[counts > 1],
        "never arrive": wanted[:0] if is_complete else _without(wanted, found),
        "arrive where nobody reads them": wanted[:0] if is_complete else _without(found, wanted),
        "are passed on to another node": relayed[is_across],
        "are passed on by a GPU that did not get them over the network": _without(relayed, np.sort(arrivals[0])),
    }
    named = [f"{len(keys)} parts {what}: {_name(plan, keys[0])}" for what, keys in checks.items() if len(keys)]
    return named + _wrong_senders(plan, num_experts)


def _counted(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Every key once, in order, and how often it occurs."""
    keys = np.sort(keys)
    first = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
    return keys[first], np.diff(np.append(first, len(keys)))


def _without(keys: np.ndarray, others: np.ndarray) -> np.ndarray:
    """`others`: in order."""
    # Not by np.isin, whose hash table takes ten times as long for these numbers.
    found = np.searchsorted(others, keys)
    return keys[np.append(others, -1)[found] != keys]


def _wanted(plan: TransferPlan, num_experts: int) -> np.ndarray:
    """Reader and part as one number, for every part that a reader must get."""
    num_parts = len(plan.parts.tensor)
    experts_of_tensors = np.array([-1 if tensor.expert is None else tensor.expert for tensor in plan.tensors])
    experts = experts_of_tensors[plan.parts.tensor]
    keys = []
    for expert in np.unique(experts):
        parts = np.flatnonzero(experts == expert)
        gpus = readers(plan.tensors[plan.parts.tensor[parts[0]]], plan.rollout, num_experts)
        keys.append((np.array(gpus, dtype=np.int64)[:, None] * num_parts + parts).ravel())
    return np.concatenate(keys)


def _wrong_senders(plan: TransferPlan, num_experts: int) -> list[str]:
    having = cache(lambda tensor, shard: holders(plan.tensors[tensor], shard, plan.layout, num_experts))
    pairs, _ = _counted(plan.network.part.astype(np.int64) * plan.layout.ranks + plan.network.source)
    parts, sources = np.divmod(pairs, plan.layout.ranks)
    rows = zip(plan.parts.tensor[parts].tolist(), plan.parts.shard[parts].tolist(), parts.tolist(), sources.tolist(), strict=True)
    wrong = [(part, source) for tensor, shard, part, source in rows if source not in having(tensor, shard)]
    if not wrong:
        return []
    return [f"{len(wrong)} parts are sent by a rank that does not hold them: {_part_name(plan, wrong[0][0])} by rank {wrong[0][1]}"]


def _name(plan: TransferPlan, key: np.int64) -> str:
    gpu, part = divmod(int(key), len(plan.parts.tensor))
    return f"{_part_name(plan, part)} on GPU {gpu}"


def _part_name(plan: TransferPlan, part: int) -> str:
    return f"part {part} ({plan.tensors[plan.parts.tensor[part]].name}, shard {plan.parts.shard[part]})"
