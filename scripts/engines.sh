#!/usr/bin/env bash
# Makes .venv-sglang, the CPU environment of that rollout engine, from the pins in scripts/engines/: PyTorch alone, the
# pins without their dependencies, then this checkout of moerl (editable, also without). ENGINES names which; PYTHON is a Python 3.11
# (the CPU build of the pinned PyTorch exists for no other), TORCH and TORCH_INDEX are as in setup.sh. On a GPU install the engine
# itself and moerl, and name that environment by rollout.python.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

ENGINES=${ENGINES:-sglang}
TORCH=${TORCH:-$(grep '^torch==' constraints.txt)}

say() { printf 'engines: %s\n' "$*" >&2; }

is_311() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 11))' >/dev/null 2>&1; }

find_python() {
    local candidate candidates=(python3.11 python3 python "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.11.*/bin/python)
    [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        if is_311 "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    say "needs Python 3.11 with its venv module; tried ${candidates[*]}. Name one: make engines PYTHON=/path/to/python3.11"
    return 1
}

make_environment() {
    local engine=$1 python=$2 venv=.venv-$1 pins=scripts/engines/$1.txt wanted
    [ -f "$pins" ] || { say "no engine $engine; ENGINES may name $(basename -s .txt scripts/engines/*.txt | tr '\n' ' ')"; return 1; }
    wanted=$(printf '%s\n' "$PWD" "$("$python" -V)" "$TORCH" "${TORCH_INDEX:-}"; cat "$pins" pyproject.toml scripts/engines.sh)
    if [ -x "$venv/bin/python" ] && [ "$wanted" = "$(cat "$venv/.installed" 2>/dev/null)" ]; then
        return
    fi
    say "making $venv with $("$python" -V): 2 to 4 GB, some minutes"
    "$python" -m venv --clear "$venv"
    local install=("$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off -qq)
    PIP_USER=0 "${install[@]}" ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$TORCH"
    grep -v '^torch==' "$pins" >"$venv/pins.txt"
    PIP_USER=0 "${install[@]}" --no-deps -r "$venv/pins.txt"
    PIP_USER=0 "${install[@]}" --no-deps --editable .
    printf '%s\n' "$wanted" >"$venv/.installed"
    say "done: $venv"
}

main() {
    local python engine
    python=$(find_python)
    for engine in $ENGINES; do make_environment "$engine" "$python"; done
}

main
