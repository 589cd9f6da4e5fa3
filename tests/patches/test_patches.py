"""Each patch is needed, checks its target, and is found missing when it is undone. Everything runs in processes of its own."""

import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import pytest

TRAIN = Path(__file__).parent.parent / "train"
sys.path.insert(0, str(TRAIN))

from engine_ranks import random_batch, run_ranks, settings  # noqa: E402

from megatron_patches.errors import PatchError, require_source  # noqa: E402
from moerl.config.layout import Layout  # noqa: E402
from moerl.config.schema import ScratchModel  # noqa: E402
from moerl.models.scratch import write_scratch_model  # noqa: E402

ALL = ("cuda_stand_in", "reference_te", "alltoall_splits", "uneven_gloo")


def python(code: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model") / "moe"
    shape = ScratchModel(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=8, ffn_size=8, num_experts=4)
    write_scratch_model(shape, 32, directory, seed=0)
    return directory


def logprobs(engine, batch):
    return engine.logprobs(batch)


def without(patch: str) -> tuple[str, ...]:
    return tuple(name for name in ALL if name != patch)


@pytest.mark.parametrize(
    ("patch", "layout"),
    [
        ("cuda_stand_in", Layout()),
        ("reference_te", Layout()),
        ("alltoall_splits", Layout(ranks=2, ep=2)),
        ("uneven_gloo", Layout(ranks=4, tp=2, ep=2, etp=2)),
    ],
)
def test_without_the_patch_the_engine_fails(patch, layout, checkpoint, tmp_path):
    with pytest.raises(RuntimeError):
        run_ranks(logprobs, settings(checkpoint, layout), tmp_path / "store", random_batch(), patches=without(patch))


def test_all_are_active_after_activation_and_twice_is_once():
    done = python("import megatron_patches as p; print(p.activate()); print(p.activate()); p.assert_active()")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(ALL)] * 2


def test_an_undone_patch_is_found():
    undo = "import torch; torch.cuda.current_device = lambda: 0"
    done = python(f"import megatron_patches as p; p.activate(); {undo}; p.assert_active()")
    assert "PatchError: patches not in force: cuda_stand_in" in done.stderr


def test_activation_after_megatron_is_refused():
    done = python("import megatron.core; import megatron_patches as p; p.activate()")
    assert "must run before megatron.core is imported" in done.stderr


def test_changed_upstream_source_is_refused_with_what_to_do():
    with pytest.raises(PatchError, match=r"OrderedDict.move_to_end has changed .* knows megatron-core 0\.16\.1"):
        require_source(_python_function(), {"0123456789abcdef": "megatron-core 0.16.1"}, "some_patch")


def _python_function():
    def move_to_end():
        return OrderedDict

    move_to_end.__qualname__ = "OrderedDict.move_to_end"
    return move_to_end


def test_the_reference_adam_equals_torch_adamw():
    code = """
import megatron_patches as p; p.activate()
import torch
from transformer_engine.pytorch.optimizers import FusedAdam
torch.manual_seed(0)
ours, theirs = (torch.nn.Parameter(torch.ones(50)) for _ in range(2))
settings = dict(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
a, b = FusedAdam([ours], **settings), torch.optim.AdamW([theirs], **settings)
for step in range(20):
    ours.grad = torch.randn(50); theirs.grad = ours.grad.clone()
    a.step(); b.step()
assert a.param_groups[0]["step"] == 20
print(float((ours - theirs).abs().max()))
"""
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1e-6


def test_packed_attention_equals_each_sequence_alone():
    code = """
import megatron_patches as p; p.activate()
import torch
from transformer_engine.pytorch import DotProductAttention
torch.manual_seed(0)
attend = DotProductAttention(4, 8, num_gqa_groups=2)
q, k, v = torch.randn(12, 4, 8), torch.randn(12, 2, 8), torch.randn(12, 2, 8)
bounds = torch.tensor([0, 5, 7, 12], dtype=torch.int32)
packed = attend(q, k, v, qkv_format="thd", attn_mask_type="padding_causal", cu_seqlens_q=bounds)
for a, b in zip(bounds[:-1], bounds[1:]):
    for i in range(a, b):
        scores = torch.einsum("hd,shd->hs", q[i], k[a:i + 1].repeat_interleave(2, 1)) / 8 ** 0.5
        expected = torch.einsum("hs,shd->hd", scores.softmax(-1), v[a:i + 1].repeat_interleave(2, 1)).reshape(-1)
        assert torch.allclose(packed[i], expected, atol=1e-6), (i, packed[i], expected)
"""
    done = python(code)
    assert done.returncode == 0, done.stderr


def test_replicated_experts_need_their_gradients_summed(checkpoint, tmp_path):
    """tp=2, ep=1, etp=1: what moerl.train.model._reduce_replicated_experts is for."""
    chosen = settings(checkpoint, Layout(ranks=2, tp=2))
    right = run_ranks(grad_norm, chosen, tmp_path / "right", random_batch(), False)
    wrong = run_ranks(grad_norm, chosen, tmp_path / "wrong", random_batch(), True)
    assert abs(right - wrong) > 1e-3 * right


def grad_norm(engine, batch, undo):
    from moerl.algorithms.grpo import GRPO
    from moerl.config.schema import GRPOConfig
    from moerl.train import model
    from moerl.train.engine import MegatronEngine

    if undo:
        model._reduce_replicated_experts = lambda chunk, layout: None
        engine = MegatronEngine(engine._settings)
    return engine.update(batch, GRPO(GRPOConfig()), lr=0.0, num_updates=1).grad_norm
