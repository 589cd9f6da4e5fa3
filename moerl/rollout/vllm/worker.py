"""In the process that holds vLLM's model: the receiving end of a push, as a backend of vLLM's weight transfer."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info

from moerl.rollout.engines.push_steps import run_step
from moerl.rollout.hf.model import checkpoint_specs
from moerl.rollout.vllm import sampling
from moerl.rollout.vllm.installed import LayerwiseBytes, check_reached
from moerl.weights.receive import WeightSession

BACKEND = "moerl"


class WorkerExtension:
    """vLLM resolves this name in every worker before it loads the model; what this module registers is what it is for."""


@dataclass
class InitInfo(WeightTransferInitInfo):
    offer: str
    """JSON of wire.OFFER."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One of moerl.rollout.engines.push_steps."""

    step: str
    body: str


class Receiver(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Registered as BACKEND. Between vLLM's start and finish come "begin", "install" per bucket, and "finish"; "begin" may come again."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any):
        super().__init__(config, vllm_config, device, model)
        self._installed = LayerwiseBytes(model.load_weights)
        expected = checkpoint_specs(Path(vllm_config.model_config.model), vllm_config.model_config.dtype)
        self._session = WeightSession(expected, self._installed)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self._run_step("connect", init_info.offer)

    def start_weight_update(self) -> None:
        """Nothing: the model is touched when a manifest was accepted."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        self._run_step(update_info.step, update_info.body)
        if update_info.step == "begin":
            self._begin_reload()
        elif update_info.step == "finish":
            check_reached(self.model)

    def finish_weight_update(self) -> None:
        with self._installed.watching():
            finalize_layerwise_reload(self.model, self.model_config)
        self._installed.check()
        if self.device.type == "cpu":
            self._repack_output()
            if sampling.saw_nan.is_set():
                self._clean_caches()
                sampling.saw_nan.clear()

    def shutdown(self) -> None:
        self._session.close()

    def _run_step(self, step: str, body: str) -> None:
        run_step(self._session, step, body, num_workers=self.parallel_config.world_size)

    def _begin_reload(self) -> None:
        self._installed.begin()
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():  # a push that was never finished left it with a part of its tensors
                _place_kernel_tensors(layer, info)
                info.reset()
            if self.device.type == "cpu" and getattr(getattr(layer, "quant_method", None), "moe_kernel", None) is not None:
                # Else vLLM takes the experts for repacked already, and repacks them no more (UnquantizedFusedMoEMethod._setup_kernel).
                layer.quant_method.moe_kernel = None
        initialize_layerwise_reload(self.model)

    def _repack_output(self) -> None:
        """An output layer that is tied to the embedding gets no tensor of its own, so vLLM leaves its packed copy as it was."""
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

    def _clean_caches(self) -> None:
        """Attention on CPU multiplies what lies behind a sequence in its last block by 0, and 0 times NaN is NaN."""
        for layer in self.vllm_config.compilation_config.static_forward_context.values():
            cache = getattr(layer, "kv_cache", None)
            if isinstance(cache, torch.Tensor) and cache.is_floating_point():
                cache.nan_to_num_()


WeightTransferEngineFactory.register_engine(BACKEND, Receiver)
sampling.activate()
