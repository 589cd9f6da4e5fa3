"""What a rank does with Megatron-Bridge itself: it loads what moerl wrote, in both of its ways, and saves that again."""

from pathlib import Path

import torch
from torch import Tensor


def load_export_save(cases: list[tuple[Path, Path, Path]]) -> list[dict[str, Tensor]]:
    """Of each (model, folder as written, where to save): the tensors that Megatron-Bridge exports after loading for inference. What it
    saves are weights that it loaded anew, as a run of it begins from a pretrained checkpoint."""
    return [_load_export_save(*case) for case in cases]


def _load_export_save(model: Path, written: Path, saved: Path) -> dict[str, Tensor]:
    from megatron.bridge import AutoBridge
    from megatron.bridge.training.model_load_save import load_megatron_model, save_megatron_model
    from megatron.core import parallel_state, tensor_parallel

    import megatron_patches

    megatron_patches.activate()  # again: those of Megatron-Bridge are needed only now
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    chunks = load_megatron_model(str(written / "iter_0000000"), use_cpu_init=True)
    bridge = AutoBridge.from_hf_pretrained(str(model))
    exported = {name: tensor.clone() for name, tensor in bridge.export_hf_weights(chunks, cpu=True, show_progress=False)}
    _begin_from(written, chunks)
    save_megatron_model(chunks, str(saved))
    parallel_state.destroy_model_parallel()
    return exported


def _begin_from(pretrained: Path, chunks: list[torch.nn.Module]) -> None:
    """Away from its weights, then as Megatron-Bridge's training does with checkpoint.pretrained_checkpoint."""
    from megatron.bridge.training.checkpointing import load_checkpoint
    from megatron.bridge.training.config import CheckpointConfig, ConfigContainer, LoggerConfig
    from megatron.bridge.training.state import GlobalState
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.utils import get_model_config

    with torch.no_grad():
        for tensor in chunks[0].state_dict().values():
            if torch.is_tensor(tensor) and tensor.is_floating_point():
                tensor.zero_()
    state = GlobalState()
    state.cfg = ConfigContainer(
        model=get_model_config(chunks[0]),
        optimizer=OptimizerConfig(use_distributed_optimizer=False),
        checkpoint=CheckpointConfig(pretrained_checkpoint=str(pretrained), ckpt_format="torch_dist"),
        logger=LoggerConfig(),
        **dict.fromkeys(("train", "ddp", "scheduler", "dataset", "tokenizer", "dist")),
    )
    load_checkpoint(state, chunks, None, None)
