#!/usr/bin/env bash
# Installs what the tests with a real Slurm need, where it is missing: Debian's slurm-wlm and munge. Their services are not used; the tests start
# daemons of their own.
set -euo pipefail

say() { printf 'slurm: %s\n' "$*" >&2; }

missing() {
    local program
    for program in slurmctld slurmd sbatch munged; do
        command -v "$program" >/dev/null 2>&1 || PATH=$PATH:/usr/sbin command -v "$program" >/dev/null 2>&1 || return 0
    done
    return 1
}

missing || exit 0
as_root=()
if [ "$(id -u)" -ne 0 ]; then
    if ! command -v sudo >/dev/null 2>&1 || ! sudo -n true 2>/dev/null; then
        say "slurm-wlm and munge are not installed, and this user may not install them (apt-get install slurm-wlm munge, as root)"
        exit 1
    fi
    as_root=(sudo)
fi
if ! command -v apt-get >/dev/null 2>&1; then
    say "slurm-wlm and munge are not installed, and there is no apt-get to install them with"
    exit 1
fi
say "installing slurm-wlm and munge"
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurm-wlm munge >/dev/null
