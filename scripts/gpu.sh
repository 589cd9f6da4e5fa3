#!/usr/bin/env bash
# Makes .venv-gpu, the trainer's environment on a machine with GPUs, from locks/trainer-ENGINE.txt: PyTorch and NCCL are those of the
# engine that it pushes to (ENGINES, one of sglang and vllm). PYTHON is a Python 3.12. Nothing is left that trains without Transformer
# Engine: unless that can be imported, it is an error.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

ENGINE=${ENGINES:-sglang}
PYTHON=${PYTHON:-python3.12}
VENV=.venv-gpu
LOCK=trainer-$ENGINE

fail() { printf 'gpu: %s\n' "$*" >&2; exit 1; }

[ -f "locks/$LOCK.txt" ] || fail "no trainer for $ENGINE: ENGINES names one of sglang and vllm"
command -v nvidia-smi >/dev/null || fail "no GPU here (nvidia-smi is not on PATH); make venv makes the environment for CPU"
"$PYTHON" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null ||
    fail "$PYTHON is no Python 3.12 with its venv module: make gpu PYTHON=/path/to/python3.12"
PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin
command -v nvcc >/dev/null || fail "needs CUDA 13's compiler for Transformer Engine and flash-attn: nvcc on PATH, or CUDA_HOME"

wanted=$(printf '%s\n' "$PWD" "$("$PYTHON" -V)"; cat "locks/$LOCK.txt" pyproject.toml scripts/gpu.sh scripts/from_lock.sh)
if ! [ -x "$VENV/bin/python" ] || [ "$wanted" != "$(cat "$VENV/.installed" 2>/dev/null)" ]; then
    printf 'gpu: making %s with %s from locks/%s.txt\n' "$VENV" "$("$PYTHON" -V)" "$LOCK" >&2
    "$PYTHON" -m venv --clear "$VENV"
    bash scripts/from_lock.sh "$VENV/bin/python" "$LOCK"
    PIP_USER=0 "$VENV/bin/python" -m pip install --disable-pip-version-check -qq --no-deps --editable .
    printf '%s\n' "$wanted" >"$VENV/.installed"
fi
"$VENV/bin/python" -c 'import torch, transformer_engine.pytorch; torch.cuda.init()' ||
    fail "Transformer Engine cannot be used (above): a run would be refused, or train on its slow reference (train.reference_te=true)"
printf 'gpu: done: %s\n' "$VENV" >&2
