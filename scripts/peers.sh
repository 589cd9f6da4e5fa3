#!/usr/bin/env bash
# Makes .venv-peers, in which `make bench-peers` runs what moerl is measured against (trl, verl): PyTorch alone, then the pins of
# benchmarks/peers/requirements.txt without their dependencies, as verl's exclude the transformers that trl is measured with. Its Python is
# that of .venv, for which there is a PyTorch; TORCH and TORCH_INDEX are as in setup.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=.venv-peers
PINS=benchmarks/peers/requirements.txt
TORCH=${TORCH:-$(grep '^torch==' constraints.txt)}

wanted=$(printf '%s\n' "$PWD" "$(.venv/bin/python -V)" "$TORCH" "${TORCH_INDEX:-}"; cat "$PINS" scripts/peers.sh scripts/install.sh)
if [ -x "$VENV/bin/python" ] && [ "$wanted" = "$(cat "$VENV/.installed" 2>/dev/null)" ]; then
    exit
fi
printf 'peers: making %s\n' "$VENV" >&2
.venv/bin/python -m venv --clear "$VENV"
bash scripts/install.sh "$VENV" ${TORCH_INDEX:+--default-index "$TORCH_INDEX"} "$TORCH"
bash scripts/install.sh "$VENV" --no-deps -r "$PINS"
printf '%s\n' "$wanted" >"$VENV/.installed"
