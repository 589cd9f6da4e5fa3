"""RDMA adapters by ibv_devinfo or the kernel: their ports, whether these read GPU memory without the host (GPUDirect), whether GPUs ring
their doorbell (IBGDA), and whether switches sum for them (SHARP). Parsing is pure."""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from moerl.hardware.hardware_tools import Absent, run_tool


@dataclass(frozen=True, kw_only=True, slots=True)
class Port:
    adapter: str
    """mlx5_0"""
    number: int
    state: str
    """ACTIVE, DOWN, INIT, ARMED"""
    link_layer: str
    """InfiniBand or Ethernet"""
    gbit: float | None
    """Per second, one way: width times speed. None where the tool does not know the speed."""

    @property
    def is_active(self) -> bool:
        return self.state == "ACTIVE"

    @property
    def name(self) -> str:
        return f"{self.adapter}:{self.number}"


def find_ports(root: Path = Path("/")) -> tuple[Port, ...] | Absent:
    """By ibv_devinfo, or where a container lacks it, by the kernel. `root`: of the file system, for tests."""
    said, adapters = run_tool("ibv_devinfo", "-v"), root / "sys/class/infiniband"
    if not isinstance(said, Absent):
        # An rdma-core older than the adapter does not know its speed; the kernel does.
        rates = {port.name: port.gbit for port in read_ports(adapters)}
        return tuple(replace(port, gbit=rates.get(port.name)) if port.gbit is None else port for port in parse_ports(said))
    # A kernel without InfiniBand's modules, as on nodes without adapters, knows no list of them.
    no_list = "Function not implemented" in said.reason and not any(adapters.glob("*"))
    if "No IB devices found" in said.reason or no_list:
        return ()
    return read_ports(adapters) if not said.is_fault and adapters.is_dir() else said


def read_ports(adapters: Path) -> tuple[Port, ...]:
    """Ports of the kernel's folder of RDMA adapters (Linux, Documentation/ABI/stable/sysfs-class-infiniband)."""
    ports = []
    for folder in sorted(adapters.glob("*/ports/*"), key=lambda folder: (folder.parts[-3], int(folder.name))):
        state, rate, layer = ((folder / name).read_text().strip() for name in ("state", "rate", "link_layer"))
        gbit = re.match(r"([\d.]+) Gb/sec", rate)
        port = Port(
            adapter=folder.parts[-3],
            number=int(folder.name),
            state=state.split(": ")[-1],
            link_layer=layer,
            gbit=float(gbit[1]) if gbit else None,
        )
        ports.append(port)
    return tuple(ports)


def parse_ports(text: str) -> tuple[Port, ...]:
    """Ports of `ibv_devinfo -v`."""
    ports = []
    for adapter in re.split(r"^hca_id:", text, flags=re.MULTILINE)[1:]:
        name = adapter.split(maxsplit=1)[0]
        ports += [_port(name, part) for part in re.split(r"^\s*port:", adapter, flags=re.MULTILINE)[1:]]
    return tuple(ports)


def _port(adapter: str, text: str) -> Port:
    values = dict(re.findall(r"^\s*(\w+):\s+(\S.*)$", text, flags=re.MULTILINE))
    width = re.match(r"(\d+)X", values.get("active_width", ""))
    speed = re.match(r"([\d.]+) Gbps", values.get("active_speed", ""))
    return Port(
        adapter=adapter,
        number=int(text.split(maxsplit=1)[0]),
        state=values["state"].split()[0].removeprefix("PORT_"),
        link_layer=values["link_layer"].strip(),
        gbit=int(width[1]) * float(speed[1]) if width and speed else None,
    )


GPUDirect = Literal["nvidia_peermem", "dma-buf"]


def find_gpudirect(root: Path = Path("/")) -> GPUDirect | Absent:
    """By which of its two ways the kernel lets adapters read GPU memory. `root`: of the file system, for tests.

    dma-buf needs the open kernel modules of the driver and Linux 5.12 (NCCL's user guide, GPU Direct RDMA).
    """
    if (root / "sys/module/nvidia_peermem").exists():
        return "nvidia_peermem"
    driver = root / "proc/driver/nvidia/version"
    if not driver.exists():
        return Absent(reason="no NVIDIA kernel module is loaded")
    release = re.match(r"(\d+)\.(\d+)", (root / "proc/sys/kernel/osrelease").read_text())
    if "Open Kernel Module" in driver.read_text() and release and (int(release[1]), int(release[2])) >= (5, 12):
        return "dma-buf"
    return Absent(reason="nvidia_peermem is not loaded, and dma-buf needs the open kernel modules and Linux 5.12", is_fault=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Doorbell:
    """By what an adapter may hear of work that a GPU has for it: sends of IBGDA, which DeepEP asks of NVSHMEM between nodes.

    Held against NVSHMEM (src/modules/transport/ibgda/ibgda.cpp, src/host/transport/transport.cpp), whose 3.4.5 is in every lock, and
    against DeepEP 29d31c0 (deep_ep/buffer.py), which sets NVSHMEM_IB_ENABLE_IBGDA, queue pairs and their depth itself, over what is there.
    """

    maps_peers: bool
    """The driver was loaded with PeerMappingOverride=1, so that GPUs can map the adapter's registers."""
    has_gdrdrv: bool
    """GDRCopy's kernel module is loaded: a thread of the CPU sees the GPU's words, and rings."""


def find_doorbell(root: Path = Path("/")) -> Doorbell:
    """`root`: of the file system, for tests. The module's parameter in /sys is empty though it is set."""
    try:
        options = (root / "proc/driver/nvidia/params").read_text()
    except OSError:
        options = ""
    words = next((line for line in options.splitlines() if line.startswith("RegistryDwords:")), "")
    has_gdrdrv = (root / "dev/gdrdrv").exists()
    return Doorbell(maps_peers="PeerMappingOverride=1" in words.replace(" ", ""), has_gdrdrv=has_gdrdrv)


def handler_reason(doorbell: Doorbell) -> str:
    """Outcome of NVSHMEM_IBGDA_NIC_HANDLER=auto, which tries."""
    if doorbell.maps_peers:
        return "PeerMappingOverride=1: GPUs ring the adapter's doorbell"
    by = "GDRCopy" if doorbell.has_gdrdrv else "host memory, as GDRCopy's gdrdrv is not loaded either"
    return f"no PeerMappingOverride=1: unless the driver maps the doorbell all the same, a thread of the CPU rings it by way of {by}"


def prefix_of(ports: Sequence[Port]) -> str | None:
    """NVSHMEM_HCA_PREFIX: NVSHMEM leaves out adapters whose names have it nowhere, mlx5 if nothing is set. None: not needed, or the
    names have no letters in common."""
    if all("mlx5" in port.adapter for port in ports):
        return None
    letters = {re.split("[^a-z]", port.adapter)[0] for port in ports} - {""}
    return letters.pop() if len(letters) == 1 else None


_LOAD = """
import ctypes, sys
said = []
for name in sys.argv[1:]:
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        said.append(str(error))
        continue
    print("loaded", name, *[version for version in range(12, 5, -1) if hasattr(library, f"ncclCollNetPlugin_v{version}")])
    break
else:
    print("failed", *said, sep="; ")
"""


def find_sharp(environment: Mapping[str, str]) -> str | Absent:
    """A network plugin with CollNet, by which NCCL has sums made in switches, and its version, for people. `environment`: of a process that
    will load NCCL, which looks for it as the loader does (src/plugin/plugin_open.cc), and takes one without CollNet too. Whether the fabric
    has an aggregation manager, and flows to spare, is not seen on a node; without, all ranks go without (src/transport.cc).
    """
    asked = environment.get("NCCL_NET_PLUGIN", "")
    names = [name for each in asked.split(",") if each for name in (each, f"libnccl-net-{each}.so")] if asked else ["libnccl-net.so"]
    said = run_tool(sys.executable, "-S", "-c", _LOAD, *names)
    if isinstance(said, Absent):
        return Absent(reason=f"NCCL's network plugin cannot be loaded: {said.reason}")
    loaded = re.match(r"loaded (\S+) ?(\d+)?", said)
    if loaded is None:
        return Absent(reason=f"no network plugin for NCCL: {said.removeprefix('failed; ').strip()}")
    if loaded[2] is None:
        return Absent(reason=f"{loaded[1]} has no CollNet, which SHARP comes by")
    return f"{loaded[1]} with CollNet v{loaded[2]}"
