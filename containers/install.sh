#!/usr/bin/env bash
# Makes one environment of an image, from its lock: containers/install.sh NAME DIRECTORY, of locks/NAME.txt; and builds from source, by
# commit, what no index has (docs/gpu.md says what each is for). moerl itself is installed by add_moerl.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

name=$1 venv=$2
APEX=6424da3b4faa6c8f062da4a48c424fff3f02d42d # 2026-07-08
# 2026-01-19, the last code before version 2. That has no deep_ep.utils.EventOverlap, which Megatron-Core imports, and asks for NCCL 2.30.4,
# where vLLM's PyTorch brings 2.29.7.
DEEPEP=29d31c095796f3c8ece47ee9cdcc167051bbeed9

from_source() {
    "$venv/bin/python" -m pip install --no-cache-dir --no-build-isolation --no-deps "git+https://github.com/$1"
}

python3.12 -m venv "$venv"
bash scripts/from_lock.sh "$venv/bin/python" "$name"

# NVSHMEM, which DeepEP is built against, is in the lock (nvidia-nvshmem-cu13). Its headers include CUDA's, which CUDA 13 has moved.
export CPLUS_INCLUDE_PATH=$CUDA_HOME/include/cccl
case $name in
    trainer-*)
        APEX_CPP_EXT=1 APEX_CUDA_EXT=1 from_source "NVIDIA/apex@$APEX"
        from_source "deepseek-ai/DeepEP@$DEEPEP"
        ;;
    vllm) from_source "deepseek-ai/DeepEP@$DEEPEP" ;;
    sglang) ;; # its requirements have a DeepEP: sgl-deep-ep
esac
