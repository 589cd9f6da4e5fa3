"""Checks of what a run asks of a node's RDMA adapters beyond NCCL's own use: rails, DeepEP's sends from the GPU, sums in switches."""

from collections.abc import Iterator

from moerl.config.derive.rdma import SHARP
from moerl.doctor.checks.expected import Expectations
from moerl.doctor.checks.findings import Finding, fail, ok, skipped, warn
from moerl.doctor.checks.node_facts import NodeFacts
from moerl.hardware.hardware_tools import Absent, present
from moerl.hardware.infiniband import handler_reason
from moerl.hardware.network_settings import fabric_ports
from moerl.hardware.rails import cards, rails_of


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
