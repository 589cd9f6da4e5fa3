#!/usr/bin/env bash
# Installs the checkout of an image into its environments, beside what their locks brought, and asks each for what it is for.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

for venv in .venv-*; do
    "$venv/bin/python" -m pip install --no-cache-dir --no-deps --editable .
done
# On a GPU Transformer Engine is imported whole; where an image is built there may be none.
.venv-gpu/bin/python -c 'import importlib.metadata as m; print("transformer-engine-torch", m.version("transformer-engine-torch"))'
