"""What a rank does with Megatron-Bridge itself: it loads what moerl wrote, and saves that again."""

from pathlib import Path

from torch import Tensor


def load_export_save(cases: list[tuple[Path, Path, Path]]) -> list[dict[str, Tensor]]:
    """Of each (model, its iteration as written, where to save): the tensors that Megatron-Bridge exports after loading."""
    return [_load_export_save(*case) for case in cases]


def _load_export_save(model: Path, written: Path, saved: Path) -> dict[str, Tensor]:
    from megatron.bridge import AutoBridge
    from megatron.bridge.training.model_load_save import load_megatron_model, save_megatron_model
    from megatron.core import parallel_state, tensor_parallel

    import megatron_patches

    megatron_patches.activate()  # again: those of Megatron-Bridge are needed only now
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    chunks = load_megatron_model(str(written), use_cpu_init=True)
    exported = dict(AutoBridge.from_hf_pretrained(str(model)).export_hf_weights(chunks, cpu=True, show_progress=False))
    save_megatron_model(chunks, str(saved))
    parallel_state.destroy_model_parallel()
    return exported
