"""GPUs of a node by nvidia-smi: themselves, the links between them, how far the network adapters are, and the CPUs near one. Parsing is
pure."""

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moerl.hardware.hardware_tools import Absent, run_tool

_Fields = Mapping[str, tuple[str, Callable[[str], Any]]]
"""Field of NvidiaGPU -> nvidia-smi's name for it, and what becomes of the text."""
_FIELDS: _Fields = {
    "index": ("index", int),
    "name": ("name", str),
    "driver": ("driver_version", str),
    "compute": ("compute_cap", lambda cell: tuple(map(int, cell.split(".")))),
    "total_mib": ("memory.total", float),
    "used_mib": ("memory.used", float),
    "celsius": ("temperature.gpu", float),
    "sm_mhz": ("clocks.sm", float),
    "max_sm_mhz": ("clocks.max.sm", float),
    "ecc": ("ecc.mode.current", str),
    "uncorrected": ("ecc.errors.uncorrected.volatile.total", int),
    "mig": ("mig.mode.current", str),
    "slowed_by": ("", lambda cell: int(cell, 16)),
}
_REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
"""slowed_by: one field under the name it has since driver 535, and before."""
_FABRIC = ("fabric.state", "fabric.status")
_TRUTH = {"yes": True, "1": True, "no": False, "0": False}
"""Drivers write Yes and No, or a number."""
_REMAPPED: _Fields = {
    "remap_pending": ("remapped_rows.pending", lambda cell: _TRUTH.get(cell.lower())),
    "remap_failed": ("remapped_rows.failure", lambda cell: _TRUTH.get(cell.lower())),
}

DISTANCES = ("PIX", "PXB", "PHB", "NODE", "SYS")
"""Between a GPU and an adapter, nearest first: one PCIe bridge, several, the host bridge, other host bridges, another socket."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NvidiaGPU:
    """A value that the driver does not give is None."""

    index: int
    name: str
    driver: str
    compute: tuple[int, int] | None
    total_mib: float | None
    used_mib: float | None
    celsius: float | None
    sm_mhz: float | None
    max_sm_mhz: float | None
    ecc: str | None
    uncorrected: int | None
    """ECC errors since the driver was loaded."""
    mig: str | None
    slowed_by: int | None
    """Bits of nvmlClocksEventReasons."""
    fabric: str = ""
    """State and status of its NVSwitch fabric; empty where there is none or the driver does not say."""
    remap_pending: bool | None = None
    """A broken row of its memory is replaced at its next reset (NVIDIA's GPU memory error management, row remapping)."""
    remap_failed: bool | None = None
    """A broken row could not be replaced."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NVLinks:
    """Links of one GPU."""

    index: int
    gb_per_second: tuple[float | None, ...]
    """Speed of each link, one way; None: inactive."""
    all_inactive: bool = False
    """The driver lists none of them, as all are inactive: they are down, or a card of PCIe has no bridge."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    between: Mapping[str, Mapping[str, str]]
    """Device -> device -> NV18, PIX, ...; devices are GPU0 ... and adapters by the name of their driver (mlx5_0)."""
    cpus: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """GPU0 ... -> the CPUs of its NUMA node, where nvidia-smi says them."""

    @property
    def gpus(self) -> list[str]:
        return [name for name in self.between if name.startswith("GPU")]

    @property
    def has_nvlink(self) -> bool:
        """Between every two GPUs, of which there are at least two."""
        pairs = [self.between[a][b] for a in self.gpus for b in self.gpus if a != b]
        return bool(pairs) and all(kind.startswith("NV") for kind in pairs)

    def to_adapter(self, gpu: str) -> str | None:
        """The distance of the nearest adapter."""
        kinds = [kind for name, kind in self.between[gpu].items() if not name.startswith("GPU") and kind in DISTANCES]
        return min(kinds, key=DISTANCES.index, default=None)

    def nearest(self, adapters: Collection[str]) -> frozenset[str]:
        """Adapters of these that no other is nearer to some GPU than; none where a distance is not known."""
        found: set[str] = set()
        for gpu in self.gpus:
            distances = {name: self.between[gpu].get(name, "") for name in adapters}
            if not distances or not all(kind in DISTANCES for kind in distances.values()):
                return frozenset()
            least = min(map(DISTANCES.index, distances.values()))
            found |= {name for name, kind in distances.items() if DISTANCES.index(kind) == least}
        return frozenset(found)


def find_gpus() -> tuple[NvidiaGPU, ...] | Absent:
    found = _query_gpus(_REASONS[0])
    # Drivers before 535 know the field by its former name only.
    is_old = isinstance(found, Absent) and "not a valid field" in found.reason
    return _query_gpus(_REASONS[1]) if is_old else found


def _query_gpus(reasons: str) -> tuple[NvidiaGPU, ...] | Absent:
    asked = ",".join(name if name else reasons for name, _ in _FIELDS.values())
    said = run_tool("nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader,nounits")
    if isinstance(said, Absent):
        return () if "No devices were found" in said.reason else said
    fabric = run_tool("nvidia-smi", f"--query-gpu={','.join(_FABRIC)}", "--format=csv,noheader,nounits")
    rows = ",".join(name for name, _ in _REMAPPED.values())
    remapped = run_tool("nvidia-smi", f"--query-remapped-rows={rows}", "--format=csv,noheader,nounits")
    return parse_gpus(said, "" if isinstance(fabric, Absent) else fabric, "" if isinstance(remapped, Absent) else remapped)


def find_links() -> tuple[NVLinks, ...] | Absent:
    said = run_tool("nvidia-smi", "nvlink", "--status")
    return said if isinstance(said, Absent) else parse_links(said)


def find_topology() -> Topology | Absent:
    said = run_tool("nvidia-smi", "topo", "--matrix")
    return said if isinstance(said, Absent) else parse_topology(said)


def parse_gpus(query: str, fabric: str = "", remapped: str = "") -> tuple[NvidiaGPU, ...]:
    """`query`: nvidia-smi's rows of _FIELDS, `fabric` and `remapped`: its rows of _FABRIC and _REMAPPED, or what it says instead, which is
    no row for each GPU; without header, units."""
    rows = _rows(query)
    states, remaps = _rows(fabric), _rows(remapped)
    if len(states) != len(rows):
        states = [[]] * len(rows)
    if len(remaps) != len(rows) or any(len(cells) != len(_REMAPPED) for cells in remaps):
        remaps = [[""] * len(_REMAPPED)] * len(rows)
    return tuple(
        NvidiaGPU(**_read(_FIELDS, row), **_read(_REMAPPED, remap), fabric=" ".join(cell for cell in state if _is_known(cell)))
        for row, state, remap in zip(rows, states, remaps, strict=True)
    )


def _rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]


def parse_links(text: str) -> tuple[NVLinks, ...]:
    """Links of `nvidia-smi nvlink --status`. A GPU without NVLinks is there with none."""
    found: list[tuple[int, list[float | None]]] = []
    silent: set[int] = set()
    for line in text.splitlines():
        if gpu := re.match(r"\s*GPU (\d+):", line):
            found.append((int(gpu[1]), []))
        elif (link := re.match(r"\s*Link \d+: (?:([\d.]+) GB/s|<inactive>)", line)) and found:
            found[-1][1].append(None if link[1] is None else float(link[1]))
        elif "all links are inactive" in line.lower() and found:
            silent.add(found[-1][0])
    return tuple(NVLinks(index=index, gb_per_second=tuple(links), all_inactive=index in silent) for index, links in found)


def parse_topology(text: str) -> Topology:
    """Topology of `nvidia-smi topo --matrix`, from drivers that name adapters in the matrix and from those that list them below it."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
    names = {match[1]: match[2] for line in lines if (match := re.match(r"\s*(NIC\d+): (\S+)", line))}
    head = next((line for line in lines if re.search(r"(^|\s)GPU0(\s|$)", line)), None)
    if head is None:
        return Topology(between={})
    devices = re.split(r"\s{2,}|\t+", head.strip())
    columns = [device for device in devices if "Affinity" not in device and "NUMA" not in device]
    listed = [cells for line in lines[lines.index(head) + 1 :] if (cells := line.split()) and cells[0] in columns]
    rows = {cells[0]: cells[1 : len(columns) + 1] for cells in listed}
    has_cpus = "CPU Affinity" in head
    return Topology(
        cpus={cells[0]: cpu_list(cells[len(columns) + 1]) for cells in listed if has_cpus and len(cells) > len(columns) + 1},
        between={
            names.get(row, row): {names.get(column, column): kind for column, kind in zip(columns, kinds, strict=True)}
            for row, kinds in rows.items()
        },
    )


def _read(fields: _Fields, row: Sequence[str]) -> dict[str, Any]:
    return {field: read(cell) if _is_known(cell) else None for (field, (_, read)), cell in zip(fields.items(), row, strict=True)}


def _is_known(cell: str) -> bool:
    """False for what nvidia-smi writes instead of a value: [N/A], [Not Supported], [Unknown Error], ..."""
    return not cell.startswith("[") and cell not in ("", "N/A", "ERR!")


def slowdowns(bits: int) -> Iterator[str]:
    """Names of what holds a GPU's clocks down although it could run faster (nvml.h, nvmlClocksEventReasons)."""
    names = {0x8: "hardware slowdown", 0x20: "software thermal limit", 0x40: "hardware thermal limit", 0x80: "power brake"}
    return (name for bit, name in names.items() if bits & bit)


def cpu_list(text: str) -> frozenset[int]:
    """CPUs of a list such as 0-47,96-143; none for what is no such list."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            return frozenset()
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def bind_near(gpus: Sequence[str]) -> str:
    """Let this thread, and those it will start, run on the CPUs near these GPUs alone. Returns what was done, or why nothing was, as
    text."""
    cpus = near(find_topology(), gpus, allowed=os.sched_getaffinity(0))
    if isinstance(cpus, str):
        return f"runs on any CPU: {cpus}"
    os.sched_setaffinity(0, cpus)
    return f"runs on {len(cpus)} CPUs near its GPU, from {min(cpus)} to {max(cpus)}"


def near(topology: Topology | Absent, gpus: Sequence[str], *, allowed: set[int]) -> set[int] | str:
    """CPUs near these GPUs, of those `allowed`; or why there are none, as text. `gpus`: as CUDA_VISIBLE_DEVICES has them."""
    if isinstance(topology, Absent):
        return topology.reason
    if not gpus or not all(gpu.isdigit() for gpu in gpus):
        return "its GPU is not known by a number"
    found: set[int] = set()
    for gpu in gpus:
        if not (cpus := topology.cpus.get(f"GPU{gpu}")):
            return f"nvidia-smi topo names no CPU for GPU {gpu}"
        found |= cpus
    return found & allowed or "those near its GPU are not this process's to use"
