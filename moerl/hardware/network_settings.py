"""The variables by which NCCL and gloo are told of a node's links: from what was detected there, each with its reason.

What is set in the environment or in NCCL's files wins over what was detected, and `network.interface` and `network.variables` over both.
Values that belong to a fabric and not to its links (NCCL_IB_TC, NCCL_IB_SL, NCCL_IB_GID_INDEX) are never set. Names and values: NCCL's user
guide, "Environment Variables".
"""

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from moerl.config.derive.rdma import SHARP
from moerl.config.schema.run_config import NetworkConfig
from moerl.hardware import infiniband
from moerl.hardware.hardware_tools import Absent, present
from moerl.hardware.infiniband import Doorbell, GPUDirect, Port
from moerl.hardware.nvidia import DISTANCES, NvidiaGPU, Topology, find_gpus, find_topology
from moerl.types.errors import ConfigError, problem

Role = Literal["train", "rollout"]

_FAST_GBIT = 200.0
_QUEUE_PAIRS = 4
"""Per connection over ports of _FAST_GBIT and more; public recipes take 2 to 8. NCCL's default of 1 follows one path of a routed fabric."""
_IB_TIMEOUT = 22
"""4.096 us * 2^22 = 17 s until a packet is sent again: a link that the subnet manager reroutes comes back within it. NCCL's own: 20."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """Links of one node."""

    gpus: tuple[NvidiaGPU, ...] | Absent
    topology: Topology | Absent
    ports: tuple[Port, ...] | Absent
    gpudirect: GPUDirect | Absent
    interfaces: Mapping[str, tuple[str, ...]]
    """Name -> IP addresses."""
    doorbell: Doorbell
    sharp: str | Absent


@dataclass(frozen=True, slots=True)
class Setting:
    name: str
    value: str | None
    """None: it is left as it is."""
    reason: str


def find_hardware() -> Hardware:
    ports = infiniband.find_ports()
    has_infiniband = any(port.is_active and port.link_layer == "InfiniBand" for port in present(ports))
    return Hardware(
        gpus=find_gpus(),
        topology=find_topology(),
        ports=ports,
        gpudirect=infiniband.find_gpudirect(),
        interfaces=find_interfaces(),
        doorbell=infiniband.find_doorbell(),
        sharp=infiniband.find_sharp(os.environ) if has_infiniband else Absent(reason="no active InfiniBand port"),
    )


def read_nccl_files(environment: Mapping[str, str], root: Path = Path("/")) -> dict[str, Path]:
    """Variables that NCCL reads from files, which it heeds where the environment does not have them (src/misc/param.cc): name -> the file
    that sets it, of NCCL_CONF_FILE, or else of the home folder, before /etc/nccl.conf. Files that cannot be read are left out, as by NCCL.
    `root`: of the file system, for tests."""
    own = environment.get("NCCL_CONF_FILE", "")
    found: dict[str, Path] = {}
    # Not Path.home(), which raises for a user whom nobody has listed and who has no HOME.
    for file in (Path(own or os.path.expanduser("~/.nccl.conf")), root / "etc/nccl.conf"):
        try:
            lines = file.read_text(errors="replace").splitlines()
        except OSError:
            continue
        found = {line.partition("=")[0]: file for line in lines if "=" in line} | found
    return found


def find_interfaces() -> dict[str, tuple[str, ...]]:
    families = (socket.AF_INET, socket.AF_INET6)
    return {name: tuple(a.address for a in found if a.family in families) for name, found in psutil.net_if_addrs().items()}


def network_settings(
    hardware: Hardware,
    config: NetworkConfig,
    role: Role,
    *,
    reached_at: str | None,
    environment: Mapping[str, str],
    files: Mapping[str, Path],
    deepep: bool = False,
) -> tuple[Setting, ...]:
    """`reached_at`: this node's address for other nodes; None where there are none. `environment`: of the process so far. `files`: which
    of NCCL's files sets a variable. `deepep`: the process sends tokens to other nodes by DeepEP.

    Raises ConfigError for a network.interface that the node does not have.
    """
    detected: list[Setting] = []
    if config.detect and role == "train":
        detected.append(Setting("TORCH_GLOO_LAZY_INIT", "1", "gloo connects a rank to those it exchanges with, not to all at the start"))
    if config.detect and role == "train" and reached_at is None:
        detected += _loopback(hardware)
    if config.detect and present(hardware.gpus):
        detected += [*_reached_interface(hardware, reached_at), *_infiniband(hardware), *_nvlink(hardware)]
        if role == "train":
            detected += [*_sharp(hardware, reached_at), _megatron(hardware)]
        if deepep:
            detected += _ibgda(hardware, config, reached_at)
    asked = {setting.name: setting for setting in _asked_interface(hardware, config)}
    for name, value in sorted(config.variables.items()):
        asked[name] = Setting(name, str(value), "network.variables says so")
    kept = [_unless_given(setting, environment, files) for setting in detected if setting.name not in asked]
    return (*kept, *asked.values())


def find_settings(config: NetworkConfig, role: Role, *, reached_at: str | None, deepep: bool = False) -> tuple[Setting, ...]:
    """Settings of this node and process, as network_settings has them."""
    files = read_nccl_files(os.environ)
    return network_settings(find_hardware(), config, role, reached_at=reached_at, environment=os.environ, files=files, deepep=deepep)


def variables(settings: tuple[Setting, ...]) -> dict[str, str]:
    """Those that are to be set."""
    return {setting.name: setting.value for setting in settings if setting.value is not None}


@contextmanager
def applied(settings: tuple[Setting, ...]) -> Iterator[None]:
    """Context in which they are in this process's environment and that of processes it starts."""
    new = variables(settings)
    before = {name: os.environ.get(name) for name in new}
    os.environ.update(new)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _unless_given(setting: Setting, environment: Mapping[str, str], files: Mapping[str, Path]) -> Setting:
    name = setting.name
    if setting.value is None or name not in {*environment, *files}:
        return setting
    given = f"the environment has {name}={environment[name]}" if name in environment else f"{files[name]} sets it"
    return Setting(name, None, f"{given}, which is kept")


def _asked_interface(hardware: Hardware, config: NetworkConfig) -> Iterator[Setting]:
    name = config.interface
    if name is None:
        return
    if name not in hardware.interfaces:
        there = ", ".join(hardware.interfaces)
        rule = f"is not an interface of {socket.gethostname()}"
        raise ConfigError([problem("network.interface", name, rule, f"it has {there}", "one that every node has, or null")])
    yield from _over(name, "network.interface says so")


def _loopback(hardware: Hardware) -> Iterator[Setting]:
    """gloo takes what the host's name stands for, on which others may reach it. What NCCL takes is left: it has not been run so."""
    name = next((name for name, addresses in hardware.interfaces.items() if "127.0.0.1" in addresses), None)
    if name is not None:
        yield Setting("GLOO_SOCKET_IFNAME", name, "ranks of one node meet where nobody else reaches them")


def _reached_interface(hardware: Hardware, reached_at: str | None) -> Iterator[Setting]:
    name = _interface(hardware, NetworkConfig(), reached_at)
    if name is not None:
        yield from _over(name, "it has the address by which other nodes reach this one")


def _over(interface: str, reason: str) -> Iterator[Setting]:
    yield Setting("NCCL_SOCKET_IFNAME", f"={interface}", reason)
    yield Setting("GLOO_SOCKET_IFNAME", interface, reason)


def _infiniband(hardware: Hardware) -> Iterator[Setting]:
    ports = fabric_ports(hardware.ports, hardware.topology)
    if not ports:
        yield Setting("NCCL_IB_HCA", None, _without_infiniband(hardware.ports))
        return
    left_out = [port.name for port in present(hardware.ports) if port not in ports]
    gbit = max((port.gbit for port in ports if port.gbit is not None), default=None)
    rate = f" at {gbit:g} Gb/s" if gbit is not None and all(port.gbit == gbit for port in ports) else ""
    reason = f"active InfiniBand ports{rate}" + (f"; others are left out: {', '.join(left_out)}" if left_out else "")
    yield Setting("NCCL_IB_HCA", "=" + ",".join(port.name for port in ports), reason)
    reason = "17 s before a packet is sent again, so that a rerouted link does not end the run"
    yield Setting("NCCL_IB_TIMEOUT", str(_IB_TIMEOUT), reason)
    if gbit is not None and gbit >= _FAST_GBIT:
        reason = f"one queue pair follows one path of the fabric and rarely fills {gbit:g} Gb/s"
        yield Setting("NCCL_IB_QPS_PER_CONNECTION", str(_QUEUE_PAIRS), reason)
    yield _gpudirect(hardware)


def fabric_ports(ports: tuple[Port, ...] | Absent, topology: Topology | Absent) -> tuple[Port, ...]:
    """The active InfiniBand ports that carry the compute network. Those of storage are slower, or farther from every GPU than another one;
    a port of unknown rate, and every port where a distance is not known, gets the benefit of the doubt."""
    active = [port for port in present(ports) if port.is_active and port.link_layer == "InfiniBand"]
    fastest = max((port.gbit for port in active if port.gbit is not None), default=None)
    fast = [port for port in active if port.gbit is None or port.gbit == fastest]
    near = frozenset() if isinstance(topology, Absent) else topology.nearest({port.adapter for port in fast})
    return tuple(port for port in fast if not near or port.adapter in near)


def _without_infiniband(ports: tuple[Port, ...] | Absent) -> str:
    if isinstance(ports, Absent):
        return ports.reason
    active = [port for port in ports if port.is_active]
    if active and all(port.link_layer not in ("InfiniBand", "Ethernet") for port in active):
        names = ", ".join(port.name for port in active)
        return f"RDMA of neither InfiniBand nor Ethernet ({names}), as EFA is: NCCL needs a network plugin for it"
    if active:
        return "RDMA over Ethernet only: which ports carry the compute network cannot be seen here; set network.variables.NCCL_IB_HCA"
    return "no RDMA port is active" if ports else "no RDMA adapter"


def _gpudirect(hardware: Hardware) -> Setting:
    name, topology = "NCCL_NET_GDR_LEVEL", hardware.topology
    if isinstance(hardware.gpudirect, Absent):
        return Setting(name, None, f"no GPUDirect RDMA: {hardware.gpudirect.reason}")
    if isinstance(topology, Absent):
        return Setting(name, None, f"distances of GPUs and adapters are not known: {topology.reason}")
    nearest = [topology.to_adapter(gpu) for gpu in topology.gpus]
    known = [kind for kind in nearest if kind is not None]
    if not known or len(known) < len(nearest):
        return Setting(name, None, "distances of GPUs and adapters are not known: nvidia-smi topo lists no adapter")
    farthest = max(known, key=DISTANCES.index)
    if DISTANCES.index(farthest) > DISTANCES.index("PHB"):
        return Setting(name, None, f"the nearest adapter of a GPU is at {farthest}, where going through host memory is as fast")
    reason = f"{hardware.gpudirect}; no GPU's nearest adapter is farther than {farthest}"
    return Setting(name, "PHB" if farthest == "PHB" else "PXB", reason)


def _sharp(hardware: Hardware, reached_at: str | None) -> Iterator[Setting]:
    """Never set by itself: flows of a switch are few, and whose they are is the fabric's owner's to say."""
    if not fabric_ports(hardware.ports, hardware.topology):
        return
    if reached_at is None:
        reason = "SHARP sums between nodes, and there is one"
    elif isinstance(hardware.sharp, Absent):
        reason = f"no SHARP: {hardware.sharp.reason}"
    else:
        reason = f"{hardware.sharp}; whether the fabric's switches may be used cannot be seen here: train.environment.{SHARP}=1 asks for it"
    yield Setting(SHARP, None, reason)


def _ibgda(hardware: Hardware, config: NetworkConfig, reached_at: str | None) -> Iterator[Setting]:
    """Variables that NVSHMEM is told for DeepEP's sends between nodes."""
    ports = fabric_ports(hardware.ports, hardware.topology)
    listed = ",".join(port.name for port in ports) if ports else None
    reason = "the ports of NCCL_IB_HCA, of which each GPU takes the nearest" if ports else _without_infiniband(hardware.ports)
    yield Setting("NVSHMEM_HCA_LIST", listed, reason)
    if prefix := infiniband.prefix_of(ports):
        yield Setting("NVSHMEM_HCA_PREFIX", prefix, "NVSHMEM leaves out adapters that are not called mlx5, unless it is told")
    if (interface := _interface(hardware, config, reached_at)) is not None:
        yield Setting(
            "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", f"={interface}", "the interface of NCCL_SOCKET_IFNAME, over which its processes meet"
        )
    yield Setting("NVSHMEM_IBGDA_NIC_HANDLER", None, infiniband.handler_reason(hardware.doorbell))


def _interface(hardware: Hardware, config: NetworkConfig, reached_at: str | None) -> str | None:
    reached = next((name for name, addresses in hardware.interfaces.items() if reached_at in addresses), None)
    return config.interface if config.interface is not None else reached


def _nvlink(hardware: Hardware) -> Iterator[Setting]:
    """NCCL finds out by itself on NVSwitch machines; forced on where the fabric is not complete, it fails."""
    name, gpus, topology = "NCCL_NVLS_ENABLE", hardware.gpus, hardware.topology
    if isinstance(gpus, Absent) or isinstance(topology, Absent) or len(gpus) < 2:
        return
    if not topology.has_nvlink:
        yield Setting(name, "0", "not every two GPUs have an NVLink between them")
    elif all(gpu.fabric == "Completed Success" for gpu in gpus):
        yield Setting(name, "1", "NVLink between every two GPUs, and the NVSwitch fabric is complete")
    else:
        yield Setting(name, None, "NVLinks without a fabric that says it is complete: NCCL decides")


def _megatron(hardware: Hardware) -> Setting:
    name, compute = "CUDA_DEVICE_MAX_CONNECTIONS", present(hardware.gpus)[0].compute
    if compute is not None and compute < (10, 0):
        reason = "Megatron relies on one queue to start communication before the computation that it is hidden behind"
        return Setting(name, "1", reason)
    return Setting(name, None, "needed before Blackwell (compute capability 10) only")
