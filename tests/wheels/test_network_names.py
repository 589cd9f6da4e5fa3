"""Variables by which NCCL and NVSHMEM are told of a node: each is one that the library of the locks reads, or DeepEP sets."""

import re
from pathlib import Path

import pytest
from distributions import strings, unpacked

from moerl.config.derive.rdma import SHARP
from moerl.config.rules import run_rules
from moerl.hardware import network_settings

pytestmark = pytest.mark.wheels

LOCKS = Path(__file__).parents[2] / "locks"
SOURCES = [Path(module.__file__).read_text() for module in (network_settings, run_rules)] + [f'"{SHARP}"']


def locked(name):
    return sorted({found[1] for lock in LOCKS.glob("*.txt") if (found := re.search(rf"^{name}==(\S+)", lock.read_text(), re.MULTILINE))})


def named(prefix):
    """Variables that are named in full, as a whole string."""
    return sorted({name for source in SOURCES for name in re.findall(rf'"({prefix}_[A-Z0-9_]+)"', source)})


@pytest.mark.parametrize("version", locked("nvidia-nccl-cu13"))
def test_nccl_reads_every_variable_that_is_set(version):
    words = strings("nvidia-nccl-cu13", version, ["nvidia/nccl/lib/libnccl.so.2"], rb"NCCL_[A-Z0-9_]+")
    assert len(named("NCCL")) >= 7 and set(named("NCCL")) <= words


@pytest.mark.parametrize("version", locked("nvidia-nvshmem-cu13"))
def test_nvshmem_reads_every_variable_that_is_set_or_refused_and_handlers_have_their_names(version):
    libraries = ["libnvshmem_host.so.3", "nvshmem_transport_ibgda.so.3", "nvshmem_bootstrap_uid.so.3"]
    files = [f"nvidia/nvshmem/lib/{library}" for library in libraries]
    words = strings("nvidia-nvshmem-cu13", version, files, rb"[A-Za-z0-9_]+")
    assert len(named("NVSHMEM")) >= 6
    # The library puts the prefix before what it looks up.
    assert {name.removeprefix("NVSHMEM_") for name in named("NVSHMEM")} <= words
    assert set(run_rules._HANDLERS) <= words | {"gpu", "cpu"}  # short words are not kept as text by every compiler


def test_sglang_s_deepep_sets_what_moerl_leaves_to_it():
    (version,) = locked("sgl-deep-ep")
    legacy = (unpacked("sgl-deep-ep", version) / "deep_ep/buffers/legacy.py").read_text()
    for name in ("NVSHMEM_IB_ENABLE_IBGDA", "NVSHMEM_IBGDA_NUM_RC_PER_PE", "NVSHMEM_QP_DEPTH"):
        assert f"os.environ['{name}'] = " in legacy
    for name in named("NVSHMEM"):
        assert f"os.environ['{name}']" not in legacy or name == "NVSHMEM_IB_ENABLE_IBGDA"
