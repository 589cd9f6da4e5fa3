#!/usr/bin/env bash
# Installs packages into an environment: scripts/install.sh VENV ARGUMENT... of `uv pip install`. uv keeps what it fetched and unpacked in its
# cache, where pip does both for every environment anew. It lies in the user's cache itself (~/.cache/moerl, or below XDG_CACHE_HOME), and
# does not read pip's configuration: what that says of indices, files, hosts and certificates is handed over.
set -euo pipefail
shopt -s inherit_errexit

python=$1/bin/python
shift
UV=$(sed -n 's/^uv==//p' "$(dirname "${BASH_SOURCE[0]}")/../constraints.txt")
CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/moerl
uv=$CACHE/uv-$UV

if ! [ -x "$uv/bin/uv" ]; then
    mkdir -p "$CACHE"
    partial=$(mktemp -d "$CACHE/.uv.XXXXXX")
    trap 'rm -rf "$partial"' EXIT
    PIP_USER=0 "$python" -m pip install --disable-pip-version-check --progress-bar off -qq --target "$partial" "uv==$UV"
    mv -T "$partial" "$uv" 2>/dev/null || [ -x "$uv/bin/uv" ] # somebody else was as fast
fi

# NAME=value lines of uv's environment, from pip's files and PIP_ variables. What the user tells uv goes before.
settings=$("$python" - <<'END'
import ast, os, subprocess, sys

listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True).stdout
values = {key: ast.literal_eval(value) for key, _, value in (line.partition("=") for line in listed.splitlines())}
for of_pip, of_uv, between in (
    ("index-url", "UV_DEFAULT_INDEX", " "), ("extra-index-url", "UV_INDEX", " "), ("find-links", "UV_FIND_LINKS", ","),
    ("trusted-host", "UV_INSECURE_HOST", " "), ("cert", "SSL_CERT_FILE", " "),
):
    value = next((values[f"{section}.{of_pip}"] for section in (":env:", "install", "global") if f"{section}.{of_pip}" in values), "")
    if value and of_uv not in os.environ:
        print(f"{of_uv}={between.join(value.split())}")
END
)
# By the environment: an address may have a password, which every user of the machine reads in a command line.
while IFS= read -r setting; do
    [ -z "$setting" ] || declare -x "$setting"
done <<<"$settings"

# As pip does, the best version of all indices, not the first index that has one.
export UV_INDEX_STRATEGY="${UV_INDEX_STRATEGY:-unsafe-best-match}"
"$uv/bin/uv" pip install --quiet --compile-bytecode --python "$python" "$@"
