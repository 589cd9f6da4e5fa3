"""What DeepEP between nodes and sums in switches are told of a node, and what refuses them: what is found, and what is asked."""

import subprocess
from dataclasses import replace

import pytest
from node_cases import h100_node, output
from test_network_settings import HCA, hardware, reason

from moerl.check import load_checked
from moerl.config.derive.rdma import SHARP, crosses_nodes
from moerl.config.schema.run_config import NetworkConfig
from moerl.doctor.checks.expected import Expectations, expected_of
from moerl.doctor.checks.host_checks import rdma_checks
from moerl.hardware.hardware_tools import Absent
from moerl.hardware.infiniband import Doorbell, find_doorbell, find_sharp, parse_ports
from moerl.hardware.network_settings import network_settings, variables
from moerl.types.errors import ConfigError

PLUGIN = "libnccl-net.so with CollNet v11"
RECIPE = "recipe=grpo-qwen3-235b-32n8g-async"
GATHER = "rollout.layout.all_to_all=gather"
FLEX = ("+train.megatron.moe_token_dispatcher_type=flex", "train.router_replay=off")


def settings(found=None, role="train", *, config=None, reached_at="10.1.0.7", deepep=True):
    found, config = hardware() if found is None else found, NetworkConfig() if config is None else config
    return network_settings(found, config, role, reached_at=reached_at, environment={}, files={}, deepep=deepep)


def judged(expected, **changes):
    return {finding.check: finding for finding in rdma_checks(h100_node(**changes), expected)}


# -- DeepEP ----------------------------------------------------------------------------------------------------


def test_deepep_gets_the_ports_of_nccl_and_the_interface_by_which_nodes_meet():
    found = settings()
    mine = {name: value for name, value in variables(found).items() if name.startswith("NVSHMEM")}
    assert mine == {"NVSHMEM_HCA_LIST": HCA.removeprefix("="), "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "=bond0"}
    assert reason(found, "NVSHMEM_IBGDA_NIC_HANDLER") == "PeerMappingOverride=1: GPUs ring the adapter's doorbell"
    assert variables(settings(role="rollout"))["NVSHMEM_HCA_LIST"] == mine["NVSHMEM_HCA_LIST"]
    named = settings(config=NetworkConfig(interface="lo"))
    assert variables(named)["NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME"] == "=lo"


def test_without_deepep_between_nodes_nothing_is_told_to_nvshmem():
    assert not [setting for setting in settings(deepep=False) if setting.name.startswith("NVSHMEM")]


def test_adapters_that_are_not_called_mlx5_are_told_by_what_their_names_have_in_common():
    ports = tuple(replace(port, adapter=port.adapter.replace("mlx5_", "ibp1")) for port in h100_node().ports)
    far = Absent(reason="nvidia-smi failed", is_fault=True)
    assert variables(settings(hardware(ports=ports, topology=far)))["NVSHMEM_HCA_PREFIX"] == "ibp"


@pytest.mark.parametrize(
    ("ports", "why"), [((), "no RDMA adapter"), (parse_ports(output("ibv_devinfo_roce.txt")), "RDMA over Ethernet only")]
)
def test_ports_that_are_not_known_are_not_listed(ports, why):
    found = settings(hardware(ports=ports))
    assert "NVSHMEM_HCA_LIST" not in variables(found) and reason(found, "NVSHMEM_HCA_LIST").startswith(why)


PARAMS = 'ResmanDebugLevel: 4294967295\nRegistryDwords: "{}"\nRegistryDwordsPerDevice: ""\n'


def test_the_doorbell_is_found_in_the_driver_s_parameters_and_the_devices(tmp_path):
    assert find_doorbell(tmp_path) == Doorbell(maps_peers=False, has_gdrdrv=False)
    file = tmp_path / "proc/driver/nvidia/params"
    file.parent.mkdir(parents=True)
    file.write_text(PARAMS.format("RMIntrLockingMode=1;PeerMappingOverride=1;"))
    assert find_doorbell(tmp_path) == Doorbell(maps_peers=True, has_gdrdrv=False)
    file.write_text(PARAMS.format("PeerMappingOverride=0;"))
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/gdrdrv").touch()
    assert find_doorbell(tmp_path) == Doorbell(maps_peers=False, has_gdrdrv=True)


def by_cpu(has_gdrdrv):
    return Doorbell(maps_peers=False, has_gdrdrv=has_gdrdrv)


def told(**given):
    return Expectations(deepep=True, network=NetworkConfig(variables=given))


@pytest.mark.parametrize(
    ("verdict", "words", "expected", "changes"),
    [
        ("ok", "GPUs ring", told(), {}),
        ("warn", "by way of GDRCopy", told(), dict(doorbell=by_cpu(True))),
        ("warn", "by way of host memory", told(), dict(doorbell=by_cpu(False))),
        ("fail", "no RDMA port is active", told(), dict(ports=())),
        ("fail", "ibv_devinfo is not on PATH", told(), dict(ports=Absent(reason="ibv_devinfo is not on PATH"))),
        ("fail", "nvidia_peermem is not loaded", told(), dict(gpudirect=Absent(reason="nvidia_peermem is not loaded", is_fault=True))),
        ("fail", "NVSHMEM_HCA_LIST=mlx5_77:1; active are mlx5_0", told(NVSHMEM_HCA_LIST="mlx5_77:1"), {}),
        ("ok", "GPUs ring", told(NVSHMEM_HCA_LIST="^mlx5_77"), {}),
        ("fail", "no /dev/gdrdrv", told(NVSHMEM_IBGDA_NIC_HANDLER="cpu"), dict(doorbell=by_cpu(False))),
        ("warn", "by way of GDRCopy", told(NVSHMEM_IBGDA_NIC_HANDLER="cpu"), dict(doorbell=by_cpu(True))),
    ],
)
def test_a_node_on_which_deepep_s_sends_cannot_work_is_refused_and_a_slow_one_named(verdict, words, expected, changes):
    finding = judged(expected, **changes)["IBGDA for DeepEP"]
    assert (finding.verdict, words in finding.found) == (verdict, True), finding
    assert finding.fix or verdict == "ok"


@pytest.mark.parametrize(
    ("words", "train", "rollout"),
    [
        ((RECIPE,), False, True),
        ((RECIPE, *FLEX), True, True),
        ((RECIPE, GATHER, *FLEX, "+train.megatron.moe_flex_dispatcher_backend=hybridep"), False, False),
        ((RECIPE, GATHER, *FLEX), True, False),
        (("recipe=grpo-qwen3-30b-a3b-1n8g-sync", *FLEX), False, False),
    ],
)
def test_deepep_crosses_nodes_where_experts_of_a_group_are_on_several(words, train, rollout):
    config = load_checked(list(words))
    assert (crosses_nodes(config, "train"), crosses_nodes(config, "rollout")) == (train, rollout)
    assert expected_of(config).deepep == (train or rollout)


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ("NVSHMEM_ENABLE_NIC_PE_MAPPING=1", "cannot be set with DeepEP over several nodes"),
        ("NVSHMEM_IB_ENABLE_IBGDA=0", "has no effect with DeepEP over several nodes"),
        ("NVSHMEM_IBGDA_NIC_HANDLER=nic", "must be one of auto, gpu, cpu, cpu_host_memory"),
    ],
)
def test_variables_that_deepep_cannot_work_with_are_refused_by_check(given, rule):
    for where in ("network.variables", "train.environment"):
        with pytest.raises(ConfigError) as refused:
            load_checked([RECIPE, *FLEX, f"+{where}.{given}"])
        assert f"{where}.{given.partition('=')[0]}" in str(refused.value) and rule in str(refused.value)
    load_checked([RECIPE, GATHER, f"+network.variables.{given}"])


# -- SHARP -----------------------------------------------------------------------------------------------------


def library(folder, name, symbols):
    code = "".join(f"int {symbol};" for symbol in symbols)
    subprocess.run(["gcc", "-shared", "-x", "c", "-", "-o", str(folder / name)], input=code, text=True, check=True, timeout=60)


def test_the_plugin_is_loaded_as_nccl_loads_it(tmp_path, monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    missing = find_sharp({})
    assert isinstance(missing, Absent) and "libnccl-net.so" in missing.reason
    library(tmp_path, "libnccl-net.so", ["ncclNetPlugin_v9"])
    assert find_sharp({}) == Absent(reason="libnccl-net.so has no CollNet, which SHARP comes by")
    library(tmp_path, "libnccl-net-sharp.so", ["ncclNetPlugin_v11", "ncclCollNetPlugin_v11", "ncclCollNetPlugin_v9"])
    assert find_sharp({"NCCL_NET_PLUGIN": "sharp"}) == "libnccl-net-sharp.so with CollNet v11"


@pytest.mark.parametrize(
    ("words", "changes", "reached_at"),
    [
        ("no SHARP: no network plugin for NCCL", {}, "10.1.0.7"),
        (f"{PLUGIN}; whether the fabric's switches may be used", dict(sharp=PLUGIN), "10.1.0.7"),
        ("SHARP sums between nodes, and there is one", dict(sharp=PLUGIN), None),
    ],
)
def test_sharp_is_never_asked_for_by_itself_and_the_reason_is_said(words, changes, reached_at):
    found = settings(hardware(**changes), reached_at=reached_at)
    assert SHARP not in variables(found) and reason(found, SHARP).startswith(words)
    assert SHARP not in {setting.name for setting in settings(hardware(**changes), "rollout")}


@pytest.mark.parametrize(
    ("verdict", "changes"),
    [
        ("ok", dict(sharp=PLUGIN)),
        ("fail", {}),
        ("fail", dict(sharp=PLUGIN, ports=parse_ports(output("ibv_devinfo_roce.txt")))),
        ("fail", dict(sharp=PLUGIN, gpudirect=Absent(reason="nvidia_peermem is not loaded", is_fault=True))),
    ],
)
def test_sharp_that_is_asked_for_and_cannot_be_had_is_refused(verdict, changes):
    finding = judged(Expectations(sharp=True), **changes)["SHARP"]
    assert finding.verdict == verdict and (finding.fix or verdict == "ok")
    assert "SHARP" not in judged(Expectations(), **changes)


def test_a_run_asks_for_sharp_by_its_variables():
    asks = load_checked([RECIPE, f"+train.environment.{SHARP}=1"])
    assert expected_of(asks).sharp and not expected_of(load_checked([RECIPE])).sharp
    with pytest.raises(ConfigError, match=rf"{SHARP} = .*needs several nodes"):
        load_checked(["recipe=grpo-qwen3-30b-a3b-1n8g-sync", f"+train.environment.{SHARP}=1"])
    with pytest.raises(ConfigError, match="needs train.destroy_groups=false"):
        load_checked([RECIPE, f"+network.variables.{SHARP}=1", "train.destroy_groups=true"])


# -- rails -----------------------------------------------------------------------------------------------------


def test_the_card_of_each_gpu_is_said_and_one_that_has_none_is_named():
    assert judged(Expectations())["cards of GPUs"].found.startswith("mlx5_0: GPU 0, mlx5_1: GPU 1")
    ports = tuple(port for port in h100_node().ports if port.adapter != "mlx5_0")
    finding = judged(Expectations(), ports=ports)["cards of GPUs"]
    assert finding.verdict == "warn" and "GPU 0, 1" in finding.found
    assert judged(Expectations(), ports=())["cards of GPUs"].verdict == "skipped"
