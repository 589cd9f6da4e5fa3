#!/usr/bin/env bash
# Makes .venv: a suitable Python, PyTorch alone, then the project (editable, with its development tools) under constraints.txt.
# PYTHON, TORCH and TORCH_INDEX override what is found; see the Makefile. For another environment than the usual: VENV is its
# directory, PYTHON_VERSION the one Python it takes, and PINS a file whose pins replace those of constraints.txt. The stamp is written last and holds everything the
# environment follows from, so an interrupted installation, a changed pin or a moved checkout is installed again; .base holds
# what the interpreter and PyTorch follow from, so that a changed pin elsewhere does not install those again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=${VENV:-.venv}
PYTHON_VERSION=${PYTHON_VERSION:-}
PINS=${PINS:-/dev/null}
STAMP=$VENV/.installed
TORCH=${TORCH:-$(grep '^torch==' constraints.txt)}

say() { printf 'setup: %s\n' "$*" >&2; }

# A command can exist and still not run (a version manager's shim), or lack venv (a distribution splits it off): so each is tried.
suitable() {
    "$1" -c '
import sys, venv, ensurepip
wanted = sys.argv[1]
sys.exit(sys.version_info < (3, 11) or wanted not in ("", "%d.%d" % sys.version_info[:2]))' "$PYTHON_VERSION" >/dev/null 2>&1
}

describe() {
    local version
    if ! command -v "$1" >/dev/null 2>&1; then
        return
    elif ! version=$("$1" -c 'import platform; print(platform.python_version())' 2>/dev/null); then
        say "  $1: does not run"
    elif "$1" -c 'import venv, ensurepip' >/dev/null 2>&1; then
        say "  $1: Python $version"
    else
        say "  $1: Python $version, without the venv module"
    fi
}

find_python() {
    local candidates candidate
    if [ -n "${PYTHON:-}" ]; then
        candidates=("$PYTHON")
    elif [ -n "$PYTHON_VERSION" ]; then
        # A version manager may have one that its shim does not run here.
        candidates=("python$PYTHON_VERSION" python3 python "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$PYTHON_VERSION".*/bin/python)
    else
        candidates=(python3.11 python3.12 python3.13 python3 python)
    fi
    for candidate in "${candidates[@]}"; do
        if suitable "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    local wanted=${PYTHON_VERSION:-3.11} newer=" or newer"
    [ -z "$PYTHON_VERSION" ] || newer=""
    say "moerl needs Python $wanted$newer with its venv module; tried ${candidates[*]}, found:"
    for candidate in "${candidates[@]}"; do describe "$candidate"; done
    say "install one (Debian, Ubuntu: apt-get install python$wanted python$wanted-venv) or name it: make PYTHON=/path/to/python$wanted"
    return 1
}

add() { bash scripts/install.sh "$VENV" "$@"; }

install_torch() {
    say "installing $TORCH"
    if [ -n "${TORCH_INDEX:-}" ]; then
        add --default-index "$TORCH_INDEX" "$TORCH"
        return
    fi
    if ! command -v nvidia-smi >/dev/null 2>&1; then
        say "(no GPU here: a CPU build is enough. Where the index has none for this Python, it is the CUDA build, several GB;"
        say " make TORCH_INDEX=... names the index to take PyTorch from)"
    fi
    add "$TORCH"
}

# The pins without torch, and torch at the version just installed, so that nothing later replaces it.
write_constraints() {
    grep -v '^torch==' constraints.txt | grep -vFf <(sed -n 's/==.*/==/p' "$PINS"; echo '# none')
    cat "$PINS"
    "$VENV/bin/python" -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))'
}

main() {
    local python base wanted
    python=$(find_python)
    base=$(printf '%s\n' "$PWD" "$python" "$("$python" -V)" "$TORCH" "${TORCH_INDEX:-}")
    wanted=$(printf '%s\n' "$base"; cat pyproject.toml constraints.txt "$PINS" scripts/setup.sh scripts/install.sh)
    if [ -x "$VENV/bin/python" ] && [ "$wanted" = "$(cat "$STAMP" 2>/dev/null)" ]; then
        return
    fi
    rm -f "$STAMP"
    if ! [ -x "$VENV/bin/python" ] || [ "$base" != "$(cat "$VENV/.base" 2>/dev/null)" ]; then
        say "making $VENV with $("$python" -V) ($python)"
        "$python" -m venv --clear "$VENV"
        install_torch
        printf '%s\n' "$base" >"$VENV/.base"
    fi
    say "installing moerl and its dependencies"
    write_constraints >"$VENV/constraints.txt"
    add --constraint "$VENV/constraints.txt" --editable '.[dev]'
    printf '%s\n' "$wanted" >"$STAMP"
    say "done"
}

main
