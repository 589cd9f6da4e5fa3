"""Checks of a node's host: RDMA adapters, also for what a run asks of them beyond NCCL's own use (rails, DeepEP's sends from the GPU, sums
in switches), limits, memory, disks, names."""

import ipaddress
from collections.abc import Iterator

from moerl.config.derive.rdma import SHARP
from moerl.doctor.checks.expected import Expectations
from moerl.doctor.checks.findings import Finding, absent, bad, fail, ok, skipped, warn
from moerl.doctor.checks.node_facts import UNLIMITED, Disk, NodeFacts
from moerl.hardware.hardware_tools import Absent, present
from moerl.hardware.infiniband import Port, handler_reason
from moerl.hardware.network_settings import fabric_ports
from moerl.hardware.rails import cards, rails_of

GIB = 2**30

_OPEN_FILES, _FEWEST_OPEN_FILES = 65536, 4096
"""ulimit -n. A rank holds sockets to every other rank, Ray's processes several for every worker."""
_SHM_BYTES, _SHM_SHARE = GIB, 0.3
"""/dev/shm: NCCL's and gloo's segments need about 1 GiB on a node; Ray's object store takes 0.3 of host memory there (ray_constants.py,
DEFAULT_OBJECT_STORE_MEMORY_PROPORTION) and goes to a disk if it does not fit."""
_DISK_BYTES, _LEAST_DISK_BYTES = 20 * GIB, GIB
_FREE_RAM_SHARE = 0.5
"""Below it something else is at home on the node."""


def host_checks(facts: NodeFacts) -> Iterator[Finding]:
    yield _infiniband(facts)
    yield _gpudirect(facts)
    yield _open_files(facts)
    yield _locked_memory(facts)
    yield _memory(facts)
    yield from (_shm(disk, facts) if disk.purpose == "/dev/shm" else _disk(disk) for disk in facts.disks)
    yield _own_name(facts)
    yield _ray(facts)


def _infiniband(facts: NodeFacts) -> Finding:
    """A port that is down may have no cable, on this node as on all others: only compared with them is it a failure (fabric_checks)."""
    ports = facts.ports
    if isinstance(ports, Absent):
        return absent("InfiniBand", ports, "ibv_devinfo")
    if not ports:
        return skipped("InfiniBand", "no RDMA adapter")
    fabric = fabric_ports(ports, facts.topology)
    down = [port.name for port in ports if port.link_layer == "InfiniBand" and not port.is_active]
    rates = sorted({_rate(port) for port in fabric})
    left_out = [
        f"{port.name} at {_rate(port)}" for port in ports if port.is_active and port.link_layer == "InfiniBand" and port not in fabric
    ]
    found = f"{len(fabric)} ports at {', '.join(rates)}" if fabric else "no active port"
    found += f"; left out: {', '.join(left_out)}" if left_out else ""
    others = [port for port in ports if port.is_active and port.link_layer != "InfiniBand"]
    if down:
        fix = f"ibstat {down[0].split(':')[0]}  # cable, switch port, or subnet manager"
        found = f"{found}; not active: {', '.join(down)}"
        return bad("InfiniBand", found, "every port active", fix, fails=not fabric and not others)
    if not fabric and others:
        kind = "over Ethernet only" if others[0].link_layer == "Ethernet" else "of neither InfiniBand nor Ethernet"
        return skipped("InfiniBand", f"RDMA {kind}: {', '.join(port.name for port in others)}")
    if not fabric:
        return skipped("InfiniBand", "no port is active")
    return ok("InfiniBand", found, "every port active")


def _rate(port: Port) -> str:
    return "unknown rate" if port.gbit is None else f"{port.gbit:g} Gb/s"


def _gpudirect(facts: NodeFacts) -> Finding:
    if not present(facts.gpus) or not fabric_ports(facts.ports, facts.topology):
        return skipped("GPUDirect RDMA", "needs GPUs and InfiniBand")
    if isinstance(facts.gpudirect, Absent):
        return fail("GPUDirect RDMA", facts.gpudirect.reason, "nvidia_peermem or dma-buf", "sudo modprobe nvidia-peermem")
    return ok("GPUDirect RDMA", facts.gpudirect, "nvidia_peermem or dma-buf")


def _open_files(facts: NodeFacts) -> Finding:
    """A process may raise the soft limit to the hard one, as the node processes of moerl's jobs do."""
    soft, hard = facts.open_files
    found, expected = f"{_limit(soft)} (hard {_limit(hard)})", f"at least {_OPEN_FILES}"
    if soft == UNLIMITED or soft >= _OPEN_FILES:
        return ok("ulimit -n", found, expected)
    if hard == UNLIMITED or hard >= _OPEN_FILES:
        fix = f"# ulimit -n {_OPEN_FILES} where the job is submitted, or in the shell that runs ray start"
        return warn("ulimit -n", found, expected, fix)
    fix = "# the node's hard limit: nofile in /etc/security/limits.conf, or LimitNOFILE of slurmd; Slurm takes that of sbatch's shell along"
    return bad("ulimit -n", found, expected, fix, fails=hard < _FEWEST_OPEN_FILES)


def _locked_memory(facts: NodeFacts) -> Finding:
    found = _limit(facts.locked_bytes)
    if facts.locked_bytes == UNLIMITED:
        return ok("ulimit -l", found, "unlimited")
    if facts.locks_any_memory:
        return ok("ulimit -l", f"{found}, which CAP_IPC_LOCK overrules", "unlimited")
    if not fabric_ports(facts.ports, facts.topology):
        return skipped("ulimit -l", f"{found}; only RDMA locks memory, and there is no InfiniBand")
    fix = "# memlock unlimited in /etc/security/limits.conf, LimitMEMLOCK=infinity of slurmd, or PropagateResourceLimitsExcept=MEMLOCK"
    return fail("ulimit -l", found, "unlimited, for RDMA buffers", fix)


def _limit(value: int) -> str:
    return "unlimited" if value == UNLIMITED else str(value)


def _memory(facts: NodeFacts) -> Finding:
    found = f"{facts.free_ram_bytes / GIB:,.0f} of {facts.ram_bytes / GIB:,.0f} GiB available"
    expected = f"at least {_FREE_RAM_SHARE:.0%} available"
    if facts.free_ram_bytes < _FREE_RAM_SHARE * facts.ram_bytes:
        return warn("host memory", found, expected, "ps -eo rss,pid,user,args --sort=-rss | head")
    return ok("host memory", found, expected)


def _shm(disk: Disk, facts: NodeFacts) -> Finding:
    used = disk.total_bytes - disk.free_bytes
    found = f"{disk.total_bytes / GIB:.1f} GiB, {used / GIB:.1f} in use"
    if disk.refusal:
        return fail("/dev/shm", disk.refusal, "writable", "sudo chmod 1777 /dev/shm")
    if disk.free_bytes < _SHM_BYTES:
        fix = "ls -lS /dev/shm  # or give the container more: --shm-size=64g, --ipc=host"
        return fail("/dev/shm", found, f"{_SHM_BYTES / GIB:g} GiB free", fix)
    needed = _SHM_SHARE * facts.ram_bytes
    if disk.free_bytes < needed:
        fix = f"sudo mount -o remount,size={needed / GIB:.0f}G /dev/shm"
        return warn("/dev/shm", found, f"{needed / GIB:.0f} GiB free for Ray's object store", fix)
    return ok("/dev/shm", found, f"{_SHM_BYTES / GIB:g} GiB free")


def _disk(disk: Disk) -> Finding:
    found, expected = f"{disk.free_bytes / GIB:,.0f} GiB free in {disk.path}", f"{_DISK_BYTES / GIB:g} GiB"
    if disk.refusal:
        return fail(disk.purpose, disk.refusal, "writable", f"ls -ld {disk.path}  # or another output_dir=")
    if disk.free_bytes >= _DISK_BYTES:
        return ok(disk.purpose, found, expected)
    fix = f"du -xh --max-depth=2 {disk.path} | sort -h | tail"
    return bad(disk.purpose, found, expected, fix, fails=disk.free_bytes < _LEAST_DISK_BYTES)


def _own_name(facts: NodeFacts) -> Finding:
    """Whether another node reaches it under that name is tried out by the head."""
    if isinstance(facts.own_addresses, Absent):
        fix = f"# a line for {facts.hostname} in /etc/hosts, or in DNS"
        return fail("own name", facts.own_addresses.reason, "resolves to an address", fix)
    return ok("own name", f"{facts.hostname} is {', '.join(facts.own_addresses)}", "resolves to an address")


def is_loopback(facts: NodeFacts) -> bool:
    """Every address of its own name is one that only the node itself reaches."""
    addresses = facts.own_addresses
    return not isinstance(addresses, Absent) and all(ipaddress.ip_address(a.partition("%")[0]).is_loopback for a in addresses)


def _ray(facts: NodeFacts) -> Finding:
    if facts.ray_processes:
        fix = "ps -fp " + ",".join(process.split()[1] for process in facts.ray_processes)
        return warn("other Ray", ", ".join(facts.ray_processes), "none, or one that shares the node on purpose", fix)
    return ok("other Ray", "none", "none")


def rdma_checks(facts: NodeFacts, expected: Expectations) -> Iterator[Finding]:
    yield _rails(facts)
    if expected.deepep:
        yield from _ibgda(facts, expected)
    if expected.sharp:
        yield _sharp(facts)


def _rails(facts: NodeFacts) -> Finding:
    rails = rails_of(facts.topology, facts.ports)
    if isinstance(rails, Absent):
        return skipped("cards of GPUs", rails.reason)
    names = cards(facts.ports, facts.topology)
    gpus = {name: [gpu for gpu, rail in rails.items() if rail == number] for number, name in enumerate(names)}
    found = ", ".join(f"{name}: {'GPU ' + ', '.join(mine) if mine else 'no GPU'}" for name, mine in gpus.items())
    if len({len(mine) for mine in gpus.values()}) == 1:
        return ok("cards of GPUs", found, "as many GPUs for every card")
    fix = "nvidia-smi topo -m  # by NCCL's rule; ibstat shows a card that is down, and its GPUs have another one's"
    return warn("cards of GPUs", found, "as many GPUs for every card", fix)


def _ibgda(facts: NodeFacts, expected: Expectations) -> Iterator[Finding]:
    """Faults that end NVSHMEM's transport at its start, or slow it down (NVSHMEM, ibgda.cpp)."""
    check, needed = "IBGDA for DeepEP", "an active port of a Mellanox adapter, and GPUDirect RDMA"
    active = {port.adapter for port in present(facts.ports) if port.is_active}
    if not active:
        reason = facts.ports.reason if isinstance(facts.ports, Absent) else "no RDMA port is active"
        yield fail(check, reason, needed, "# nodes with RDMA; or all_to_all=gather and moe_token_dispatcher_type=alltoall, which need none")
        return
    if isinstance(facts.gpudirect, Absent):
        yield fail(check, facts.gpudirect.reason, needed, "sudo modprobe nvidia-peermem")
        return
    given = expected.network.variables
    listed = str(given.get("NVSHMEM_HCA_LIST", ""))
    named = {each.partition(":")[0] for each in listed.split(",") if each and not listed.startswith("^")}
    if named and not named & active:
        yield fail(check, f"NVSHMEM_HCA_LIST={listed}; active are {', '.join(sorted(active))}", "adapters of the node", "leave it out")
        return
    if given.get("NVSHMEM_IBGDA_NIC_HANDLER") == "cpu" and not facts.doorbell.has_gdrdrv:
        found = "NVSHMEM_IBGDA_NIC_HANDLER=cpu, and no /dev/gdrdrv"
        yield fail(check, found, "GDRCopy's kernel module", "sudo modprobe gdrdrv  # or leave the variable out")
        return
    found = handler_reason(facts.doorbell)
    if facts.doorbell.maps_peers:
        yield ok(check, found, needed)
        return
    options = 'options nvidia NVreg_EnableStreamMemOPs=1 NVreg_RegistryDwords="PeerMappingOverride=1;"'
    fix = f"echo '{options}' | sudo tee /etc/modprobe.d/nvidia.conf && sudo update-initramfs -u && sudo reboot"
    yield warn(check, found, "PeerMappingOverride=1", fix)


def _sharp(facts: NodeFacts) -> Finding:
    needed, without = "a plugin with CollNet, InfiniBand, GPUDirect RDMA", f"# without {SHARP}=1"
    if not fabric_ports(facts.ports, facts.topology):
        return fail("SHARP", "no active InfiniBand port", needed, without)
    if isinstance(facts.sharp, Absent):
        fix = f"# HPC-X's nccl-rdma-sharp-plugins on LD_LIBRARY_PATH, or {without.removeprefix('# ')}"
        return fail("SHARP", facts.sharp.reason, needed, fix)
    if isinstance(facts.gpudirect, Absent):
        return fail("SHARP", facts.gpudirect.reason, needed, "sudo modprobe nvidia-peermem")
    return ok("SHARP", f"{facts.sharp}; the fabric's switches are not asked", needed)
