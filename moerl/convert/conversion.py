"""`moerl convert`: from the paths and options of the command line to a plan, and from the plan to files."""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, Literal, cast, get_args

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from moerl import __version__
from moerl.convert.carried import origin_of, origin_problems
from moerl.convert.hf import hf_plan
from moerl.convert.hf.hf_source import HFSource, states_of
from moerl.convert.hf.hf_writing import WriteOptions, complete_hf, hf_jobs
from moerl.convert.sharded.completeness import copied_problems, tensor_problems
from moerl.convert.sharded.hf_to_sharded import parts_of
from moerl.convert.sharded.megatron_bridge_target import bridge_problems, complete_bridge_folder, in_iteration
from moerl.convert.sharded.megatron_source import identity_of, megatron_folder, open_megatron
from moerl.convert.sharded.parameters import family_of
from moerl.convert.sharded.sharded_source import ShardedSource, complete_sharded, is_sharded, sharded_jobs
from moerl.convert.sharded.sharded_to_hf import entries_of, stored_dtype
from moerl.convert.tensors.count_nonfinite import NonFinite, report
from moerl.convert.tensors.entry import Entry
from moerl.convert.tensors.writing import SPARE_BYTES, FileJob, Finished, OnBytes, target_problems, write_files
from moerl.convert.upcycle import Upcycling, upcycled, upcycled_config, upcycling_problems
from moerl.models.families.parts.config_fields import num_mtp_layers
from moerl.models.fp8_blocks import ScaleFormat
from moerl.models.fp8_names import SCALE_SUFFIX
from moerl.train.checkpoint.checkpoint_dirs import MANIFEST
from moerl.types.errors import ConvertError, can_be, problem

Target = Literal["hf", "moerl", "moe", "megatron_bridge"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    source: Path
    target: Path
    to: Target = "hf"
    dtype: hf_plan.Dtype = "keep"
    scales: ScaleFormat = "float32"
    files_from: Path | None = None
    """Tokenizer, generation settings and, for a checkpoint of a run, weights that were not trained; else the source, or its run's model."""
    upcycling: Upcycling | None = None
    """With `to` moe."""
    options: WriteOptions = field(default_factory=WriteOptions)

    @property
    def plan(self) -> dict[str, Any]:
        settings = {"to": self.to, "dtype": self.dtype, "scales": self.scales, "nonfinite": self.options.nonfinite}
        upcycling = None if self.upcycling is None else asdict(self.upcycling)
        return {"moerl": __version__, "source": str(self.source.resolve()), "upcycling": upcycling, **settings}


def conversion_of(
    source: Path,
    target: Path,
    *,
    files_from: Path | None,
    shard_gb: float,
    workers: int,
    to: str,
    dtype: str,
    scales: str,
    nonfinite: str,
    experts: int | None,
    top_k: int | None,
    router_seed: int | None,
) -> Conversion:
    """Raises ConvertError with every option that has none of its values, is missing, or has no effect."""
    allowed = {"to": (to, Target), "dtype": (dtype, hf_plan.Dtype), "scales": (scales, ScaleFormat), "nonfinite": (nonfinite, NonFinite)}
    problems = [
        problem(f"--{name}", value, f"must be one of {', '.join(get_args(values))}", "nothing else is known", "one of them")
        for name, (value, values) in allowed.items()
        if value not in get_args(values)
    ]
    upcycling = None
    if to == "moe":
        problems += upcycling_problems(experts, top_k, dtype)
        if experts is not None and top_k is not None:
            upcycling = Upcycling(num_experts=experts, top_k=top_k, router_seed=0 if router_seed is None else router_seed)
    else:
        given = {"--experts": experts, "--top-k": top_k, "--router-seed": router_seed}
        problems += [
            problem(option, value, "has no effect", "only --to moe makes experts", f"--to moe, or no {option}")
            for option, value in given.items()
            if value is not None
        ]
    if problems:
        raise ConvertError(problems)
    options = WriteOptions(shard_bytes=int(shard_gb * 1e9), workers=workers, nonfinite=cast(NonFinite, nonfinite))
    return Conversion(
        source=source,
        target=target,
        to=cast(Target, to),
        dtype=cast(hf_plan.Dtype, dtype),
        scales=cast(ScaleFormat, scales),
        files_from=files_from,
        upcycling=upcycling,
        options=options,
    )


def convert(conversion: Conversion, *, dry_run: bool) -> str:
    """Text of what was written, or would be. Raises ConvertError."""
    problems = [*target_problems(conversion.target), *origin_problems(conversion.files_from)]
    if not (can_be(conversion.source) and conversion.source.is_dir()):
        problems.append(problem("SRC", str(conversion.source), "is no directory", "nothing to read", "its path"))
    if problems:
        raise ConvertError(problems)
    folder = megatron_folder(conversion.source)
    if folder is None and not is_sharded(conversion.source):
        write = {"hf": _hf_to_hf, "moerl": _hf_to_sharded, "moe": _hf_to_moe, "megatron_bridge": _hf_to_sharded}[conversion.to]
        return write(conversion, dry_run=dry_run)
    if conversion.to == "hf":
        return _sharded_to_hf(conversion, folder, dry_run=dry_run)
    if folder is not None or conversion.to != "moerl":
        reason = "what others trained is read for its weights, which a Hugging Face folder holds"
        if folder is None:
            reason = "experts are copied from" if conversion.to == "moe" else "what others read is made of"
            reason += " a Hugging Face folder, whose tensors are read in pieces"
        rule, fix = f"must be a Hugging Face folder with --to {conversion.to}", "moerl convert SRC FOLDER first, then FOLDER as SRC"
        raise ConvertError([problem("SRC", str(conversion.source), rule, reason, fix)])
    reason = "a checkpoint of a run loads into any layout and dtype as it is, with its optimizer's state"
    raise ConvertError([problem("--to", conversion.to, "has nothing to do", reason, "continue the run with another train.layout")])


def _hf_to_hf(conversion: Conversion, *, dry_run: bool) -> str:
    source = HFSource.open(conversion.source)
    entries = hf_plan.converted(source, conversion.dtype, conversion.scales)
    if problems := copied_problems(source):
        raise ConvertError(problems)
    return _write_hf(conversion, entries, _config(conversion, source.config, entries), source.identity(), dry_run=dry_run)


def _hf_to_moe(conversion: Conversion, *, dry_run: bool) -> str:
    assert conversion.upcycling is not None
    source = HFSource.open(conversion.source)
    config = upcycled_config(source.config, conversion.upcycling)
    if problems := tensor_problems(source, family_of(source.config)):
        raise ConvertError(problems)
    if conversion.dtype == "keep" and any(stored.dtype == torch.float8_e4m3fn for stored in source.tensors.values()):
        reason = "experts are copies of matrices, which mean nothing without their scales, and a router is not quantized"
        raise ConvertError([problem("--dtype", "keep", "must not be keep with --to moe for a source in FP8", reason, "--dtype bfloat16")])
    dense = hf_plan.converted(source, conversion.dtype, conversion.scales)
    entries = upcycled(dense, source.config, conversion.upcycling)
    return _write_hf(conversion, entries, _config(conversion, config, entries), source.identity(), dry_run=dry_run)


def _sharded_to_hf(conversion: Conversion, folder: Path | None, *, dry_run: bool) -> str:
    """`folder`: that of a checkpoint that others wrote; None: a run's."""
    source = ShardedSource.open(conversion.source) if folder is None else open_megatron(folder, conversion.files_from)
    if conversion.dtype == "fp8":
        reason = "blocks are quantized from a folder, whose tensors are read in rows"
        fix = "--dtype bfloat16 first, then moerl convert of that folder with --dtype fp8"
        raise ConvertError([problem("--dtype", "fp8", "needs a Hugging Face folder as SRC", reason, fix)])
    dtype = None if conversion.dtype == "keep" else getattr(torch, conversion.dtype)
    origin = origin_of(conversion.source, conversion.files_from).directory
    entries = entries_of(source, origin, dtype)
    # As it is stored, the dtype of config.json is the one the run trained in, which may differ from the model's.
    named = conversion.dtype if dtype is not None else str(stored_dtype(source)).removeprefix("torch.")
    config = hf_plan.config_for(source.config, cast(hf_plan.Dtype, named), conversion.scales, [])
    identity: dict[str, Any] = {"manifest": (conversion.source / MANIFEST).read_text()} if folder is None else dict(identity_of(folder))
    if origin is not None and num_mtp_layers(source.config):  # layers that were not trained come from there
        identity |= {"model": states_of(sorted(origin.glob("*.safetensors"))), "of": str(origin.resolve())}
    return _write_hf(conversion, entries, config, identity, dry_run=dry_run)


def _write_hf(
    conversion: Conversion, entries: list[Entry], config: Mapping[str, Any], identity: Mapping[str, Any], *, dry_run: bool
) -> str:
    """`config`: config.json of the folder."""
    jobs, origin = hf_jobs(entries, conversion.options), origin_of(conversion.source, conversion.files_from)
    nonfinite = conversion.options.nonfinite
    complete = partial(complete_hf, entries=entries, config=config, carried_from=origin.directory, nonfinite=nonfinite)
    return _write(conversion, jobs, len(entries), {"files": identity, "config": config}, complete, carried=origin.lines(), dry_run=dry_run)


def _hf_to_sharded(conversion: Conversion, *, dry_run: bool) -> str:
    source = HFSource.open(conversion.source)
    if conversion.dtype not in ("bfloat16", "float32"):
        reason = "Megatron trains in bfloat16 or float32, and reads either"
        rule = f"must be bfloat16 or float32 with --to {conversion.to}"
        raise ConvertError([problem("--dtype", conversion.dtype, rule, reason, "--dtype bfloat16")])
    is_bridge = conversion.to == "megatron_bridge"
    if is_bridge and (problems := list(bridge_problems(source.config))):
        raise ConvertError(problems)
    parts = parts_of(source, getattr(torch, conversion.dtype))
    options = conversion.options
    jobs = sharded_jobs(parts, shard_bytes=options.shard_bytes, nonfinite=options.nonfinite)
    jobs = in_iteration(jobs) if is_bridge else jobs
    config = hf_plan.config_for(source.config, conversion.dtype, conversion.scales, [])

    def complete(directory: Path, finished: list[Finished]) -> None:
        report(finished, options.nonfinite)
        write_rest = complete_bridge_folder if is_bridge else complete_sharded
        write_rest(directory, parts, finished, config, conversion.dtype)

    return _write(conversion, jobs, len(parts), {"files": source.identity()}, complete, carried=(), dry_run=dry_run)


def _write(
    conversion: Conversion, jobs: Sequence[FileJob], num_tensors: int, identity: Mapping[str, Any],
    complete: Callable[[Path, list[Finished]], None], *, carried: Sequence[str], dry_run: bool,
) -> str:  # fmt: skip
    """Text of what was written. `identity`: plain values by which a resumed run knows that its source is the same."""
    total = sum(job.num_bytes for job in jobs)
    verb = "would write" if dry_run else "wrote"
    lines = [f"{verb} {conversion.target}: {num_tensors} tensors in {len(jobs)} files, {total / 1e9:.3f} GB ({total} bytes)"]
    if dry_run:
        target = conversion.target.absolute()
        free = shutil.disk_usage(next(each for each in (target, *target.parents) if each.exists())).free
        lines += [f"  {job.name}: {job.num_bytes / 1e9:.3f} GB" for job in jobs]
        lines.append(f"needs {(total + SPARE_BYTES) / 1e9:.3f} GB of disk, {free / 1e9:.3f} GB are free")
    else:
        plan, workers = {**conversion.plan, **identity}, conversion.options.workers
        with progress_bar(f"writing {conversion.target.name}", total) as on_bytes:
            write_files(jobs, conversion.target, plan=plan, workers=workers, on_bytes=on_bytes, complete=complete)
    return "\n".join([*lines, *carried])


def _config(conversion: Conversion, config: Mapping[str, Any], entries: Sequence[Entry]) -> dict[str, Any]:
    """config.json after the conversion, with the modules of matrices, or stacks of them, without scales. A stack and its biases are
    parameters of the module of experts itself."""
    names = {entry.name for entry in entries}
    matrices = [entry.name for entry in entries if len(entry.shape) in (2, 3) and not entry.name.endswith(SCALE_SUFFIX)]
    modules = [name.removesuffix(".weight") if name.endswith(".weight") else name.rpartition(".")[0] for name in matrices]
    kept = list(dict.fromkeys(module for name, module in zip(matrices, modules, strict=True) if name + SCALE_SUFFIX not in names))
    return hf_plan.config_for(config, conversion.dtype, conversion.scales, kept)


@contextmanager
def progress_bar(title: str, total_bytes: int) -> Iterator[OnBytes]:
    """Bar with bytes per second and the time left, on a terminal; a line at the end everywhere.

    Yields what is called with the bytes done since the last call, from any thread.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    lock = Lock()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(title, total=total_bytes)

        def advance(num_bytes: int) -> None:
            with lock:
                progress.advance(task, num_bytes)

        yield advance
