"""Process that holds vLLM's model: the receiving end of a push, as a backend of vLLM's weight transfer."""

import logging
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank, get_tp_group
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization.fp8 import Fp8MoEMethod
from vllm.model_executor.layers.quantization.kv_cache import KVCacheScaleParameter
from vllm.model_executor.layers.quantization.utils import fp8_utils
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader import dummy_loader
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS
from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used

from moerl.models.fp8_blocks import round_up_to_power_of_two
from moerl.rollout.engines.dropped_weights import DroppedWeights, UnsentTensors, live_tensors
from moerl.rollout.engines.installed_bytes import LoadWeights, check_powers_of_two, memory_of, refuse_missed, with_draft
from moerl.rollout.engines.process_push import run_step
from moerl.rollout.engines.vllm import vllm_cpu_fp8, vllm_sampling
from moerl.rollout.engines.vllm.layerwise_bytes import LayerwiseBytes
from moerl.rollout.engines.vllm.vllm_core import FAILED, needs_of, process_number, specs_of
from moerl.types.errors import WeightError
from moerl.weights.installation import Loader
from moerl.weights.verify.places import Place, Start
from moerl.weights.weight_session import WeightSession

logger = logging.getLogger(__name__)

BACKEND = "moerl"

_STACKS_OF_EXPERTS = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
"""gpt-oss's."""

_ABSORBED = ("W_UV", "W_UK_T", "W_UK_T_dcp_qrep")
"""Matrices of latent attention, which vLLM computes of `kv_b_proj` at the end of every reload (layers/attention/mla_attention.py)."""


class WorkerExtension:
    """vLLM makes it a base of every worker before it loads the model."""

    weight_transfer_engine: "Receiver"
    get_draft_model: Callable[[], torch.nn.Module | None]
    get_model: Callable[[], torch.nn.Module]
    _away: UnsentTensors | DroppedWeights

    def receive_drafts(self) -> None:
        """Called before the first push, where that brings the drafting layer: the receiver is made with the model alone."""
        draft = self.get_draft_model()
        assert draft is not None, "the server drafts"
        self.weight_transfer_engine.add_draft(draft)

    def before_sleep(self, drafts_come: bool) -> None:
        """Weights are about to be dropped; the drafting layer's only if the push brings them."""
        draft = self.get_draft_model() if drafts_come else None
        sent = list(sent_tensors(filter(None, (self.get_model(), draft))))
        has_gpu = torch.cuda.is_available()
        self._away = UnsentTensors(in_weights_memory(live_tensors()), sent) if has_gpu else DroppedWeights(sent)

    def after_sleep(self) -> None:
        """Their memory is there again."""
        self._away.restore()
        del self._away

    def check_push(self) -> None:
        """WeightError for what the last step met in any worker. Raised by the last of them only: vLLM's executor reads their answers in
        order and, after one that is an error, leaves the rest to be taken for answers of the next call (MultiprocExecutor)."""
        failures = self.weight_transfer_engine.failures
        if failures and get_tp_group().is_last_rank:
            raise WeightError(FAILED + "; ".join(failures))


@dataclass
class InitInfo(WeightTransferInitInfo):
    offer: str
    """JSON of wire.OFFER."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One of moerl.rollout.engines.process_push."""

    step: str
    body: str


class Receiver(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Registered as BACKEND. Between vLLM's start and finish come "begin", "install", and "finish"; "begin" may come again.
    Nothing is raised here, which would end vLLM's session in some workers only; after every step `check_push` is asked."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any):
        super().__init__(config, vllm_config, device, model)
        self._on_cpu = device.type == "cpu"
        self._draft: torch.nn.Module | None = None
        expected = specs_of(vllm_config, vllm_config.model_config.dtype)
        needs = needs_of(self.parallel_config, expected)[process_number(self.parallel_config)]
        loader = Loader(load=self._load, takes_whole=lambda name: True, settle=self._finish)
        self._session = WeightSession(expected, loader, needs=needs, device=device)
        self._installed = LayerwiseBytes(through_loaders(model), self._session.verify)
        self.failures: tuple[str, ...] = ()
        """Failures of the last step, of all workers."""

    def add_draft(self, draft: torch.nn.Module) -> None:
        """`draft`: the model that drafts. It has layers after the model's last, and shares the embedding and the output layer."""
        self._draft, num_layers = draft, self.model_config.hf_config.num_hidden_layers
        load_weights = with_draft(through_loaders(self.model), through_loaders(draft), num_layers)
        self._installed = LayerwiseBytes(load_weights, self._session.verify)

    @property
    def _loaded(self) -> torch.nn.Module:
        """All that is loaded: modules that the two share are met once."""
        return self.model if self._draft is None else torch.nn.ModuleDict({"model": self.model, "draft": self._draft})

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self._together(partial(self._run_step, "connect", init_info.offer))

    def start_weight_update(self) -> None:
        """Nothing: the model is touched when a manifest was accepted."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        self._together(partial(self._receive, update_info))

    def finish_weight_update(self) -> None:
        """Nothing: everything was checked by then."""

    def shutdown(self) -> None:
        self._session.close()

    def _load(self, name: str, start: Start, tensor: torch.Tensor) -> list[Place] | None:
        if is_deep_gemm_e8m0_used():
            check_powers_of_two(name, tensor, "vLLM")
        return self._installed(name, tensor)

    def _together(self, step: Callable[[], None]) -> None:
        failure, group = "", get_tp_group()
        try:
            step()
        except Exception as error:
            logger.exception("a step of a push failed")
            failure = f"{'' if isinstance(error, WeightError) else f'{type(error).__name__}: '}{error}"
        found = [""] * group.world_size
        torch.distributed.all_gather_object(found, failure, group=group.cpu_group)
        self.failures = tuple(dict.fromkeys(filter(None, found)))

    def _receive(self, update_info: UpdateInfo) -> None:
        self._run_step(update_info.step, update_info.body)
        if update_info.step == "begin":
            self._installed.begin()
            begin_reload(self._loaded, on_cpu=self._on_cpu)

    def _run_step(self, step: str, body: str) -> None:
        run_step(self._session, step, body, process=process_number(self.parallel_config))

    def _finish(self) -> None:
        check_reached(self._loaded)
        with self._installed.watching():
            finish_reload(self._loaded, self.model_config, on_cpu=self._on_cpu)
        if vllm_sampling.saw_nan.is_set():
            self._clean_caches()
            vllm_sampling.saw_nan.clear()

    def _clean_caches(self) -> None:
        """Attention on CPU multiplies what lies behind a sequence in its last block by 0, and 0 times NaN is NaN."""
        for layer in self.vllm_config.compilation_config.static_forward_context.values():
            cache = getattr(layer, "kv_cache", None)
            if isinstance(cache, torch.Tensor) and cache.is_floating_point():
                cache.nan_to_num_()


def _fill_but_scales_of_caches(tensor: torch.Tensor) -> None:
    """vLLM's random weights of a start without a checkpoint (load_format=dummy) are random scales of keys and values too, which nobody
    sends: as they were they stand for 1 (BaseKVCacheMethod)."""
    if not isinstance(tensor, KVCacheScaleParameter):
        _fill(tensor)


def _requantize_others_than_powers_of_two(weight: torch.Tensor, weight_scale: torch.Tensor, block_size: Sequence[int] = (128, 128)) -> None:
    """vLLM rounds blocks for DeepGEMM after every load (requant_weight_ue8m0_inplace), also those whose scales are powers of two: one in
    twenty whose largest value was rounded down to half of the format's gets half its scale and doubled values, and one of zeros or tiny
    values another scale. The bytes would not be those that were sent."""
    if not weight_scale.equal(round_up_to_power_of_two(weight_scale)):
        _requantize(weight, weight_scale, block_size)


def _compare_before(setup: Callable[..., None]) -> Callable[..., None]:
    """`setup` of a method for experts, which makes FlashInfer's layouts in the memory of what was loaded (unquantized_fused_moe_method.py),
    and raises tiny scales there (prepare_fp8_moe_layer_for_fi)."""

    def compared(method: Any, *args: Any, **kwargs: Any) -> None:
        backend = method.fp8_backend if isinstance(method, Fp8MoEMethod) else method.unquantized_backend
        if backend.name.startswith("FLASHINFER"):
            LayerwiseBytes.repacks_in_place()
        setup(method, *args, **kwargs)

    return compared


WeightTransferEngineFactory.register_engine(BACKEND, Receiver)
vllm_sampling.activate()
_fill = dummy_loader.initialize_single_dummy_weight
dummy_loader.initialize_single_dummy_weight = _fill_but_scales_of_caches
_requantize = fp8_utils.requant_weight_ue8m0_inplace
fp8_utils.requant_weight_ue8m0_inplace = _requantize_others_than_powers_of_two
for _method in (UnquantizedFusedMoEMethod, Fp8MoEMethod):
    _method._setup_kernel = _compare_before(_method._setup_kernel)
if not torch.cuda.is_available():
    vllm_cpu_fp8.prepare()


# -- vLLM's layerwise reload (vllm/model_executor/model_loader/reload, 0.32), with what it lacks for a push -----------------------------


def begin_reload(model: torch.nn.Module, *, on_cpu: bool) -> None:
    """Reload begins: until `finish_reload` the model cannot compute. May follow one that was never finished."""
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():  # it has a part of its tensors
            _place_kernel_tensors(layer, info)
            info.reset()
        method: Any = getattr(layer, "quant_method", None)
        if on_cpu and getattr(method, "moe_kernel", None) is not None:
            # Else vLLM takes the experts for repacked already, and repacks them no more (UnquantizedFusedMoEMethod._setup_kernel).
            method.moe_kernel = None
    initialize_layerwise_reload(model)


def check_reached(model: torch.nn.Module) -> None:
    """WeightError for the model's parameters that got nothing. Before the end of vLLM's reload, which fills them with their old values."""
    reached, missed = set[int](), dict[str, int]()
    for layer_name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        in_progress = info.can_load()
        loaded = {name for name, _ in info.loaded_weights} | SKIP_LOAD_TENSORS
        # In progress the layer's own tensors are placeholders.
        kernels = info.kernel_tensors[0] if in_progress and info.kernel_tensors is not None else layer._parameters
        for name in layer._parameters:
            memory = 0 if kernels.get(name) is None else memory_of(kernels[name])
            if isinstance(layer._parameters[name], KVCacheScaleParameter):
                continue  # none of the checkpoint's: see _fill_but_scales_of_caches
            if in_progress and name not in loaded and layer._parameters[name] is not None:
                missed[f"{layer_name}.{name}"] = memory
            else:
                reached.add(memory)
    # An output layer that is tied to the embedding has its memory; what was repacked has none.
    refuse_missed([name for name, memory in missed.items() if memory == 0 or memory not in reached])


def finish_reload(model: torch.nn.Module, model_config: Any, *, on_cpu: bool) -> None:
    finalize_layerwise_reload(model, model_config)
    for module in model.modules() if on_cpu else ():
        if isinstance(module, ParallelLMHead):
            # Tied to the embedding it gets no tensor of its own, and vLLM leaves its packed copy as it was.
            module.quant_method.process_weights_after_loading(module)


def through_loaders(model: Any) -> LoadWeights:
    """The model's loader. A reload layer by layer sees what goes through the loaders of parameters alone, and vLLM's gpt-oss
    (vllm/model_executor/models/gpt_oss.py, 0.32) copies stacks of experts and sinks past them: it gets experts one by one."""
    load: LoadWeights = model.load_weights

    def load_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            block, _, kind = name.rpartition(".experts.")
            if kind in _STACKS_OF_EXPERTS:
                load([(f"{block}.experts.{expert}.{kind}", part) for expert, part in enumerate(tensor)])
            elif name.endswith(".self_attn.sinks"):
                sinks = model.get_parameter(name.replace(".self_attn.", ".attn."))
                first = get_tensor_model_parallel_rank() * len(sinks)
                sinks.weight_loader(sinks, tensor[first : first + len(sinks)])
            else:
                load([(name, tensor)])

    return load_weights


# -- vLLM's sleep (0.32): tensors that a push brings, and those in the memory that goes with the weights ------------------


def sent_tensors(models: Iterable[torch.nn.Module]) -> Iterator[torch.Tensor]:
    """Tensors that hold what a push brought. Of a layer that checkpoints have a tensor of, a reload writes every parameter."""
    for model in models:
        for layer in model.modules():
            loaded, _ = get_layerwise_info(layer).restore_metadata
            if any(_is_sent(*each) for each in loaded.items()):
                yield from (each for name, each in layer._parameters.items() if each is not None and _is_sent(name, each))
            yield from (each for name in _ABSORBED if isinstance(each := getattr(layer, name, None), torch.Tensor))


def _is_sent(name: str, parameter: torch.Tensor) -> bool:
    return name not in SKIP_LOAD_TENSORS and not isinstance(parameter, KVCacheScaleParameter)


def in_weights_memory(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Those of `tensors` that sleep takes with the weights."""
    from vllm.device_allocator.cumem import CuMemAllocator

    found = CuMemAllocator.get_instance().pointer_to_data
    spans = sorted((start, start + data.handle[1]) for start, data in found.items() if data.tag == "weights")
    for each in tensors:
        at = memory_of(each)
        before = bisect(spans, (at, float("inf"))) - 1
        if before >= 0 and at < spans[before][1]:
            yield each
