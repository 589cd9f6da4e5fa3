"""Process that holds SGLang's model: the receiving end of a weight push, and a seed of its own for every request."""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from moerl.models.fp8_names import SCALE_SUFFIX
from moerl.rollout.engines.dropped_weights import DroppedWeights, UnsentTensors
from moerl.rollout.engines.hf.hf_model import checkpoint_specs
from moerl.rollout.engines.installed_bytes import InstalledBytes, LoadWeights, check_powers_of_two, with_draft
from moerl.rollout.engines.process_push import needs_of_processes, run_step
from moerl.rollout.engines.sglang import sglang_fp8, sglang_patches, sglang_weight_memory
from moerl.types.errors import WeightError
from moerl.types.push import Needs, TensorSpec
from moerl.weights.installation import Loader
from moerl.weights.verify.places import Place, Start
from moerl.weights.weight_session import WeightSession

logger = logging.getLogger(__name__)

INSTALL_METHOD = "moerl_weights"
"""The method this module adds to SGLang's scheduler; called by its collective_rpc."""

_FUSED = "fused_qkv_a_proj_with_mqa.weight"
_PARTS_OF_FUSED = ("q_a_proj.weight", "kv_a_proj_with_mqa.weight")
"""Tensors in the order of its rows."""

_EMBEDDING, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"


def run_scheduler(server_args: Any, *args: Any, **kwargs: Any) -> None:
    """SGLang's run_scheduler_process, with what moerl adds."""
    from moerl.rollout.engines.sglang import sglang_cpu, sglang_cpu_drafts, sglang_cpu_fp8

    if server_args.device == "cpu":
        sglang_cpu.prepare()
        sglang_cpu.after_import()
        sglang_cpu_fp8.prepare()
        if server_args.speculative_algorithm:
            sglang_cpu_drafts.after_import()
    from sglang.srt.managers.scheduler import Scheduler, run_scheduler_process

    setattr(Scheduler, INSTALL_METHOD, _weights)
    sglang_fp8.prepare()
    sglang_weight_memory.prepare()
    sglang_patches.prepare(records_routes=server_args.enable_return_routed_experts)
    run_scheduler_process(server_args, *args, **kwargs)


def specs_of(server_args: Any, dtype: torch.dtype) -> dict[str, TensorSpec]:
    """Tensors that a push must bring. `dtype`: of those that do not come in FP8."""
    fp8 = server_args.quantization == "fp8"
    return checkpoint_specs(Path(server_args.model_path), dtype, fp8=fp8, with_mtp=_drafts_come(server_args))


def _drafts_come(server_args: Any) -> bool:
    """Pushes bring the drafting layer: it was made without the checkpoint's (sglang_launch.py)."""
    return bool(server_args.speculative_draft_load_format == "dummy")


def needs_of(server_args: Any, names: Iterable[str]) -> Needs:
    """Needs of all processes of a server, from the `names` of its model's tensors."""
    return needs_of_processes(names, num_processes=server_args.tp_size, expert_parallel=server_args.ep_size)


def _weights(scheduler: Any, step: str, body: str) -> None:
    """One step of a push, whose `body` is the JSON of moerl.rollout.server.wire, or sleep or wake. What it raises, SGLang returns as
    text, of the first rank alone: so every rank raises what any of them has found."""
    group, reason = scheduler.tp_group, None
    try:
        _take_step(scheduler, step, body)
    except Exception as error:
        logger.exception("%s of a push failed", step)
        reason = str(error)
    reasons: list[str | None] = [reason] * group.world_size
    if group.world_size > 1:
        torch.distributed.all_gather_object(reasons, reason, group=group.cpu_group)
    if any(found is not None for found in reasons):
        raise WeightError(_explain(reasons))


def _explain(reasons: list[str | None]) -> str:
    """Failures of all ranks, from one entry of each; None: it has not failed."""
    ranks: dict[str, list[str]] = {}
    for rank, reason in enumerate(reasons):
        if reason is not None:
            ranks.setdefault(reason, []).append(str(rank))
    if len(ranks) == 1 and None not in reasons:
        return next(iter(ranks))
    return "; ".join(f"on rank {', '.join(which)} of the server's {len(reasons)}: {reason}" for reason, which in ranks.items())


def _take_step(scheduler: Any, step: str, body: str) -> None:
    model = getattr(scheduler, "moerl_model", None)
    if model is None:
        model = scheduler.moerl_model = _Model(scheduler)
    if step in ("sleep", "wake"):
        model.sleep() if step == "sleep" else model.wake()
        return
    if step == "connect":
        sglang_weight_memory.check_takes_weights(model.modules.values())
    if step == "begin":
        sglang_fp8.unpack(model.parameters())
        model.installed.begin()
    run_step(model.session, step, body, process=scheduler.tp_group.rank_in_group)


def _with_parts_of_fused(model: Any, renamed: tuple[str, str] = ("", "")) -> LoadWeights:
    """The model's loader. Latent attention has one parameter for two tensors, which SGLang loads only when both come in one call.
    `renamed`: how names of the checkpoint begin, and those of the model's parameters instead."""
    load: LoadWeights = model.load_weights
    parameters = dict(model.named_parameters())

    def load_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            prefix, _, last = name.replace(*renamed, 1).removesuffix(SCALE_SUFFIX).rpartition(".self_attn.")
            suffix = SCALE_SUFFIX if name.endswith(SCALE_SUFFIX) else ""
            fused = parameters.get(f"{prefix}.self_attn.{_FUSED}{suffix}") if last in _PARTS_OF_FUSED else None
            if fused is None:
                load([(name, tensor)])
            else:
                rows = slice(0, len(tensor)) if last == _PARTS_OF_FUSED[0] else slice(len(fused) - len(tensor), None)
                fused.data[rows].copy_(tensor)

    return load_weights


class _Model:
    """SGLang's model, with the one that drafts if that comes by a push too, and how a push gets into them. What else is in their memory is
    kept while they sleep; SGLang itself keeps a drafting model that no push brings (sglang_launch.py)."""

    _away: DroppedWeights | UnsentTensors

    def __init__(self, scheduler: Any):
        from sglang.srt.layers import deep_gemm_wrapper

        scheduler.model_config.hf_eos_token_id = None  # requests name the tokens that stop them, all of them
        self._takes_powers = bool(deep_gemm_wrapper.DEEPGEMM_SCALE_UE8M0)
        runner = scheduler.tp_worker.model_runner
        draft = scheduler.draft_worker.draft_worker.draft_runner.model if _drafts_come(scheduler.server_args) else None
        self.modules: dict[str, torch.nn.Module] = {"": runner.model} | ({} if draft is None else {"draft.": draft})
        config = runner.model_config.hf_config
        self._ties = bool(config.tie_word_embeddings)
        specs = specs_of(scheduler.server_args, runner.dtype)
        known = specs | ({_OUTPUT: replace(specs[_EMBEDDING], name=_OUTPUT)} if self._has_copy(_EMBEDDING) else {})
        load, num_layers = _with_parts_of_fused(runner.model), config.num_hidden_layers
        if draft is not None:
            load_draft = _with_parts_of_fused(draft, (f"model.layers.{num_layers}.", "model.decoder."))
            load = with_draft(load, load_draft, num_layers)
        self.installed = InstalledBytes(load, known)
        needs = needs_of(scheduler.server_args, specs)[scheduler.tp_group.rank_in_group]
        loader = Loader(load=self._load, takes_whole=self._takes_whole, settle=self._check_reached)
        self._device = next(runner.model.parameters()).device
        self.session = WeightSession(specs, loader, needs=needs, device=self._device)

    def sleep(self) -> None:
        """Their memory is about to go, or goes here on CPU; only with what a push brings again."""
        sent: list[torch.Tensor] = [parameter for _, parameter in self.parameters()]
        sent += [tensor for module in self.modules.values() for tensor in sglang_weight_memory.absorbed(module)]
        on_cpu = self._device.type == "cpu"
        self._away = DroppedWeights(sent) if on_cpu else UnsentTensors(sglang_weight_memory.of_weights(self._device), sent)

    def wake(self) -> None:
        """It is there again."""
        self._away.restore()
        del self._away

    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        named = ((before + name, parameter) for before, module in self.modules.items() for name, parameter in module.named_parameters())
        return ((name, parameter) for name, parameter in named if sglang_fp8.comes_by_push(name))

    def _load(self, name: str, start: Start, piece: torch.Tensor) -> list[Place]:
        if self._takes_powers:
            check_powers_of_two(name, piece, "SGLang")
        places = self.installed(name, start, piece)
        return places + self.installed(_OUTPUT, start, piece) if self._has_copy(name) else places

    def _takes_whole(self, name: str) -> bool:
        return self.installed.takes_whole(name) or (self._has_copy(name) and self.installed.takes_whole(_OUTPUT))

    def _has_copy(self, name: str) -> bool:
        """Some of SGLang's models (Qwen3-MoE) have an output layer of their own whatever the configuration says."""
        return name == _EMBEDDING and self._ties and _OUTPUT in dict(self.parameters())

    def _check_reached(self) -> None:
        self.installed.check_reached(self.parameters())
