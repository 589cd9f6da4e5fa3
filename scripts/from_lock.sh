#!/usr/bin/env bash
# Installs a lock into an environment: scripts/from_lock.sh PYTHON NAME, of locks/NAME.txt. Packages that are built against PyTorch
# (locks/uv.toml lists them) come after it, so that they find it; their build takes CUDA's compiler, and up to an hour.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=$1 lock=locks/$2.txt
built="^($(sed -n 's/^name = "\(.*\)"$/\1/p' locks/uv.toml | paste -sd'|'))=="

pip_install() {
    PIP_USER=0 "$python" -m pip install --disable-pip-version-check --progress-bar off -qq --no-deps "$@"
}

pip_install -r <(grep -vE "$built" "$lock")
if grep -qE "$built" "$lock"; then
    pip_install --no-build-isolation -r <(grep -E "$built" "$lock")
fi
