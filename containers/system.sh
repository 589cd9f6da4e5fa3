#!/usr/bin/env bash
# Packages of Ubuntu 24.04 that an image needs beside CUDA's: Python 3.12, what RDMA and moerl doctor ask, git for sources, and
# wget, by which KubeRay before 1.6 asks its pods whether they live.
set -euo pipefail

export DEBIAN_FRONTEND=noninteractive
apt-get update
apt-get install --yes --no-install-recommends python3.12 python3.12-dev python3.12-venv build-essential git \
    ibverbs-providers ibverbs-utils libibverbs-dev libnuma1 pciutils wget
rm -rf /var/lib/apt/lists/*
