"""In the process that holds vLLM's model: the receiving end of a push, as a backend of vLLM's weight transfer, and log-probs as moerl
means them.

vLLM loads a layer when the last of its tensors has come, and may then repack it into a layout of its own. So what is compared is every
tensor as it arrived, and that vLLM's loader then copied all of it, without a cast; what repacking did shows in the canary's log-probs.
"""

from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.v1.sample.sampler import Sampler

from moerl.rollout import wire
from moerl.rollout.engines.installed import CopyLog
from moerl.rollout.hf.model import checkpoint_specs
from moerl.types import WeightError
from moerl.weights.receive import WeightSession
from moerl.weights.spec import first_few

BACKEND = "moerl"

_SAW_NAN = Event()
"""Since the last push, on CPU."""


class WorkerExtension:
    """vLLM resolves this name in every worker before it loads the model; the module's registrations are what it is for."""


@dataclass
class InitInfo(WeightTransferInitInfo):
    offer: str
    """JSON of wire.OFFER."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    step: str
    body: str
    """JSON of moerl.rollout.wire."""


class Receiver(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Registered as BACKEND. Between start and finish come "begin", "install" per bucket, and "finish"."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module):
        super().__init__(config, vllm_config, device, model)
        expected = checkpoint_specs(Path(vllm_config.model_config.model), vllm_config.model_config.dtype)
        self._session = WeightSession(expected, self._load)
        self._log = CopyLog()
        self._sent: dict[int, tuple[str, torch.Tensor]] = {}
        """Of the push in progress, by the address of its memory."""

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        offer = wire.OFFER.validate_json(init_info.offer)
        if offer.transport == "gloo" and self.parallel_config.world_size > 1:
            raise WeightError("weights.transport = gloo: reaches one process of a server only; a server with several workers needs shm")
        self._session.connect(offer)

    def start_weight_update(self) -> None:
        self._sent, self._log = {}, CopyLog()
        for module in self.model.modules():
            # Else vLLM takes the weights for repacked already, and repacks them no more (UnquantizedFusedMoEMethod, 0.32).
            if getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None:
                module.quant_method.moe_kernel = None
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        if update_info.step == "begin":
            self._session.begin(wire.MANIFEST.validate_json(update_info.body))
        elif update_info.step == "install":
            self._session.install(wire.BUCKET.validate_json(update_info.body))
        else:
            self._session.finish(wire.FINISH.validate_json(update_info.body).version)

    def finish_weight_update(self) -> None:
        with self._log:
            finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            self._repack_output()
        self._check_copies()
        self._sent, self._log = {}, CopyLog()
        if _SAW_NAN.is_set():
            self._clean_caches()
            _SAW_NAN.clear()

    def shutdown(self) -> None:
        self._session.close()

    def _load(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        kept = tensor.clone()  # until its layer is complete
        self._sent[kept.untyped_storage().data_ptr()] = (name, kept)
        with self._log:
            self.model.load_weights([(name, kept)])
        return kept

    def _repack_output(self) -> None:
        """An output layer that is tied to the embedding gets no tensor of its own, so vLLM leaves its packed copy as it was (0.32)."""
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

    def _clean_caches(self) -> None:
        """Attention on CPU multiplies what lies behind a sequence in its last block by 0, and 0 times NaN is NaN."""
        for layer in self.vllm_config.compilation_config.static_forward_context.values():
            cache = getattr(layer, "kv_cache", None)
            if isinstance(cache, torch.Tensor) and cache.is_floating_point():
                cache.nan_to_num_()

    def _check_copies(self) -> None:
        taken = dict.fromkeys(self._sent, 0)
        for target, source in self._log.copies:
            address = source.untyped_storage().data_ptr()
            if address in taken and not target.is_meta and target.dtype == source.dtype:
                taken[address] += source.numel()
        is_cut = self.parallel_config.world_size > 1
        missing = [
            name for address, (name, kept) in self._sent.items() if not (taken[address] if is_cut else taken[address] == kept.numel())
        ]
        if missing:
            raise WeightError(
                f"vLLM's loader did not copy {len(missing)} tensors as they came, once and whole: {first_few(missing)}. It may quantize or "
                "convert what it loads; engine arguments that change the weights' format are not supported"
            )


_forward = Sampler.forward


def _forward_with_logprobs_at_temperature(sampler: Any, logits: torch.Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
    """vLLM reports log-probs at temperature 1 (raw) or after top-k and top-p (processed); moerl's are at the temperature, before those."""
    temperature = sampling_metadata.temperature

    def compute_logprobs(raw: torch.Tensor) -> torch.Tensor:
        # Greedy rows have temperature 0 and are reported at 1; None: all are greedy.
        divisor = 1.0 if temperature is None else torch.where(temperature < 1e-5, 1.0, temperature)[:, None]
        logprobs = (raw.float() / divisor).log_softmax(dim=-1)
        if logprobs.device.type == "cpu" and logprobs.isnan().any():
            _SAW_NAN.set()
        return logprobs

    sampler.compute_logprobs = compute_logprobs
    return _forward(sampler, logits, sampling_metadata, *args, **kwargs)


WeightTransferEngineFactory.register_engine(BACKEND, Receiver)
Sampler.forward = _forward_with_logprobs_at_temperature
