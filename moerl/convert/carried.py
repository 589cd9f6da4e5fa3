"""Where what belongs to a model beside its weights comes from: tokenizer, chat template, generation settings, licence."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml

from moerl.config.rules.checkpoint_files import TOKENIZERS
from moerl.convert.hf.hf_writing import carried_files
from moerl.convert.sharded.megatron_source import megatron_folder, model_folder
from moerl.convert.sharded.sharded_source import is_sharded
from moerl.types.errors import Problem, problem


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOrigin:
    """The folder of the model that a checkpoint was made of, where it is known and there; what is said of it otherwise."""

    directory: Path | None
    absence: str = ""

    def lines(self) -> list[str]:
        """Text for people: what is written besides weights, from where, and what the new folder lacks."""
        names = [str(file.relative_to(cast(Path, self.directory))) for file in carried_files(self.directory)]
        lines = [f"with {', '.join(['config.json', *names])}" + (f" ({self.directory})" if names else "")]
        lacking = [] if set(TOKENIZERS) & set(names) else ["a tokenizer"]
        lacking += [] if "generation_config.json" in names else ["generation_config.json"]
        if lacking and self.absence:
            lines.append(f"without {' and '.join(lacking)}: {self.absence}; --files-from MODEL takes them from the folder of a model")
        return lines


def origin_of(source: Path, files_from: Path | None) -> ModelOrigin:
    """`files_from` where it is given; else `source` itself or, of a run's checkpoint, the model that the run started from."""
    if files_from is not None:
        return ModelOrigin(directory=files_from, absence=f"{files_from} holds no such file")
    if (folder := megatron_folder(source)) is not None:
        return ModelOrigin(directory=model_folder(folder, None), absence=f"{folder.parent / 'huggingface'} holds no such file")
    if not is_sharded(source):
        return ModelOrigin(directory=source)
    # As it is named, for a run's checkpoints may be a link to another disk; else where it lies, for a checkpoint may have a link.
    runs = [place.parent.parent for place in (source.absolute(), source.resolve())]
    run_dir = next((each for each in runs if (each / "config.yaml").is_file()), runs[-1])
    settings = run_dir / "config.yaml"
    # A model made from scratch lies in the run's directory. A relative path is one of where the run was started.
    directory = Path(_path(settings) or run_dir / "model")
    if settings.is_file() and directory.is_dir():
        return ModelOrigin(directory=directory, absence=f"the run's model, {directory}, holds no such file")
    absent = f"the run's model, {directory}," if settings.is_file() else f"{settings}, which names its model,"
    return ModelOrigin(directory=None, absence=f"a run's checkpoint holds weights alone, and {absent} is not there")


def origin_problems(files_from: Path | None) -> Iterator[Problem]:
    if files_from is not None and not files_from.is_dir():
        fix = "the folder of the model that the run started from (model.path)"
        yield problem("--files-from", str(files_from), "must be a directory", f"looked in {files_from.absolute()}", fix)


def _path(settings: Path) -> str | None:
    """`model.path`; None where these are settings of another version, or damaged."""
    try:
        plain: Any = yaml.safe_load(settings.read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return None
    model = plain.get("model") if isinstance(plain, dict) else None
    path = model.get("path") if isinstance(model, dict) else None
    return path if isinstance(path, str) else None
