"""Every patch is needed, is in force, refuses code it was not written for, and says so when it comes too late."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from engine_cases import LAYOUTS, random_batch, settings
from engine_jobs import first_step
from engine_ranks import RankError, run_ranks

import megatron_patches

ROOT = Path(megatron_patches.__file__).parent.parent
BUILD = """
import sys, megatron_patches
megatron_patches.PATCHES = tuple(patch for patch in megatron_patches.PATCHES if patch.NAME != sys.argv[1])
megatron_patches.activate()
import torch.distributed as dist
from pathlib import Path
from engine_cases import settings
from engine_jobs import new_engine
from moerl.config.layout import Layout
dist.init_process_group("gloo", init_method="file://" + sys.argv[3], rank=0, world_size=1)
new_engine(settings(Path(sys.argv[2]), Layout()))
"""


def last_line_of(program, *args):
    """Of the traceback with which a new interpreter ended, without its class's module; empty if it ended well."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests/train")])
    command = [sys.executable, "-W", "ignore", "-c", program, *map(str, args)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | {"PYTHONPATH": path})
    return "" if ended.returncode == 0 else ended.stderr.strip().splitlines()[-1]


# -- needed ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("patch", "error"), [("none", ""), ("cuda_stand_in", "CUDA|NVIDIA"), ("reference_te", "[Tt]ransformer.?[Ee]ngine|TE|NoneType")]
)
def test_an_engine_needs_what_stands_in_for_cuda_and_transformer_engine(patch, error, checkpoints, tmp_path):
    line = last_line_of(BUILD, patch, checkpoints["qwen3_moe"], tmp_path / "store")
    print(line)
    assert line == "" if patch == "none" else __import__("re").search(error, line)


@pytest.mark.parametrize(("patch", "layout"), [("alltoall_splits", "ep2"), ("uneven_gloo", "tp2-etp2")])
def test_a_layout_needs_its_patch(patch, layout, checkpoints):
    chosen = settings(checkpoints["qwen3_moe"], LAYOUTS[layout])
    with pytest.raises(RankError) as error:
        run_ranks(first_step, 2, chosen, random_batch(), without=[patch], deadline_seconds=20)
    print(str(error.value))
    assert run_ranks(first_step, 2, chosen, random_batch()).num_tokens > 0
