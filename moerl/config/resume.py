"""Settings that may not change when a run is continued, and why."""

from collections.abc import Mapping
from functools import reduce
from operator import getitem
from typing import Any

from moerl.config.load import build, to_plain
from moerl.config.schema.run_config import RunConfig
from moerl.config.yaml_files import parse_yaml
from moerl.types.errors import NOT_SET, Problem, problem

FIXED: Mapping[str, str] = {
    "seed": "the data order and every sampling seed derive from it",
    "model": "the checkpoint holds weights of that model",
    "data": "the checkpoint holds a position in that data set's order",
    "group_size": "the checkpoint's steps were taken with it",
    "algorithm.advantage.kind": "the checkpoint's steps were taken with it",
    "algorithm.objective.kind": "the checkpoint's steps were taken with it",
    "critic.path": "the checkpoint holds weights of that model",
    "outcome_model.path": "the checkpoint holds weights of that model",
    "sft": "the warm start is over",
    "deterministic": "steps already taken cannot become reproducible",
    "train.mtp_loss": "the checkpoint holds the layers of multi-token prediction, and their optimizer state, only if they were trained",
}
"""Setting or section -> reason. Everything else may differ from step to step."""


def resume_differences(old_yaml: str | bytes, new: RunConfig, *, path: str = "config.yaml") -> list[Problem]:
    """The settings of `new` that differ from the run's saved config.yaml (`path`) and may not. ConfigError if that file is no
    configuration."""
    try:
        plain = parse_yaml(old_yaml)
        if not isinstance(plain, dict):
            raise ValueError(f"holds {type(plain).__name__}, no settings")
    except ValueError as error:
        fix = "another name= (or output_dir=) for a new run, or the file as the run wrote it"
        return [problem(path, NOT_SET, "must be the settings of the run", str(error), fix)]
    old, now = to_plain(build(plain)), to_plain(new)
    changed = [
        _changed(path, before, value, reason)
        for section, reason in FIXED.items()
        for path, before, value in _differences(section, *(reduce(getitem, section.split("."), plain) for plain in (old, now)))
        if path != "data.template_date" or before is not None  # one that was not written may be: the day of the run's first prompts
    ]
    return changed + _changed_optimizers(old, now)


def _changed_optimizers(old: Any, now: Any) -> list[Problem]:
    """Models that Muon updated and does not any more, or the other way round; those beside the policy have the policy's optimizer unless
    they say theirs."""
    reason, problems = "the optimizer's state in the checkpoint is that of Muon with these settings, or of Adam alone", []
    for section in ("train", "critic", "outcome_model"):
        said = [each["train"]["optimizer"] if each[section]["optimizer"] is None else each[section]["optimizer"] for each in (old, now)]
        before, value = (optimizer["muon"] for optimizer in said)
        own = [each[section]["optimizer"] for each in (old, now)]
        if before != value and None not in own:
            problems.append(_changed(f"{section}.optimizer.muon", before, value, reason))
        elif before != value and own[0] != own[1]:
            problems.append(_changed(f"{section}.optimizer", own[0], own[1], reason))
    return problems


def _changed(path: str, before: Any, value: Any, reason: str) -> Problem:
    rule = f"was {before!r} and cannot change when a run is continued"
    as_before = f"leave {path} out (~{path} if a file sets it)" if before is NOT_SET else f"{path}={_written(before)}"
    fix = f"{as_before}, or another name= (or output_dir=) for a new run"
    return problem(path, value, rule, reason, fix)


def _written(value: Any) -> str:
    """As on a command line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_written(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_written, value)) + "]"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _differences(path: str, before: Any, now: Any) -> list[tuple[str, Any, Any]]:
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        names = list(dict.fromkeys([*before, *now]))
        parts = [_differences(f"{path}.{name}", before.get(name, NOT_SET), now.get(name, NOT_SET)) for name in names]
        return [difference for part in parts for difference in part]
    return [(path, before, now)] if before != now else []


_NOT_THE_MODEL = {
    "_name_or_path", "architectures", "attention_dropout", "auto_map", "bos_token_id", "dtype", "eos_token_id", "id2label",
    "initializer_range", "label2id", "max_position_embeddings", "output_router_logits", "pad_token_id", "quantization_config",
    "router_aux_loss_coef", "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip
"""Entries of a config.json that neither shape a trained weight nor what is computed with it."""


def model_differences(trained: Mapping[str, Any], now: Mapping[str, Any], *, checkpoint: str, config_file: str) -> list[Problem]:
    """The entries of the run's config.json (`now`) that differ from those `checkpoint` was trained with."""
    trained, now = _published_names(trained), _published_names(now)
    return [
        problem(
            f"{config_file}: {name}",
            value,
            f"was {before!r} in the model that {checkpoint} was trained with",
            "the weights and the optimizer's state belong to that model",
            f"the config.json with {name}={before!r}, or another name= (or output_dir=) for a new run",
        )
        for name, before, value in (
            (name, trained.get(name, NOT_SET), now.get(name, NOT_SET)) for name in sorted({*trained, *now} - _NOT_THE_MODEL)
        )
        if before != value
    ]


def _published_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """transformers 5 saves some entries under names that published checkpoints do not have."""
    scaling = config.get("rope_scaling")
    rope = None if scaling else config.get("rope_parameters")
    named = {name: value for name, value in config.items() if name not in ("rope_parameters", "num_local_experts", "rope_scaling")}
    if "num_local_experts" in config:
        named["num_experts"] = config["num_local_experts"]
    if rope is not None:
        named.setdefault("rope_theta", rope.get("rope_theta"))
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    if scaling is not None and scaling.get("rope_type", scaling.get("type")) != "default":
        named["rope_scaling"] = scaling
    return named
