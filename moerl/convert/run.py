"""`moerl convert`: from the paths and options of the command line to a plan, and from the plan to files."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

from moerl import __version__
from moerl.config.problems import problem
from moerl.convert import hf_plan
from moerl.convert.entry import Entry
from moerl.convert.fp8 import ScaleFormat
from moerl.convert.hf_writing import WriteOptions, carried_files, hf_jobs, write_hf
from moerl.convert.nonfinite import NonFinite
from moerl.convert.progress import progress_bar
from moerl.convert.source import HFSource
from moerl.convert.writing import FileJob, check_disk, partial_of, target_problems
from moerl.types import ConvertError

Target = Literal["hf", "moerl"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    source: Path
    target: Path
    to: Target = "hf"
    dtype: hf_plan.Dtype = "keep"
    scales: ScaleFormat = "float32"
    files_from: Path | None = None
    """Tokenizer, generation settings and, for a checkpoint of a run, weights that were not trained; else the source."""
    options: WriteOptions = WriteOptions()

    @property
    def plan(self) -> dict[str, Any]:
        settings = {"to": self.to, "dtype": self.dtype, "scales": self.scales, "nonfinite": self.options.nonfinite}
        return {"moerl": __version__, "source": str(self.source.resolve()), **settings}


def conversion_of(
    source: Path, target: Path, *, files_from: Path | None, shard_gb: float, workers: int, to: str, dtype: str, scales: str, nonfinite: str
) -> Conversion:
    """Raises ConvertError with every option that has none of its values."""
    allowed = {"to": (to, Target), "dtype": (dtype, hf_plan.Dtype), "scales": (scales, ScaleFormat), "nonfinite": (nonfinite, NonFinite)}
    problems = [
        problem(f"--{name}", value, f"must be one of {', '.join(get_args(values))}", "nothing else is known", "one of them")
        for name, (value, values) in allowed.items()
        if value not in get_args(values)
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
        options=options,
    )


def convert(conversion: Conversion, *, dry_run: bool) -> str:
    """What was written, or would be. Raises ConvertError."""
    problems = list(target_problems(conversion.target))
    if problems:
        raise ConvertError(problems)
    return _hf_to_hf(conversion, dry_run=dry_run)


def _hf_to_hf(conversion: Conversion, *, dry_run: bool) -> str:
    source = HFSource.open(conversion.source)
    entries = hf_plan.converted(source, conversion.dtype, conversion.scales)
    written = {entry.name for entry in entries}
    high = [e.name.removesuffix(".weight") for e in entries if len(e.shape) == 2 and e.name + "_scale_inv" not in written]
    kept = [name for name in high if not name.endswith("_scale_inv")]
    config = hf_plan.config_for(source.config, conversion.dtype, conversion.scales, kept)
    jobs = hf_jobs(entries, conversion.options)
    if dry_run:
        return describe(conversion, jobs, entries)
    plan = conversion.plan | {"files": source.identity()}
    carried = conversion.files_from if conversion.files_from is not None else conversion.source
    with progress_bar(f"writing {conversion.target.name}", sum(job.num_bytes for job in jobs)) as on_bytes:
        write_hf(entries, conversion.target, config=config, carried_from=carried, plan=plan, options=conversion.options, on_bytes=on_bytes)
    return describe(conversion, jobs, entries)


def describe(conversion: Conversion, jobs: Sequence[FileJob], entries: Sequence[Entry]) -> str:
    total = sum(job.num_bytes for job in jobs)
    lines = [f"{conversion.target}: {len(entries)} tensors in {len(jobs)} files, {total / 1e9:.3f} GB ({total} bytes)"]
    carried = carried_files(conversion.files_from if conversion.files_from is not None else conversion.source)
    lines += [f"  {job.name}: {job.num_bytes / 1e9:.3f} GB" for job in jobs]
    lines.append(f"  and {', '.join(['config.json', *(file.name for file in carried)])}")
    return "\n".join(lines)


def check_room(conversion: Conversion, jobs: Sequence[FileJob]) -> None:
    """Raises ConvertError if the target's disk cannot hold `jobs`."""
    directory = next(path for path in (partial_of(conversion.target), *conversion.target.absolute().parents) if path.exists())
    check_disk(directory, sum(job.num_bytes for job in jobs))
