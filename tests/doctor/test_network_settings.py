"""What NCCL and gloo are told of a node's links, for every kind of node, and who has the last word."""

import os
import pwd
from dataclasses import replace

import pytest
from node_cases import cpu_node, h100_node, output

from moerl.config.schema.run_config import NetworkConfig
from moerl.doctor.on_each_node import rank_variables
from moerl.hardware.hardware_tools import Absent
from moerl.hardware.infiniband import parse_ports
from moerl.hardware.network_settings import Hardware, Setting, applied, find_settings, network_settings, read_nccl_files, variables
from moerl.hardware.nvidia import parse_gpus, parse_topology
from moerl.types.errors import ConfigError

HCA = "=" + ",".join(f"mlx5_{index}:1" for index in (0, 1, 2, 3, 5, 6, 7, 8))


def hardware(facts=None, **changes):
    facts = h100_node(**changes) if facts is None else facts
    return Hardware(
        gpus=facts.gpus, topology=facts.topology, ports=facts.ports, gpudirect=facts.gpudirect, interfaces=facts.interfaces,
        doorbell=facts.doorbell, sharp=facts.sharp,
    )  # fmt: skip


LAZY = {"TORCH_GLOO_LAZY_INIT": "1"}


def settings(found=None, config=None, role="train", *, reached_at="10.1.0.7", environment=None, files=None):
    found, config = hardware() if found is None else found, NetworkConfig() if config is None else config
    environment, files = {} if environment is None else environment, {} if files is None else files
    return network_settings(found, config, role, reached_at=reached_at, environment=environment, files=files)


def reason(found, name):
    return next(setting.reason for setting in found if setting.name == name)


def test_an_h100_node_gets_its_compute_ports_gpudirect_and_multicast():
    found = settings()
    assert variables(found) == {
        "NCCL_SOCKET_IFNAME": "=bond0",
        "GLOO_SOCKET_IFNAME": "bond0",
        "NCCL_IB_HCA": HCA,
        "NCCL_IB_TIMEOUT": "22",
        "NCCL_IB_QPS_PER_CONNECTION": "4",
        "NCCL_NET_GDR_LEVEL": "PXB",
        "NCCL_NVLS_ENABLE": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        **LAZY,
    }
    assert all(setting.reason for setting in found)
    assert reason(found, "NCCL_IB_HCA") == "active InfiniBand ports at 400 Gb/s; others are left out: mlx5_4:1, mlx5_9:1"


def test_what_belongs_to_a_fabric_is_never_set():
    assert not {"NCCL_IB_TC", "NCCL_IB_SL", "NCCL_IB_GID_INDEX"} & {setting.name for setting in settings()}


def test_without_gpus_nothing_is_set_but_how_gloo_connects():
    assert variables(settings(hardware(cpu_node()))) == LAZY
    assert variables(settings(hardware(cpu_node(ports=parse_ports(output("ibv_devinfo.txt")))))) == LAZY
    assert variables(settings(hardware(cpu_node()), role="rollout")) == {}


def test_without_gpus_an_interface_is_set_when_asked():
    found = settings(hardware(cpu_node()), NetworkConfig(interface="lo"))
    assert variables(found) == {"NCCL_SOCKET_IFNAME": "=lo", "GLOO_SOCKET_IFNAME": "lo", **LAZY}


def test_an_interface_that_the_node_does_not_have_is_refused_with_those_it_has():
    with pytest.raises(ConfigError, match=r"network\.interface = 'ib0': is not an interface of .*\n.*it has lo, bond0"):
        settings(config=NetworkConfig(interface="ib0"))


def test_a_single_node_needs_no_interface():
    assert "NCCL_SOCKET_IFNAME" not in variables(settings(reached_at=None))


def test_the_environment_wins_over_detection_and_is_said():
    found = settings(environment={"NCCL_IB_HCA": "=mlx5_1", "NCCL_SOCKET_IFNAME": "eno1"})
    assert not {"NCCL_IB_HCA", "NCCL_SOCKET_IFNAME"} & set(variables(found))
    assert reason(found, "NCCL_IB_HCA") == "the environment has NCCL_IB_HCA==mlx5_1, which is kept"


def test_a_user_without_a_home_whom_nobody_has_listed_has_no_file_of_nccls(tmp_path, monkeypatch):
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # KeyError, as for a number that no file has
    assert read_nccl_files({}, tmp_path) == {}


def test_what_nccl_reads_from_its_files_is_not_overruled_by_detection(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/nccl.conf").write_text("NCCL_IB_HCA==mlx5_0,mlx5_1\nNCCL_IB_TIMEOUT=20\nno variable\n")
    (tmp_path / ".nccl.conf").write_text("NCCL_IB_TIMEOUT=21\n")
    own, everyones = tmp_path / ".nccl.conf", tmp_path / "etc/nccl.conf"
    assert read_nccl_files({}, tmp_path) == {"NCCL_IB_HCA": everyones, "NCCL_IB_TIMEOUT": own}
    other = tmp_path / "other.conf"
    other.write_text("NCCL_NVLS_ENABLE=0")
    files = read_nccl_files({"NCCL_CONF_FILE": str(other)}, tmp_path)
    assert files == {"NCCL_IB_HCA": everyones, "NCCL_IB_TIMEOUT": everyones, "NCCL_NVLS_ENABLE": other}
    found = settings(files=files)
    assert not set(files) & set(variables(found))
    assert reason(found, "NCCL_IB_HCA") == f"{everyones} sets it, which is kept"
    asked = NetworkConfig(variables={"NCCL_IB_TIMEOUT": 23})
    assert variables(settings(config=asked, files=files))["NCCL_IB_TIMEOUT"] == "23"


def test_files_are_read_where_settings_are_found(h100_node, tmp_path, monkeypatch):
    file = tmp_path / "nccl.conf"
    file.write_text("NCCL_IB_HCA==mlx5_0\n")
    monkeypatch.setenv("NCCL_CONF_FILE", str(file))
    assert "NCCL_IB_HCA" not in variables(find_settings(NetworkConfig(), "train", reached_at=None))


def test_the_doctor_s_ranks_get_more_channels_to_a_peer_unless_they_are_given(tmp_path):
    name, file = "NCCL_NCHANNELS_PER_NET_PEER", tmp_path / "nccl.conf"
    assert rank_variables((), {"NCCL_CONF_FILE": str(file)}) == {name: "4"}
    assert rank_variables((), {name: "2"}) == {}
    asked = (Setting(name=name, value="8", reason="network.variables says so"),)
    assert rank_variables(asked, {}) == {name: "8"}
    file.write_text(f"{name}=2\n")
    assert rank_variables((), {"NCCL_CONF_FILE": str(file)}) == {}


def test_storage_ports_as_fast_as_those_of_the_compute_network_are_told_by_the_gpus_they_are_near():
    ports = tuple(replace(port, gbit=400.0) for port in h100_node().ports)
    found = settings(hardware(ports=ports))
    assert variables(found)["NCCL_IB_HCA"] == HCA
    unknown = settings(hardware(ports=ports, topology=Absent(reason="nvidia-smi failed", is_fault=True)))
    assert "mlx5_4:1" in variables(unknown)["NCCL_IB_HCA"]


def test_ports_of_unknown_rate_are_not_left_out_for_one_that_is_known():
    ports = tuple(replace(port, gbit=None if port.gbit == 400 else port.gbit) for port in h100_node().ports)
    found = settings(hardware(ports=ports, topology=Absent(reason="nvidia-smi failed", is_fault=True)))
    assert set(HCA.removeprefix("=").split(",")) < set(variables(found)["NCCL_IB_HCA"].removeprefix("=").split(","))
    assert variables(settings(hardware(ports=ports)))["NCCL_IB_HCA"] == HCA


def test_ports_as_near_as_each_other_all_count():
    topology = parse_topology(output("a100_topo_old.txt"))
    adapters = sorted({name for row in topology.between.values() for name in row if not name.startswith("GPU")})
    assert topology.nearest(adapters) == {name for gpu in topology.gpus for name in adapters if topology.between[gpu][name] == "PHB"}
    assert topology.nearest([*adapters, "mlx5_77"]) == frozenset()
    assert topology.nearest([]) == frozenset()


def test_settings_of_the_run_win_over_environment_and_detection():
    config = NetworkConfig(variables={"NCCL_IB_HCA": "=mlx5_7:1", "NCCL_IB_SL": 3})
    found = settings(config=config, environment={"NCCL_IB_HCA": "=mlx5_1"})
    assert [setting.value for setting in found if setting.name in config.variables] == ["=mlx5_7:1", "3"]


def test_an_interface_that_the_run_names_wins_over_the_environment_in_nccl_and_gloo_alike():
    environment = {"NCCL_SOCKET_IFNAME": "eno1", "GLOO_SOCKET_IFNAME": "eno1"}
    found = variables(settings(config=NetworkConfig(interface="bond0"), environment=environment))
    assert (found["NCCL_SOCKET_IFNAME"], found["GLOO_SOCKET_IFNAME"]) == ("=bond0", "bond0")
    variable = NetworkConfig(interface="bond0", variables={"NCCL_SOCKET_IFNAME": "^docker"})
    assert variables(settings(config=variable, environment=environment))["NCCL_SOCKET_IFNAME"] == "^docker"


def test_detection_can_be_switched_off():
    assert variables(settings(config=NetworkConfig(detect=False, variables={"NCCL_DEBUG": "WARN"}))) == {"NCCL_DEBUG": "WARN"}


def test_servers_do_not_get_what_is_for_megatron():
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in variables(settings(role="rollout"))


def test_blackwell_keeps_its_queues():
    gpus = parse_gpus(output("h100_query.csv").replace(" 9.0,", " 10.0,"))
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in variables(settings(hardware(gpus=gpus)))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (dict(ports=parse_ports(output("ibv_devinfo_roce.txt"))), "RDMA over Ethernet only"),
        (
            dict(ports=parse_ports(output("ibv_devinfo_roce.txt").replace("Ethernet", "Unspecified"))),
            "RDMA of neither InfiniBand nor Ethernet",
        ),
        (dict(ports=Absent(reason="ibv_devinfo is not on PATH")), "ibv_devinfo is not on PATH"),
        (dict(ports=()), "no RDMA adapter"),
    ],
)
def test_adapters_are_not_guessed(changes, why):
    found = settings(hardware(**changes))
    assert not {name for name in variables(found) if name.startswith(("NCCL_IB", "NCCL_NET"))}
    assert reason(found, "NCCL_IB_HCA").startswith(why)


def test_a_port_that_is_down_is_left_out():
    found = settings(hardware(ports=parse_ports(output("ibv_devinfo_down.txt"))))
    assert variables(found)["NCCL_IB_HCA"] == "=mlx5_0:1"


def test_a_port_of_unknown_speed_is_used_but_gets_no_more_queue_pairs():
    found = variables(settings(hardware(ports=parse_ports(output("ibv_devinfo_unknown_speed.txt")))))
    assert found["NCCL_IB_HCA"] == "=mlx5_0:1"
    assert "NCCL_IB_QPS_PER_CONNECTION" not in found


def test_gpudirect_goes_as_far_as_the_farthest_gpu_needs():
    old = parse_topology(output("a100_topo_old.txt"))
    assert variables(settings(hardware(topology=old)))["NCCL_NET_GDR_LEVEL"] == "PHB"
    apart = parse_topology(output("a100_topo_old.txt").replace("PHB", "NODE"))
    assert "NCCL_NET_GDR_LEVEL" not in variables(settings(hardware(topology=apart)))


@pytest.mark.parametrize(
    "changes",
    [
        dict(gpudirect=Absent(reason="nvidia_peermem is not loaded", is_fault=True)),
        dict(topology=Absent(reason="nvidia-smi topo failed", is_fault=True)),
        dict(topology=parse_topology(output("pcie_topo.txt"))),
    ],
)
def test_gpudirect_is_left_to_nccl_where_something_is_not_known(changes):
    found = settings(hardware(**changes))
    assert "NCCL_NET_GDR_LEVEL" not in variables(found)
    assert reason(found, "NCCL_NET_GDR_LEVEL")


def test_multicast_is_off_without_nvlink_and_left_alone_without_a_complete_fabric():
    pcie = settings(hardware(topology=parse_topology(output("pcie_topo.txt"))))
    assert variables(pcie)["NCCL_NVLS_ENABLE"] == "0"
    starting = parse_gpus(output("h100_query.csv"), output("h100_fabric.csv").replace("Completed, Success", "In Progress, N/A"))
    assert "NCCL_NVLS_ENABLE" not in variables(settings(hardware(gpus=starting)))


def test_a_block_has_the_settings_and_leaves_the_environment_as_it_was(monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.delenv("NCCL_IB_SL", raising=False)
    found = find_settings(NetworkConfig(variables={"NCCL_DEBUG": "WARN", "NCCL_IB_SL": 1}), "rollout", reached_at=None)
    with applied(found):
        assert (os.environ["NCCL_DEBUG"], os.environ["NCCL_IB_SL"]) == ("WARN", "1")
    assert os.environ["NCCL_DEBUG"] == "INFO"
    assert "NCCL_IB_SL" not in os.environ


def test_settings_are_found_by_the_tools_of_the_node(h100_node, monkeypatch):
    monkeypatch.delenv("NCCL_IB_HCA", raising=False)
    found = find_settings(NetworkConfig(), "train", reached_at="127.0.0.1")
    assert variables(found)["NCCL_IB_HCA"] == HCA
    assert variables(found)["GLOO_SOCKET_IFNAME"] == "lo"
