"""One fault at a time, on a node that is healthy otherwise: which check says so, how badly, and what it says to do."""

from dataclasses import replace

import pytest
from node_cases import cpu_node, disk, h100_node, output

from moerl.config.load import load
from moerl.doctor.checks.environment_checks import environment_checks
from moerl.doctor.checks.expected import Expectations, expected_of
from moerl.doctor.checks.gpu_checks import gpu_checks
from moerl.doctor.checks.host_checks import host_checks
from moerl.doctor.checks.node_facts import UNLIMITED, locks_any_memory
from moerl.hardware.hardware_tools import Absent
from moerl.hardware.infiniband import parse_ports
from moerl.hardware.nvidia import parse_gpus, parse_links

QUERY, FABRIC = output("h100_query.csv"), output("h100_fabric.csv")

EFA = parse_ports(output("ibv_devinfo_roce.txt").replace("Ethernet", "Unspecified"))
NO_MANAGER = parse_ports(output("ibv_devinfo_down.txt").replace("PORT_ACTIVE (4)", "PORT_INIT (2)"))


def judged(facts, expected=None):
    expected = Expectations() if expected is None else expected
    findings = (*gpu_checks(facts, expected), *host_checks(facts), *environment_checks(facts, expected))
    return {finding.check: finding for finding in findings}


def gpus(old="", new=""):
    assert old in QUERY
    return parse_gpus(QUERY.replace(old, new), FABRIC)


def remapped(index, row, usual="No, No"):
    """Rows of pending and failure, of which one GPU's is `row`."""
    return "\n".join(row if gpu == index else usual for gpu in range(8))


def fault(version):
    return h100_node().versions | version


def test_nothing_is_wrong_with_a_healthy_node():
    verdicts = {finding.verdict for finding in judged(h100_node(), Expectations(gpus_per_node=8)).values()}
    assert verdicts == {"ok"}


# Of drivers 570 and later, for a GPU whose links are all down.
SILENT = "GPU {}: NVIDIA B200 (UUID: GPU-1)\nNVML: Unable to retrieve NVLink information as all links are inActive\n"
ONE_SILENT = output("v100_nvlink_down.txt").partition("GPU 1:")[0] + SILENT.format(1)

FAULTS = [
    ("GPUs", "fail", "7 of NVIDIA H100", dict(gpus=gpus()[:7])),
    ("GPUs", "fail", "H100 80GB HBM3, NVIDIA H200", dict(gpus=gpus("7, NVIDIA H100 80GB HBM3", "7, NVIDIA H200"))),
    ("GPUs", "fail", "of which PyTorch can use 0", dict(torch_gpus=0)),
    ("GPUs", "fail", "0: nvidia-smi is not on PATH", dict(gpus=Absent(reason="nvidia-smi is not on PATH"))),
    ("driver", "fail", "runs CUDA 12", dict(versions=fault({"CUDA": "13.0"}))),
    ("driver", "warn", "forward-compatibility libcuda for CUDA 13", dict(versions=fault({"CUDA": "13.0"}), libcuda=13)),
    ("driver", "fail", "built without CUDA", dict(versions=fault({"CUDA": Absent(reason="built without CUDA")}))),
    ("MIG", "fail", "enabled on GPU 0, 1", dict(gpus=gpus("Disabled", "Enabled"))),
    ("clocks", "fail", "GPU 3: hardware slowdown, hardware thermal limit", dict(gpus=parse_gpus(output("h100_query_faults.csv"), FABRIC))),
    ("clocks", "warn", "application clocks hold GPU 0, 1", dict(gpus=gpus("0x0000000000000001", "0x0000000000000002"))),
    ("clocks", "skipped", "does not say", dict(gpus=gpus("0x0000000000000001", "[N/A]"))),
    ("ECC", "fail", "GPU 3: 2 uncorrected", dict(gpus=parse_gpus(output("h100_query_faults.csv"), FABRIC))),
    ("ECC", "fail", "replaced at the next reset of GPU 2", dict(gpus=parse_gpus(QUERY, FABRIC, remapped(2, "Yes, No")))),
    ("ECC", "fail", "could not be replaced on GPU 7", dict(gpus=parse_gpus(QUERY, FABRIC, remapped(7, "1, 1", "0, 0")))),
    ("ECC", "warn", "off on GPU 0, 1", dict(gpus=gpus("Enabled", "Disabled"))),
    ("ECC", "skipped", "count no memory errors", dict(gpus=gpus("Enabled, 0", "[N/A], [N/A]"))),
    ("GPU memory", "warn", "GPU 5: 70,211 MiB", dict(gpus=parse_gpus(output("h100_query_faults.csv"), FABRIC))),
    ("NVLink", "fail", "GPU 1: 2 of 6 inactive", dict(gpus=gpus()[:2], links=parse_links(output("v100_nvlink_down.txt")), torch_gpus=2)),
    ("NVLink", "skipped", "these GPUs have none", dict(links=parse_links("GPU 0: NVIDIA L40S (UUID: GPU-1)\n"))),
    ("NVLink", "warn", "every link of GPU 0, 1 is inactive", dict(links=parse_links(SILENT.format(0) + SILENT.format(1)))),
    ("NVLink", "fail", "GPU 1: 6 of 6 inactive", dict(gpus=gpus()[:2], links=parse_links(ONE_SILENT), torch_gpus=2)),
    ("NVLink", "fail", "code 15", dict(links=Absent(reason="nvidia-smi ended with code 15: ERR", is_fault=True))),
    ("NVSwitch fabric", "fail", "In Progress", dict(gpus=parse_gpus(QUERY, FABRIC.replace("Completed, Success", "In Progress, N/A")))),
    ("NVSwitch fabric", "skipped", "there is none", dict(gpus=parse_gpus(QUERY))),
    ("InfiniBand", "warn", "not active: mlx5_1:1", dict(ports=parse_ports(output("ibv_devinfo_down.txt")))),
    ("InfiniBand", "fail", "not active: mlx5_0:1, mlx5_1:1", dict(ports=NO_MANAGER)),
    ("InfiniBand", "ok", "8 ports at 400 Gb/s; left out: mlx5_4:1 at 100 Gb/s", dict()),
    ("InfiniBand", "skipped", "RDMA over Ethernet only: mlx5_0:1", dict(ports=parse_ports(output("ibv_devinfo_roce.txt")))),
    ("InfiniBand", "skipped", "of neither InfiniBand nor Ethernet: mlx5_0:1", dict(ports=EFA)),
    ("InfiniBand", "skipped", "no RDMA adapter", dict(ports=())),
    ("InfiniBand", "fail", "code 1", dict(ports=Absent(reason="ibv_devinfo ended with code 1: Failed to open", is_fault=True))),
    ("GPUDirect RDMA", "fail", "nvidia_peermem is not", dict(gpudirect=Absent(reason="nvidia_peermem is not loaded", is_fault=True))),
    ("ulimit -n", "warn", "1024 (hard 1048576)", dict(open_files=(1024, 1048576))),
    ("ulimit -n", "warn", "8192 (hard 8192)", dict(open_files=(8192, 8192))),
    ("ulimit -n", "warn", "1024 (hard unlimited)", dict(open_files=(1024, UNLIMITED))),
    ("ulimit -n", "fail", "1024 (hard 1024)", dict(open_files=(1024, 1024))),
    ("ulimit -l", "fail", "65536", dict(locked_bytes=65536)),
    ("ulimit -l", "ok", "65536, which CAP_IPC_LOCK overrules", dict(locked_bytes=65536, locks_any_memory=True)),
    ("ulimit -l", "skipped", "only RDMA locks memory", dict(locked_bytes=65536, ports=())),
    ("host memory", "warn", "100 of 2,000 GiB", dict(free_ram_bytes=100 * 2**30)),
    ("/dev/shm", "fail", "0.1 GiB", dict(disks=(disk("/dev/shm", total=0.0625, free=0.0625),))),
    ("/dev/shm", "warn", "100.0 GiB", dict(disks=(disk("/dev/shm", total=100, free=100),))),
    ("run folder", "fail", "Read-only file system", dict(disks=(disk("run folder", refusal="/scratch: Read-only file system"),))),
    ("run folder", "warn", "5 GiB free", dict(disks=(disk("run folder", free=5),))),
    ("temp", "fail", "0 GiB free", dict(disks=(disk("temp", free=0.25),))),
    ("own name", "fail", "Name or service not known", dict(own_addresses=Absent(reason="n0: Name or service not known", is_fault=True))),
    ("other Ray", "warn", "raylet 4711 of eve", dict(ray_processes=("raylet 4711 of eve",))),
    ("megatron-core", "fail", "0.12.0", dict(versions=fault({"megatron-core": "0.12.0"}))),
    ("ray", "fail", "not installed", dict(versions=fault({"ray": Absent(reason="not installed")}))),
    ("transformer-engine", "fail", "not installed", dict(versions=fault({"transformer-engine": Absent(reason="not installed")}))),
    ("sglang", "fail", "there is no /x/python", dict(engines={"sglang": Absent(reason="there is no /x/python")})),
    ("sglang", "fail", "0.4.6 (torch 2.6.0)", dict(engines={"sglang": {"sglang": "0.4.6", "torch": "2.6.0"}})),
    ("sglang", "fail", "not in its environment", dict(engines={"sglang": {"torch": "2.6.0"}})),
    ("sglang", "ok", "0.5.23 (torch 2.9.1)", dict(engines={"sglang": {"sglang": "0.5.23", "torch": "2.9.1"}})),
]  # fmt: skip


@pytest.mark.parametrize(
    ("check", "verdict", "found", "changes"), FAULTS, ids=[f"{check}-{verdict}-{i}" for i, (check, verdict, *_) in enumerate(FAULTS)]
)
def test_a_fault_is_found_by_its_check(check, verdict, found, changes):
    finding = judged(h100_node(**changes), Expectations(gpus_per_node=8))[check]
    assert finding.verdict == verdict, finding
    assert found in finding.found
    assert bool(finding.fix) == (verdict in ("warn", "fail"))


def test_application_clocks_are_reset_by_their_own_option():
    """--reset-gpu-clocks undoes what --lock-gpu-clocks did, which the driver reports by the same bit."""
    held = h100_node(gpus=gpus("0x0000000000000001", "0x0000000000000002"))
    assert "--reset-applications-clocks" in judged(held, Expectations(gpus_per_node=8))["clocks"].fix


@pytest.mark.parametrize(
    ("capabilities", "expected"), [("0000000000004000", True), ("000001ffffffbfff", False), ("000001ffffffffff", True)]
)
def test_the_right_to_lock_memory_is_one_bit_of_the_effective_capabilities(capabilities, expected):
    status = f"Name:\tpython\nCapPrm:\t000001ffffffffff\nCapEff:\t{capabilities}\nCapBnd:\t000001ffffffffff\n"
    assert locks_any_memory(status) == expected


def test_a_node_without_gpus_is_skipped_over_with_the_reason_and_never_passed():
    findings = judged(cpu_node())
    for check in ("GPUs", "driver", "clocks", "ECC", "NVLink"):
        assert (findings[check].verdict, findings[check].found) == ("skipped", "nvidia-smi is not on PATH")
    assert findings["InfiniBand"].verdict == "skipped"
    assert findings["transformer-engine"].verdict == "skipped"
    assert not [finding for finding in findings.values() if finding.verdict == "fail"]


def test_a_trainer_on_gpus_needs_transformer_engine_unless_its_reference_is_asked_for():
    facts = h100_node(versions=fault({"transformer-engine": Absent(reason="2.20.2 without its part for PyTorch")}))
    config = load(["recipe=grpo-tiny-moe-1n2g-sync"])
    asked = replace(config, train=replace(config.train, reference_te=True))
    on_cpu = replace(config, placement=replace(config.placement, device="cpu"))
    verdicts = [judged(facts, expected_of(each))["transformer-engine"].verdict for each in (config, asked, on_cpu)]
    assert verdicts == ["fail", "skipped", "skipped"]


def test_versions_of_trainer_and_engine_are_compared_and_different_nccl_fails_where_a_push_needs_one():
    same = {"sglang": "0.5.23", "torch": "2.13.0+cu129", "CUDA": "12.9", "NCCL": "2.28.9"}
    facts = h100_node(engines={"sglang": same | {"torch": "2.14.1", "NCCL": "2.30.7"}})
    equal, other = judged(h100_node(engines={"sglang": same})), judged(facts)
    joined = judged(facts, Expectations(joins_by_nccl=True))
    checks = [f"{name} of sglang" for name in ("torch", "CUDA", "NCCL")]
    assert [equal[check].verdict for check in checks] == ["ok", "ok", "ok"]
    assert [other[check].verdict for check in checks] == ["warn", "ok", "warn"]
    assert [joined[check].verdict for check in checks] == ["warn", "ok", "fail"]
    assert joined["NCCL of sglang"].found.startswith("2.30.7: it refuses a communicator of ranks with different versions")
    assert joined["NCCL of sglang"].fix.startswith("make gpu ENGINES=sglang; make engines ENGINES=sglang")
    assert judged(h100_node(engines={"sglang": {"sglang": "0.5.23"}}))["NCCL of sglang"].verdict == "skipped"


def test_a_tool_that_fails_is_no_node_without_gpus():
    broken = Absent(reason="nvidia-smi ended with code 9: driver/library version mismatch", is_fault=True)
    finding = judged(cpu_node(gpus=broken))["GPUs"]
    assert (finding.verdict, finding.found) == ("fail", broken.reason)
