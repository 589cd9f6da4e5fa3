"""Checks of a node's GPUs and of the links between them."""

from collections.abc import Iterator, Sequence

from moerl.doctor.checks.expected import Expectations
from moerl.doctor.checks.findings import Finding, absent, fail, ok, skipped, warn
from moerl.doctor.checks.node_facts import NodeFacts
from moerl.doctor.checks.versions import newest_cuda
from moerl.hardware.hardware_tools import Absent, present
from moerl.hardware.nvidia import NvidiaGPU, slowdowns

_CHECKS = ("GPUs", "driver", "MIG", "clocks", "ECC", "GPU memory", "NVLink", "NVSwitch fabric")
_SLOW_SHARE = 0.9
"""Share of the highest clock, under which application clocks are worth a word."""


_USED_GPU_MIB = 1024.0
"""A GPU without processes holds up to about 600 MiB of its driver."""


def gpu_checks(facts: NodeFacts, expected: Expectations) -> Iterator[Finding]:
    if gpus := present(facts.gpus):
        yield _count(facts, gpus, expected)
        yield from (check(facts, gpus) for check in (_driver, _mig, _clocks, _ecc, _memory, _nvlink, _fabric))
        return
    why = facts.gpus if isinstance(facts.gpus, Absent) else Absent(reason="nvidia-smi finds no GPU")
    if expected.gpus_per_node:
        fix = "# install the NVIDIA driver, or start the container with its GPUs (--nv, --gpus all)"
        yield fail("GPUs", f"0: {why.reason}", str(expected.gpus_per_node), fix)
    elif why.is_fault:
        yield absent("GPUs", why, "nvidia-smi; sudo dmesg | grep -i -e NVRM -e Xid")
    else:
        yield from (skipped(check, why.reason) for check in _CHECKS)


def _count(facts: NodeFacts, gpus: Sequence[NvidiaGPU], expected: Expectations) -> Finding:
    models = sorted({gpu.name for gpu in gpus})
    found = f"{len(gpus)} of {', '.join(models)}"
    wanted = "" if expected.gpus_per_node is None else str(expected.gpus_per_node)
    if expected.gpus_per_node is not None and len(gpus) < expected.gpus_per_node:
        return fail("GPUs", found, wanted, "sudo dmesg | grep -i -e NVRM -e Xid  # a GPU that left the bus comes back with a reboot")
    if len(models) > 1:
        return fail("GPUs", found, "one model", "# take GPUs of one kind: sbatch --gres=gpu:KIND:N or --constraint")
    if facts.torch_gpus != len(gpus):
        fix = "python -c 'import torch; torch.cuda.init()'; echo $CUDA_VISIBLE_DEVICES"
        return fail("GPUs", f"{found}, of which PyTorch can use {facts.torch_gpus}", str(len(gpus)), fix)
    return ok("GPUs", found, wanted)


def _driver(facts: NodeFacts, gpus: Sequence[NvidiaGPU]) -> Finding:
    driver, cuda = gpus[0].driver, facts.versions["CUDA"]
    if isinstance(cuda, Absent):
        return fail("driver", f"{driver}, and {cuda.reason}", "a PyTorch for CUDA", "make venv TORCH_INDEX=URL  # of a PyTorch for CUDA")
    newest = newest_cuda(driver)
    expected = f"runs CUDA {cuda}"
    major = int(cuda.split(".")[0])
    if newest is not None and newest < major:
        # libcuda of CUDA's forward-compatibility package, in place of the driver's own, runs a newer CUDA on data-centre GPUs.
        if facts.libcuda is not None and facts.libcuda >= major:
            found = f"{driver}, which runs CUDA {newest}, with a forward-compatibility libcuda for CUDA {facts.libcuda}"
            return warn("driver", found, expected, f"# a newer driver, or a PyTorch for CUDA {newest}, if CUDA cannot be initialised")
        return fail("driver", f"{driver}, which runs CUDA {newest}", expected, f"# a newer driver, or a PyTorch for CUDA {newest}")
    return ok("driver", driver, expected)


def _mig(facts: NodeFacts, gpus: Sequence[NvidiaGPU]) -> Finding:
    on = [gpu.index for gpu in gpus if gpu.mig == "Enabled"]
    if on:
        return fail("MIG", f"enabled on {_list(on)}", "disabled", f"sudo nvidia-smi -i {','.join(map(str, on))} -mig 0")
    return ok("MIG", "disabled", "disabled")


def _clocks(facts: NodeFacts, gpus: Sequence[NvidiaGPU]) -> Finding:
    if all(gpu.slowed_by is None for gpu in gpus):
        return skipped("clocks", "the driver does not say what slows a GPU")
    held = {gpu.index: reasons for gpu in gpus if gpu.slowed_by is not None and (reasons := list(slowdowns(gpu.slowed_by)))}
    if held:
        said = "; ".join(f"GPU {index}: {', '.join(reasons)}" for index, reasons in held.items())
        return fail("clocks", said, "nothing slows a GPU", "nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER  # cooling or power of the node")
    # Application clocks are a choice of the administrator; they hold a GPU below its highest clock while it works too.
    capped = [gpu.index for gpu in gpus if gpu.slowed_by is not None and gpu.slowed_by & 0x2 and _is_low(gpu)]
    if capped:
        return warn(
            "clocks",
            f"application clocks hold {_list(capped)} down",
            "the highest clock",
            "sudo nvidia-smi --reset-applications-clocks; sudo nvidia-smi --reset-gpu-clocks",
        )
    return ok("clocks", "nothing slows a GPU", "nothing slows a GPU")


def _is_low(gpu: NvidiaGPU) -> bool:
    return gpu.sm_mhz is not None and gpu.max_sm_mhz is not None and gpu.sm_mhz < _SLOW_SHARE * gpu.max_sm_mhz


def _ecc(facts: NodeFacts, gpus: Sequence[NvidiaGPU]) -> Finding:
    errors = {gpu.index: gpu.uncorrected for gpu in gpus if gpu.uncorrected}
    off = [gpu.index for gpu in gpus if gpu.ecc == "Disabled"]
    if errors:
        said = "; ".join(f"GPU {index}: {count} uncorrected" for index, count in errors.items())
        fix = f"sudo nvidia-smi --gpu-reset -i {','.join(map(str, errors))}  # and tell who runs the node"
        return fail("ECC", said, "0 uncorrected", fix)
    if failed := [gpu.index for gpu in gpus if gpu.remap_failed]:
        said = f"broken rows could not be replaced on {_list(failed)}"
        fix = "nvidia-smi -q -d ROW_REMAPPER  # the GPU must be exchanged: tell who runs the node"
        return fail("ECC", said, "every broken row replaced", fix)
    if pending := [gpu.index for gpu in gpus if gpu.remap_pending]:
        fix = f"sudo nvidia-smi --gpu-reset -i {','.join(map(str, pending))}  # with nothing running on them, or reboot the node"
        return fail("ECC", f"broken rows are replaced at the next reset of {_list(pending)}", "every broken row replaced", fix)
    if off:
        return warn("ECC", f"off on {_list(off)}", "on", f"sudo nvidia-smi -i {','.join(map(str, off))} --ecc-config=1  # then reboot")
    if all(gpu.uncorrected is None for gpu in gpus):
        return skipped("ECC", "these GPUs count no memory errors")
    return ok("ECC", "0 uncorrected", "0 uncorrected")


def _memory(facts: NodeFacts, gpus: Sequence[NvidiaGPU]) -> Finding:
    used = {gpu.index: gpu.used_mib for gpu in gpus if gpu.used_mib is not None and gpu.used_mib > _USED_GPU_MIB}
    expected = f"less than {_USED_GPU_MIB:g} MiB in use"
    if used:
        said = "; ".join(f"GPU {index}: {mib:,.0f} MiB" for index, mib in used.items())
        return warn("GPU memory", f"in use: {said}", expected, "nvidia-smi --query-compute-apps=gpu_uuid,pid,used_memory --format=csv")
    return ok("GPU memory", "free", expected)


def _nvlink(facts: NodeFacts, gpus: Sequence[NvidiaGPU]) -> Finding:
    if isinstance(facts.links, Absent):
        return absent("NVLink", facts.links, "nvidia-smi nvlink --status")
    links = {gpu.index: gpu.gb_per_second for gpu in facts.links}
    most = max((len(rates) for rates in links.values()), default=0)
    if most == 0 and (silent := [gpu.index for gpu in facts.links if gpu.all_inactive]):
        fix = "nvidia-smi -q | grep -A 8 Fabric; sudo systemctl restart nvidia-fabricmanager  # cards without bridges have none"
        return warn("NVLink", f"every link of {_list(silent)} is inactive", "links of a GPU are active", fix)
    if most == 0:
        return skipped("NVLink", "these GPUs have none")
    down = {index: most - sum(rate is not None for rate in links.get(index, ())) for index in range(len(gpus))}
    expected = f"{most} links of a GPU are active"
    if any(down.values()):
        said = "; ".join(f"GPU {index}: {count} of {most} inactive" for index, count in down.items() if count)
        return fail("NVLink", said, expected, "nvidia-smi nvlink --status; sudo systemctl restart nvidia-fabricmanager")
    slowest = min(rate for rates in links.values() for rate in rates if rate is not None)
    return ok("NVLink", f"{most} links of {slowest:g} GB/s each", expected)


def _fabric(facts: NodeFacts, gpus: Sequence[NvidiaGPU]) -> Finding:
    states = sorted({gpu.fabric for gpu in gpus})
    if states == [""]:
        return skipped("NVSwitch fabric", "there is none, or the driver does not say")
    if states != ["Completed Success"]:
        said = ", ".join(state if state else "none" for state in states)
        return fail("NVSwitch fabric", said, "Completed Success", "sudo systemctl restart nvidia-fabricmanager")
    return ok("NVSwitch fabric", states[0], "Completed Success")


def _list(indices: Sequence[int]) -> str:
    return "GPU " + ", ".join(map(str, indices))
