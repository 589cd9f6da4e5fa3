#!/usr/bin/env bash
# Makes .venv-ENGINE, the environment of a rollout engine, at the versions of scripts/engines/. Its packages lie in the user's cache
# (~/.cache/moerl, or below XDG_CACHE_HOME), one folder for each set of pins, so that a second checkout takes seconds; .venv-ENGINE
# refers to them and has this checkout of moerl (editable). The packages, without a GPU: PyTorch alone, then the pins without their
# dependencies (those name packages of CUDA). With one (nvidia-smi is there, as in setup.sh): those of locks/ENGINE.txt. ENGINES names
# which; PYTHON is a Python 3.11 (the CPU build of the pinned PyTorch exists for no other), with a GPU 3.12; TORCH and TORCH_INDEX are as
# in setup.sh, and have no effect with a GPU.
set -euo pipefail
shopt -s inherit_errexit # packages_of is called in a substitution, and what fails there is no environment
cd "$(dirname "${BASH_SOURCE[0]}")/.."

ENGINES=${ENGINES:-sglang vllm}
TORCH=${TORCH:-$(grep '^torch==' constraints.txt)}
CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/moerl

say() { printf 'engines: %s\n' "$*" >&2; }

has_gpu() { command -v nvidia-smi >/dev/null 2>&1; }

if has_gpu; then VERSION=3.12; else VERSION=3.11; fi

suitable() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit("%d.%d" % sys.version_info[:2] != sys.argv[1])' "$VERSION" >/dev/null 2>&1
}

find_python() {
    local candidate candidates=("python$VERSION" python3 python "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$VERSION".*/bin/python)
    [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        if suitable "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    say "needs Python $VERSION with its venv module; tried ${candidates[*]}. Name one: make engines PYTHON=/path/to/python$VERSION"
    return 1
}

# The engine's packages, without moerl: made once per user for what they follow from, and shared by every checkout.
packages_of() {
    local engine=$1 python=$2 device=$3 pins=$4 key made
    key=$(printf '%s\n' "$(realpath "$python")" "$("$python" -V)" "$device" "$TORCH" "${TORCH_INDEX:-}" | cat - "$pins" scripts/engines.sh scripts/install.sh scripts/from_lock.sh | sha256sum | cut -c1-16)
    made=$CACHE/engines/$engine-$key
    if ! [ -d "$made" ]; then
        say "installing $engine ($device) into $made with $("$python" -V): 2 to 4 GB on a CPU, some minutes"
        mkdir -p "$CACHE/engines"
        local partial
        partial=$(mktemp -d "$CACHE/engines/.$engine.XXXXXX")
        # shellcheck disable=SC2064 # as it is now
        trap "rm -rf '$partial'" EXIT
        "$python" -m venv "$partial"
        "install_for_$device" "$partial" "$engine" "$pins"
        # Somebody else may have been as fast: then theirs is used.
        mv -T "$partial" "$made" 2>/dev/null || rm -rf "$partial"
    fi
    printf '%s\n' "$made"
}

make_environment() {
    local engine=$1 python=$2 venv=.venv-$1 pins=scripts/engines/$1.txt device=cpu packages wanted
    [ -f "$pins" ] || { say "no engine $engine; ENGINES may name $(basename -s .txt scripts/engines/*.txt | tr '\n' ' ')"; return 1; }
    ! has_gpu || { device=gpu; pins=locks/$engine.txt; }
    packages=$(packages_of "$engine" "$python" "$device" "$pins")
    wanted=$(printf '%s\n' "$PWD" "$packages"; cat pyproject.toml)
    if [ -x "$venv/bin/python" ] && [ "$wanted" = "$(cat "$venv/.installed" 2>/dev/null)" ]; then
        return
    fi
    "$python" -m venv --clear "$venv"
    # With the .pth files in there, which a plain line would not read.
    printf 'import site; site.addsitedir("%s")\n' "$packages"/lib/python3.*/site-packages >"$(echo "$venv"/lib/python3.*/site-packages)/engine.pth"
    bash scripts/install.sh "$venv" --no-deps --editable .
    printf '%s\n' "$wanted" >"$venv/.installed"
    say "done: $venv"
}

install_for_cpu() {
    local venv=$1 pins=$3
    bash scripts/install.sh "$venv" ${TORCH_INDEX:+--default-index "$TORCH_INDEX"} "$TORCH"
    grep -v '^torch==' "$pins" >"$venv/pins.txt"
    bash scripts/install.sh "$venv" --no-deps -r "$venv/pins.txt"
}

install_for_gpu() {
    bash scripts/from_lock.sh "$1/bin/python" "$2"
}

main() {
    local python engine
    python=$(find_python)
    for engine in $ENGINES; do make_environment "$engine" "$python"; done
}

main
