#!/usr/bin/env bash
# Makes locks/*.txt from locks/*.in: all that a GPU machine gets (Linux on x86-64 with glibc 2.34, Python 3.12). A version that is there
# stays where it still fits; UPGRADE=1 takes the newest. UV is the resolver, LOCKS where the results go.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

UV=${UV:-.venv/bin/uv}
LOCKS=${LOCKS:-locks}

lock() {
    local name=$1
    shift
    printf 'locks: %s\n' "$name" >&2
    "$UV" pip compile --quiet --no-annotate --config-file locks/uv.toml --python-version 3.12 --python-platform x86_64-manylinux_2_34 \
        --custom-compile-command "make locks" ${UPGRADE:+--upgrade} "$@" --output-file "$LOCKS/$name.txt"
}

# On CPU the trainer is tested with these; PyTorch is its engine's, and Megatron-Core the newest.
tested=$(mktemp)
trap 'rm -f "$tested"' EXIT
grep -vE '^(torch|megatron-core)==' constraints.txt >"$tested"

for engine in sglang vllm; do
    lock "$engine" "locks/$engine.in"
    lock "trainer-$engine" --extra wandb --constraints "$tested" pyproject.toml "locks/trainer-$engine.in"
done
