"""What the ranks of the tests of other bridges do: the same models under the native bridge and under another."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from moerl.train.engine_settings import EngineSettings
from moerl.weights.plan.run_plan import plan_deliveries
from moerl.weights.plan.spec_tensors import box_of


def differences(chosen: Sequence[EngineSettings], bridge: str) -> list[list[str]]:
    """Of each model: every difference between the two bridges, on any rank."""
    from moerl.train.megatron.process_groups import initialize_groups

    initialize_groups(chosen[0].train.layout, 1)
    return [_differences(settings, bridge) for settings in chosen]


def _differences(settings: EngineSettings, bridge: str) -> list[str]:
    from moerl.train.megatron_engine import MegatronEngine

    native = MegatronEngine(settings)
    other = MegatronEngine(dataclasses.replace(settings, train=dataclasses.replace(settings.train, bridge=bridge)))
    found = [f"loaded {name}" for name in _loaded_differently(native, other)]
    for engine in (native, other):
        _train(engine)
    for with_mtp in (True, False):
        exported = [dict(engine.export(with_mtp=with_mtp)) for engine in (native, other)]
        found += _exported_differently(*exported)
        if dist.get_rank() == 0 and list(exported[1]) != other.model.bridge.names(with_mtp=with_mtp):
            found.append("names() are not those of export()")
    specs = [{spec.name: spec for spec in engine.pushed.specs()} for engine in (native, other)]
    found += [] if specs[0] == specs[1] else ["specs of a push"]
    found += _pushed_differently(other, exported[1])
    if sum(t.numel() for t in native.model.bridge.tensors()) != sum(t.numel() for t in other.model.bridge.tensors()):
        found.append("tensors()")
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, found)
    return [f"rank {rank}: {fault}" for rank, faults in enumerate(everywhere) for fault in faults]


def _pushed_differently(engine: Any, exported: dict[str, torch.Tensor]) -> list[str]:
    """From what the package's export (without multi-token prediction) gave: rank 0 has all of it, and alone sends."""
    outline = engine.pushed.outline(bucket_bytes=2000)
    names = tuple(tensor.name for tensor in outline.tensors)
    jobs = plan_deliveries(outline, {"server": (names,)}).jobs
    engine.pushed.gather()
    entries = [entry for bucket in jobs[0] for entry in bucket.entries] if dist.get_rank() == 0 else []
    read, pieces = engine.pushed.read, {entry.name: entry for entry in entries}
    wrong = [e.name for e in entries if not read(e.name, e.start, e.shape).equal(box_of(exported[e.name], e.start, e.shape))]
    engine.pushed.release()
    return [f"pushed {name}" for name in wrong] + (["senders"] if set(jobs) != {0} or set(pieces) != set(exported) else [])


def _train(engine: Any) -> None:
    """Move every parameter, as a step of the optimizer would: what is exported next must be of the model, not of its checkpoint."""
    with torch.no_grad():
        for tensor in engine.model.bridge.tensors():
            if tensor.is_floating_point():
                tensor.mul_(1.25)


def _loaded_differently(native: Any, other: Any) -> list[str]:
    """Names of parameters and buffers; without what pads the vocabulary, there are no others."""
    differing = []
    for ours, theirs in zip(native.model.chunks, other.model.chunks, strict=True):
        pairs = zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True)
        differing += [name for (name, a), b in pairs if torch.is_tensor(a) and not torch.equal(a, b)]
    return differing


def _exported_differently(native: dict[str, Any], other: dict[str, Any]) -> list[str]:
    faults = [f"name {name}" for name in native.keys() ^ other.keys()]
    for name in native.keys() & other.keys():
        if native[name].dtype != other[name].dtype or not torch.equal(native[name], other[name]):
            faults.append(f"tensor {name}")
    return faults


def group_limits(settings: EngineSettings) -> tuple[Any, ...]:
    """(groups, groups a token may go to) of mbridge's own configuration of the model, then of the engine's."""
    import mbridge

    from moerl.train.megatron.process_groups import initialize_groups
    from moerl.train.megatron_engine import MegatronEngine

    initialize_groups(settings.train.layout, 1)
    engine = MegatronEngine(settings)
    theirs = mbridge.AutoBridge.from_pretrained(str(settings.model_dir), dtype=torch.float32).config
    return tuple((config.moe_router_num_groups, config.moe_router_group_topk) for config in (theirs, engine.model.config))


def build_engine(settings: EngineSettings) -> None:
    from moerl.train.megatron.process_groups import initialize_groups
    from moerl.train.megatron_engine import MegatronEngine

    initialize_groups(settings.train.layout, 1)
    MegatronEngine(settings)
