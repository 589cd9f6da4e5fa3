"""The tensors of a run's pushes, for whoever plans them: builds the model on meta tensors, in a process where no Megatron runs yet."""

import megatron_patches
from moerl.config.derive.model_configs import model_config
from moerl.config.schema.run_config import RunConfig
from moerl.weights.plan.fp8_pairs import with_scales
from moerl.weights.plan.transfer_plan import PlannedTensor


def push_tensors(config: RunConfig) -> list[PlannedTensor]:
    """See `moerl.train.megatron.on_meta.tensors_to_push`."""
    with megatron_patches.quiet(), megatron_patches.without_loggers():
        megatron_patches.activate(with_reference=True)  # meta tensors need no kernels, and planning no GPU
        from moerl.train.megatron.on_meta import tensors_to_push

        hf = model_config(config.model)
        max_context, dtype = config.model.max_context, config.rollout_dtype
        tensors = tensors_to_push(hf, config.train, max_context=max_context, dtype=dtype, with_mtp=config.pushes_mtp)
        return with_scales(tensors) if config.rollout.layout.weights == "fp8" else tensors
