"""Is a directory a Hugging Face checkpoint moerl can train: config.json of a known family, a tokenizer, every weight file."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moerl.config.derive.model_shape import shape_of_config
from moerl.models.find_family import explain_unknown, find_family, has_family
from moerl.types.errors import Problem, can_be
from moerl.types.json_text import is_file_name, read_object

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
_OF_QUANTIZERS = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""Files in which NVIDIA's Model Optimizer, AutoGPTQ and AutoAWQ say how weights are quantized, where config.json says nothing of it."""
TWO_MODELS = (
    "must not have model.safetensors beside an index of other files",
    "transformers would read model.safetensors, others what model.safetensors.index.json names; save_pretrained over a model of several "
    "files leaves its index",
    "remove the index, or model.safetensors, whichever is older",
)
"""Rule, reason and fix of a folder with two sets of weights."""


_RUNS = ("manifest.json", "state.json")
"""Files of a run's own checkpoint."""
_MEGATRONS = (".metadata", "latest_checkpointed_iteration.txt", "model/dist_ckpt/.metadata", "dist_ckpt/.metadata")
"""Files by which moerl convert knows what Megatron-LM, slime, Megatron-Bridge, NeMo-RL or verl saved."""


def conversion_of(path: Path, then: str) -> str | None:
    """Text on how a Hugging Face folder is made of the sharded checkpoint that lies there; None where none does."""
    if (path / "config.json").exists():
        return None
    if any(path.glob(f"checkpoints/step-*/{_RUNS[0]}")):
        return f"moerl convert {path / 'checkpoints' / 'step-N'} FOLDER, then {then}"
    if all((path / name).is_file() for name in _RUNS):
        return f"moerl convert {path} FOLDER, then {then}"
    if any((path / name).is_file() for name in _MEGATRONS):
        return f"moerl convert {path} FOLDER --files-from MODEL (the folder of the model that was trained), then {then}"
    return None


def quantizer_file(path: Path) -> Path | None:
    """The one that is in the folder."""
    return next((path / name for name in _OF_QUANTIZERS if (path / name).is_file()), None)


def checkpoint_problems(path: Path) -> Iterator[Problem]:
    if not can_be(path) or not path.is_dir():
        fix = "write the absolute path of the directory" if not path.is_absolute() else "download the model there, or correct the path"
        yield _problem(path, "is not a directory", f"nothing is read from the network; looked in {path.absolute()}", fix)
        return
    if (conversion := conversion_of(path, "model.path=FOLDER")) is not None:
        yield _problem(path, "must be a Hugging Face folder", "it holds a sharded checkpoint, of a run or of Megatron", conversion)
        return
    yield from _config_problems(path)
    if not any((path / name).is_file() for name in TOKENIZERS):
        reason = f"none of {', '.join(TOKENIZERS)} is there"
        yield _problem(path, "has no tokenizer", reason, "copy the tokenizer files of the model there")
    yield from _tokenizer_problems(path)
    yield from _weight_problems(path)


def _tokenizer_problems(path: Path) -> Iterator[Problem]:
    file = path / "tokenizer_config.json"
    settings = _read_json(file) if file.is_file() else {}
    if isinstance(settings, str):
        yield _problem(path, "needs a readable tokenizer_config.json", settings, "copy it again")
    elif "auto_map" in settings and not (path / "tokenizer.json").is_file():
        reason = "tokenizer_config.json names code of the folder (auto_map), and moerl runs none of a model's"
        yield _problem(path, "must have a tokenizer that is data", reason, "a tokenizer.json of it, as transformers saves one")


def _config_problems(path: Path) -> Iterator[Problem]:
    config = _read_json(path / "config.json")
    if isinstance(config, str):
        yield _problem(path, "needs a readable config.json", config, "copy the model's config.json there")
    elif not has_family(config):
        yield _problem(path, *explain_unknown(config))
    else:
        try:
            broken = list(find_family(config).broken_rules(config))
            yield from (_problem(path, rule, reason, fix) for rule, reason, fix in broken)
            if not broken:
                shape_of_config(config)
                _ = config["vocab_size"]
                find_family(config).rotary(config)
            if config.get("quantization_config") is None and (file := quantizer_file(path)) is not None:
                reason = "it is of a quantizer whose weights have another form, which moerl does not read"
                yield _problem(path, f"must not be quantized ({file.name})", reason, "the unquantized checkpoint")
        except KeyError as missing:
            reason = "a model of this type cannot be described without"
            yield _problem(path, f"needs {missing} in config.json", reason, "copy the model's config.json again")


def _weight_problems(path: Path) -> Iterator[Problem]:
    index_file = path / "model.safetensors.index.json"
    if not index_file.is_file():
        if not (path / "model.safetensors").is_file():
            reason = "neither model.safetensors nor model.safetensors.index.json is there"
            yield _problem(path, "has no weights", reason, "save the model with safetensors (transformers: save_pretrained)")
        return
    index = _read_json(index_file)
    if isinstance(index, str):
        yield _problem(path, "needs a readable model.safetensors.index.json", index, "copy it again")
        return
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(is_file_name(name) for name in weight_map.values()):
        reason = "its weight_map names a file for each tensor, beside it"
        yield _problem(path, "needs a weight_map in model.safetensors.index.json", reason, "copy it again")
        return
    if (path / "model.safetensors").is_file() and "model.safetensors" not in weight_map.values():
        yield _problem(path, *TWO_MODELS)
        return
    absent = sorted({name for name in weight_map.values() if not (path / name).is_file()})
    if absent:
        listed = ", ".join(absent[:3]) + (", ..." if len(absent) > 3 else "")
        reason = f"model.safetensors.index.json names {len(absent)} absent files: {listed}"
        yield _problem(path, "lacks weight files", reason, "copy the missing files; an interrupted download leaves such a directory")


def _read_json(file: Path) -> dict[str, Any] | str:
    """The object in `file`, or why there is none."""
    try:
        return read_object(file)
    except (OSError, ValueError) as error:
        return f"{file.name}: {error}"


def _problem(path: Path, rule: str, reason: str, fix: str) -> Problem:
    return Problem(path="model.path", value=str(path), rule=rule, reason=reason, fix=fix)
