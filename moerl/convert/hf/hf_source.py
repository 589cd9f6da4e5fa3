"""A Hugging Face folder as a source of tensors: every fault of it found at once, from headers alone, before anything is read."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from moerl.config.rules.checkpoint_files import TWO_MODELS
from moerl.convert.tensors.entry import Entry
from moerl.convert.tensors.safetensors_file import StoredTensor, read_header, read_pieces
from moerl.models.hf_checkpoint import INDEX
from moerl.train.checkpoint.checkpoint_dirs import newest
from moerl.types.errors import ConvertError, Problem, can_be, problem
from moerl.types.json_text import is_file_name, read_object

T = TypeVar("T")
SINGLE = "model.safetensors"
_NO_SAFETENSORS = "cannot be read as safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class HFSource:
    directory: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    """In the order of files and of their headers."""

    @classmethod
    def open(cls, directory: Path) -> "HFSource":
        """Raises ConvertError with every absent, damaged or truncated file and every tensor that the index promises in vain."""
        problems: list[Problem] = []
        if not can_be(directory) or not directory.is_dir():
            raise ConvertError([problem("SRC", str(directory), "is no directory", f"looked at {directory.absolute()}", "its path")])
        checkpoint = newest(directory / "checkpoints") or newest(directory)
        if checkpoint is not None and not (directory / "config.json").exists():
            reason = "it is a run, or holds its checkpoints, of which one is converted, compared or read at a time"
            raise ConvertError([problem("SRC", str(directory), "must be one checkpoint", reason, f"its newest is {checkpoint}")])
        if not any((directory / name).exists() for name in ("config.json", INDEX)) and not any(directory.glob("*.safetensors")):
            raise ConvertError([_no_checkpoint(directory)])
        config = _read(read_object, directory / "config.json", problems)
        tensors = _all_tensors(directory, problems)
        if not tensors and not problems:
            reason = "its files hold no tensor"
            problems.append(problem("SRC", str(directory), "has no weights", reason, "fetch the checkpoint again"))
        if problems:
            raise ConvertError(problems)
        return cls(directory=directory, config=config, tensors=tensors)

    def entry(self, name: str) -> Entry:
        """The tensor as it is."""
        stored = self.tensors[name]
        return Entry(name=name, dtype=stored.dtype, shape=stored.shape, pieces=partial(read_pieces, stored))

    def identity(self) -> dict[str, Any]:
        """Changes when a file of weights or config.json does, as far as sizes and times show."""
        return states_of((*{stored.file: None for stored in self.tensors.values()}, self.directory / "config.json"))


def _no_checkpoint(directory: Path) -> Problem:
    below = [index.parent for depth in range(1, 4) for index in sorted(directory.glob("*/" * depth + ".metadata"))]
    reason = "it has neither config.json and safetensors, nor .metadata of Megatron's torch_dist; no other format is read"
    return problem("SRC", str(directory), "holds no checkpoint", reason, str(below[-1]) if below else "the folder that has them")


def states_of(files: Iterable[Path]) -> dict[str, Any]:
    """Size and time of the last change of each, by its name."""
    stats = {file.name: file.stat() for file in files}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}


def _all_tensors(directory: Path, problems: list[Problem]) -> dict[str, StoredTensor]:
    if not (directory / INDEX).exists():
        if not (directory / SINGLE).exists():
            reason = f"neither {INDEX} nor {SINGLE} is there"
            problems.append(problem("SRC", str(directory), "has no weights", reason, "a folder with the model's safetensors files"))
            return {}
        return _read(read_header, directory / SINGLE, problems, rule=_NO_SAFETENSORS)
    num_before = len(problems)
    weight_map = _read(read_object, directory / INDEX, problems).get("weight_map")
    if len(problems) > num_before:
        return {}
    if not (isinstance(weight_map, dict) and weight_map and all(is_file_name(file) for file in weight_map.values())):
        problems.append(
            problem("SRC", str(directory / INDEX), "needs a weight_map of names to files beside it", "it has none", "fetch it again")
        )
        return {}
    if (directory / SINGLE).exists() and SINGLE not in weight_map.values():
        problems.append(problem("SRC", str(directory), *TWO_MODELS))
        return {}
    tensors: dict[str, StoredTensor] = {}
    for file in sorted(set(weight_map.values())):
        promised = {name for name, holder in weight_map.items() if holder == file}
        if not (directory / file).is_file():
            reason = f"{INDEX} names it for {len(promised)} tensors, as {_some(promised)}"
            problems.append(problem("SRC", str(directory / file), "is absent", reason, "fetch this file"))
            continue
        held = _read(read_header, directory / file, problems, rule=_NO_SAFETENSORS)
        if held:
            tensors |= {name: stored for name, stored in held.items() if name in promised}
            problems += _broken_promises(directory / file, promised - held.keys(), held.keys() - weight_map.keys())
    return tensors


def _broken_promises(file: Path, missing: set[str], unlisted: set[str]) -> Iterator[Problem]:
    for name in sorted(missing):
        reason = f"{INDEX} says that this file holds it"
        yield problem("SRC", f"{file}: {name}", "is missing", reason, "fetch this file and the index again; they are of different versions")
    for name in sorted(unlisted):
        reason = f"{INDEX} does not list it, so that no other program would read it"
        yield problem("SRC", f"{file}: {name}", "is not in the index", reason, "fetch this file and the index again")


def _read(read: Callable[[Path], dict[str, T]], file: Path, problems: list[Problem], *, rule: str = "cannot be read") -> dict[str, T]:
    """Empty, and a problem more, where it cannot be read."""
    try:
        return read(file)
    except (OSError, ValueError) as error:
        problems.append(problem("SRC", str(file), rule, str(error), "fetch this file again"))
        return {}


def _some(names: set[str]) -> str:
    return ", ".join(sorted(names)[:2]) + (", ..." if len(names) > 2 else "")
