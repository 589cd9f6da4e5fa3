"""What nvidia-smi and ibv_devinfo print, and what becomes of them when they are missing, old or failing."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from node_cases import OUTPUTS, output

from moerl.hardware import nvidia
from moerl.hardware.hardware_tools import Absent, run_tool
from moerl.hardware.infiniband import find_gpudirect, find_ports, parse_ports
from moerl.hardware.nvidia import Topology, find_gpus, find_links, find_topology, near, parse_gpus, parse_links, parse_topology, slowdowns


def test_gpus_of_a_node_are_read_with_clocks_ecc_and_fabric():
    gpus = parse_gpus(output("h100_query.csv"), output("h100_fabric.csv"))
    assert [gpu.index for gpu in gpus] == list(range(8))
    first = gpus[0]
    assert (first.name, first.driver, first.compute) == ("NVIDIA H100 80GB HBM3", "550.54.15", (9, 0))
    assert (first.total_mib, first.used_mib, first.sm_mhz, first.max_sm_mhz) == (81559, 1, 345, 1980)
    assert (first.ecc, first.uncorrected, first.mig, first.slowed_by, first.fabric) == ("Enabled", 0, "Disabled", 1, "Completed Success")


def test_what_a_driver_does_not_say_is_none_and_never_a_number():
    broken = parse_gpus(output("h100_query_faults.csv"))[5]
    assert (broken.celsius, broken.sm_mhz, broken.ecc, broken.uncorrected, broken.mig) == (None, None, None, None, None)
    assert broken.fabric == ""


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("No, No\n" * 8, (False, False)),
        ("1, 0\n" * 8, (True, False)),
        ("[N/A], [N/A]\n" * 8, (None, None)),
        ("No, No\n" * 7, (None, None)),  # whose row is missing is not known
        ("Field is not a valid field to query.\n" * 8, (None, None)),
    ],
)
def test_rows_to_be_replaced_are_read_where_the_driver_says_so_of_every_gpu(said, expected):
    gpu = parse_gpus(output("h100_query.csv"), "", said)[0]
    assert (gpu.remap_pending, gpu.remap_failed) == expected


def test_bits_that_slow_a_gpu_have_names_and_idling_is_none_of_them():
    assert list(slowdowns(0x1)) == []
    assert list(slowdowns(0x48)) == ["hardware slowdown", "hardware thermal limit"]


def test_links_are_counted_with_the_inactive_ones():
    healthy, broken = parse_links(output("v100_nvlink_down.txt"))
    assert healthy.gb_per_second == (25.781,) * 6
    assert broken.gb_per_second == (25.781, 25.781, 25.781, None, 25.781, None)


def test_a_topology_is_read_whether_adapters_are_named_in_it_or_below_it():
    new, old = parse_topology(output("h100_topo.txt")), parse_topology(output("a100_topo_old.txt"))
    assert new.gpus == [f"GPU{index}" for index in range(8)]
    assert new.between["GPU4"]["mlx5_5"] == "PIX"
    assert new.between["GPU0"]["GPU7"] == "NV18"
    assert new.has_nvlink
    assert new.to_adapter("GPU7") == "PIX"
    assert old.between["GPU2"]["mlx5_1"] == "PHB"
    assert old.to_adapter("GPU0") == "PHB"
    assert old.has_nvlink


def test_gpus_behind_pcie_have_no_nvlink_and_no_adapter_where_there_is_none():
    topology = parse_topology(output("pcie_topo.txt"))
    assert not topology.has_nvlink
    assert topology.to_adapter("GPU0") is None


def test_bridges_between_some_gpus_are_not_nvlink_between_all():
    bridged = """        GPU0    GPU1    GPU2    GPU3    CPU Affinity
GPU0     X      NV4     SYS     SYS     0-31
GPU1    NV4      X      SYS     SYS     0-31
GPU2    SYS     SYS      X      NV4     32-63
GPU3    SYS     SYS     NV4      X      32-63
"""
    assert not parse_topology(bridged).has_nvlink


def test_ports_have_state_layer_and_the_rate_of_all_lanes():
    ports = parse_ports(output("ibv_devinfo.txt"))
    assert len(ports) == 10
    assert (ports[0].name, ports[0].link_layer, ports[0].gbit, ports[0].is_active) == ("mlx5_0:1", "InfiniBand", 400, True)
    assert ports[4].gbit == 100  # HDR100: two lanes
    assert (ports[9].link_layer, ports[9].gbit) == ("Ethernet", 25)
    down = parse_ports(output("ibv_devinfo_down.txt"))[1]
    assert (down.state, down.is_active) == ("DOWN", False)


def test_a_speed_that_the_tool_does_not_know_is_no_rate():
    assert parse_ports(output("ibv_devinfo_unknown_speed.txt"))[0].gbit is None


def test_tools_on_path_are_asked(h100_node):
    assert find_gpus() == parse_gpus(output("h100_query.csv"), output("h100_fabric.csv"), output("h100_remapped.csv"))
    assert find_links() == parse_links(output("h100_nvlink.txt"))
    assert find_topology() == parse_topology(output("h100_topo.txt"))
    assert find_ports() == parse_ports(output("ibv_devinfo.txt"))


def test_a_driver_that_knows_neither_new_name_nor_fabric_is_asked_as_before(fake_tools):
    old = """case "$*" in
        *clocks_throttle_reasons*) cat h100_query.csv ;;
        *) echo 'Field "clocks_event_reasons.active" is not a valid field to query.'; exit 2 ;;
    esac"""
    fake_tools(nvidia_smi=old)
    assert find_gpus() == parse_gpus(output("h100_query.csv"))


@pytest.mark.parametrize("find", [find_gpus, find_links, find_topology, find_ports])
def test_a_missing_tool_is_said_and_is_no_fault(find, monkeypatch):
    monkeypatch.setenv("PATH", str(OUTPUTS))
    tool = "ibv_devinfo" if find is find_ports else "nvidia-smi"
    assert find() == Absent(reason=f"{tool} is not on PATH")


@pytest.mark.parametrize("find", [find_gpus, find_links, find_topology, find_ports])
def test_a_tool_that_fails_is_a_fault_with_its_first_line(find, fake_tools):
    fails = "echo 'Unable to determine the device handle for GPU0000:5E:00.0: Unknown Error'; exit 15"
    fake_tools(nvidia_smi=fails, ibv_devinfo=fails)
    found = find()
    assert isinstance(found, Absent)
    assert found.is_fault
    assert "code 15: Unable to determine the device handle" in found.reason


def test_tools_that_find_no_device_found_none(fake_tools):
    fake_tools(nvidia_smi="echo 'No devices were found'; exit 6", ibv_devinfo="echo 'No IB devices found' >&2; exit 255")
    assert find_gpus() == ()
    assert find_ports() == ()


def test_a_kernel_without_infiniband_has_no_ports_unless_there_are_adapters(fake_tools, tmp_path):
    fake_tools(ibv_devinfo="echo 'Failed to get IB devices list: Function not implemented' >&2; exit 255")
    assert find_ports(tmp_path) == ()
    adapter(tmp_path, "mlx5_0", port1=("4: ACTIVE", "400 Gb/sec (4X NDR)", "InfiniBand"))
    found = find_ports(tmp_path)
    assert isinstance(found, Absent) and found.is_fault


def test_a_tool_that_hangs_is_a_fault(fake_tools, monkeypatch):
    monkeypatch.setattr("moerl.hardware.hardware_tools._SECONDS", 0.2)
    fake_tools(ibv_devinfo="exec sleep 60")
    assert run_tool("ibv_devinfo") == Absent(reason="ibv_devinfo did not end within 0.2 s", is_fault=True)


def test_a_tool_that_cannot_be_started_is_a_fault(fake_tools):
    (fake_tools() / "ibv_devinfo").write_text("#!/no/such/shell\n")
    (fake_tools() / "ibv_devinfo").chmod(0o755)
    found = run_tool("ibv_devinfo")
    assert isinstance(found, Absent)
    assert found.is_fault
    assert "cannot be run" in found.reason


def host(root, *, module=False, driver=None, release="5.15.0-105-generic"):
    if module:
        (root / "sys/module/nvidia_peermem").mkdir(parents=True)
    if driver is not None:
        (root / "proc/driver/nvidia").mkdir(parents=True)
        (root / "proc/driver/nvidia/version").write_text(f"NVRM version: {driver}  550.54.15\n")
    (root / "proc/sys/kernel").mkdir(parents=True)
    (root / "proc/sys/kernel/osrelease").write_text(f"{release}\n")
    return root


def adapter(root, name, **ports):
    for number, (state, rate, layer) in ports.items():
        folder = root / "sys/class/infiniband" / name / "ports" / number.removeprefix("port")
        folder.mkdir(parents=True)
        for file, text in (("state", state), ("rate", rate), ("link_layer", layer)):
            (folder / file).write_text(f"{text}\n")


def test_a_container_without_ibv_devinfo_has_what_the_kernel_says(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(OUTPUTS))
    adapter(tmp_path, "mlx5_1", port1=("1: DOWN", "10 Gb/sec (4X SDR)", "InfiniBand"))
    adapter(tmp_path, "mlx5_0", port1=("4: ACTIVE", "400 Gb/sec (4X NDR)", "InfiniBand"), port2=("4: ACTIVE", "2.5 Gb/sec", "Ethernet"))
    found = find_ports(tmp_path)
    assert [(port.name, port.state, port.link_layer, port.gbit) for port in found] == [
        ("mlx5_0:1", "ACTIVE", "InfiniBand", 400.0),
        ("mlx5_0:2", "ACTIVE", "Ethernet", 2.5),
        ("mlx5_1:1", "DOWN", "InfiniBand", 10.0),
    ]


def test_a_speed_that_ibv_devinfo_does_not_know_is_that_of_the_kernel(tmp_path, fake_tools):
    adapter(tmp_path, "mlx5_0", port1=("4: ACTIVE", "800 Gb/sec (4X XDR)", "InfiniBand"))
    fake_tools(ibv_devinfo="cat ibv_devinfo_unknown_speed.txt")
    assert [port.gbit for port in find_ports(tmp_path)] == [800.0]
    fake_tools(ibv_devinfo="cat ibv_devinfo.txt")
    assert find_ports(tmp_path)[0].gbit == 400.0


def test_a_tool_that_fails_is_not_replaced_by_the_kernel(tmp_path, fake_tools):
    adapter(tmp_path, "mlx5_0", port1=("4: ACTIVE", "400 Gb/sec (4X NDR)", "InfiniBand"))
    fake_tools(ibv_devinfo="echo 'Failed to open device' >&2; exit 1")
    assert find_ports(tmp_path) == Absent(reason="ibv_devinfo ended with code 1: Failed to open device", is_fault=True)


CLOSED, OPEN = "NVIDIA UNIX x86_64 Kernel Module", "NVIDIA UNIX Open Kernel Module for x86_64"


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        (dict(module=True, driver=CLOSED), "nvidia_peermem"),
        (dict(driver=OPEN), "dma-buf"),
        (dict(driver=OPEN, release="5.4.0-90"), None),
        (dict(driver=CLOSED), None),
    ],
)
def test_gpudirect_is_what_the_kernel_can_do(kernel, expected, tmp_path):
    found = find_gpudirect(host(tmp_path, **kernel))
    assert found == expected if expected is not None else (isinstance(found, Absent) and found.is_fault)


def test_without_a_driver_gpudirect_is_no_question(tmp_path):
    assert find_gpudirect(host(tmp_path)) == Absent(reason="no NVIDIA kernel module is loaded")


def test_a_rank_runs_on_the_cpus_near_its_gpu():
    topology = parse_topology(output("pcie_topo.txt"))
    assert topology.cpus == {"GPU0": frozenset(range(16)), "GPU1": frozenset(range(16, 32))}
    assert near(topology, ("1",), allowed=set(range(20))) == {16, 17, 18, 19}
    assert near(topology, ("0", "1"), allowed=set(range(64))) == set(range(32))


@pytest.mark.parametrize(
    ("topology", "gpus", "reason"),
    [
        (Absent(reason="nvidia-smi is not there"), ("0",), "nvidia-smi is not there"),
        (Topology(between={}), ("0",), "names no CPU for GPU 0"),
        (Topology(between={}, cpus={"GPU0": frozenset({9})}), ("0",), "not this process's to use"),
        (Topology(between={}), ("GPU-1234",), "not known by a number"),
    ],
)
def test_a_rank_runs_anywhere_where_that_is_not_known(topology, gpus, reason):
    assert reason in near(topology, gpus, allowed={0, 1})


def test_a_process_is_bound_and_what_it_starts_with_it(monkeypatch):
    own = os.sched_getaffinity(0)
    first = min(own)
    monkeypatch.setattr(nvidia, "find_topology", lambda: Topology(between={}, cpus={"GPU0": frozenset({first})}))
    try:
        assert nvidia.bind_near(("0",)) == f"runs on 1 CPUs near its GPU, from {first} to {first}"
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(os.sched_getaffinity, 0).result() == {first}
    finally:
        os.sched_setaffinity(0, own)
