"""Rules of the model: where its weights come from and what carries them (train.bridge), what a scratch model can be, how long sequences
are."""

import importlib.util
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from moerl.config.derive.model_configs import differences, published_config, published_names
from moerl.config.rules.facts import Facts
from moerl.config.schema.model_config import ModelConfig, ScratchModel
from moerl.config.schema.run_config import RunConfig
from moerl.models.bridge_packages import BRIDGES, BridgePackage
from moerl.models.find_family import is_native
from moerl.types.errors import Problem, problem


def model_problems(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    path, scratch = config.model.path, config.model.scratch
    yield from _published_problems(config.model, facts)
    if (path is None) == (scratch is None) and not config.model.is_only_named:
        both = "both are given" if path is not None else "neither is given"
        fix = "model.path=DIRECTORY for a checkpoint, or model.scratch={} for a random tiny model"
        yield problem("model", both, "needs exactly one of path and scratch", "the weights come from one place", fix)
    yield from facts.faults
    if scratch is not None:
        yield from _scratch_problems(scratch)


def _published_problems(model: ModelConfig, facts: Facts) -> Iterator[Problem]:
    if model.published is None:
        return
    names = published_names()
    if model.published not in names:
        reason = "configs/published holds the config.json of the models that recipes are shipped for"
        fix = "one of " + ", ".join(names) + ", or model.path alone for another model"
        yield problem("model.published", model.published, "is not there", reason, fix)
        return
    if model.scratch is not None:
        reason = "the weights come from one place"
        yield problem("model.published", model.published, "has no meaning with model.scratch", reason, "leave one of them out")
    found = facts.hf if model.path is not None else None
    differing = [] if found is None else differences(published_config(model.published), found)
    if differing:
        rule, reason = f"must be {model.published}", f"its config.json says {'; '.join(differing)}"
        fix = "the directory of that model, or model.published=null and a layout for this one"
        yield problem("model.path", model.path, rule, reason, fix)


def _scratch_problems(scratch: ScratchModel) -> Iterator[Problem]:
    if scratch.num_heads % scratch.num_kv_heads:
        reason = "every key/value head serves the same number of query heads"
        fix = f"model.scratch.num_kv_heads={scratch.num_heads}"
        yield problem("model.scratch.num_kv_heads", scratch.num_kv_heads, f"must divide num_heads={scratch.num_heads}", reason, fix)
    if scratch.head_dim % 2:
        reason = "rotary embeddings turn pairs of channels"
        yield problem("model.scratch.head_dim", scratch.head_dim, "must be even", reason, f"model.scratch.head_dim={scratch.head_dim + 1}")
    if scratch.family == "deepseek_v3":
        yield from _deepseek_scratch_problems(scratch)
    if scratch.family != "qwen3" and scratch.experts_per_token > scratch.num_experts:
        reason = "a token goes to different experts"
        fix = f"model.scratch.experts_per_token={scratch.num_experts} or fewer"
        rule = f"must be at most num_experts={scratch.num_experts}"
        yield problem("model.scratch.experts_per_token", scratch.experts_per_token, rule, reason, fix)


def _deepseek_scratch_problems(scratch: ScratchModel) -> Iterator[Problem]:
    if scratch.num_layers < 2:
        reason = "the first layer is dense, and a layer with experts must follow"
        yield problem(
            "model.scratch.num_layers", scratch.num_layers, "must be at least 2 for deepseek_v3", reason, "model.scratch.num_layers=2"
        )
    reasons = {
        "head_dim": (4, "half of its channels are rotary, and those turn in pairs"),
        "hidden_size": (4, "the latents are a half and a quarter as wide"),
        "num_experts": (2, "experts form groups of two"),
        "experts_per_token": (2, "a token takes two experts of every group it chooses"),
    }
    for name, (multiple, reason) in reasons.items():
        value = getattr(scratch, name)
        if value % multiple:
            rule, fix = f"must be a multiple of {multiple} for deepseek_v3", f"model.scratch.{name}={-(-value // multiple) * multiple}"
            yield problem(f"model.scratch.{name}", value, rule, reason, fix)


def length_problems(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    shape, context = facts.shape, config.model.max_context
    if shape is not None and context > shape.max_positions:
        reason = "the model's config.json says max_position_embeddings"
        fix = f"model.max_context={shape.max_positions}"
        yield problem("model.max_context", context, f"must be at most {shape.max_positions}", reason, fix)
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    if response >= context:
        reason = f"prompt and response share model.max_context={context} tokens"
        fix = f"model.max_context={prompt + response}"
        yield problem("rollout.max_response_tokens", response, f"must be less than {context}", reason, fix)
    elif prompt + response > context:
        reason = f"the longest prompt and rollout.max_response_tokens={response} must fit into model.max_context={context}"
        fix = f"data.max_prompt_tokens={context - response}, or model.max_context={prompt + response}"
        yield problem("data.max_prompt_tokens", prompt, f"must be at most {context - response}", reason, fix)


def mtp_problems(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    shape = facts.shape
    if config.train.mtp_loss > 0 and shape is not None and shape.num_mtp_layers == 0:
        reason = "the model's config.json has no num_nextn_predict_layers: there is nothing to train"
        fix = "train.mtp_loss=0, or a checkpoint with layers of multi-token prediction"
        yield problem("train.mtp_loss", config.train.mtp_loss, "must be 0 for this model", reason, fix)


def bridge_problems(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    """Every rule of train.bridge that is broken, for the model if it is known."""
    train, hf = config.train, facts.hf
    is_opened = hf is not None and not is_native(hf)
    if hf is not None and is_opened and train.bridge != "megatron_bridge":
        reason = f"moerl/models has no family for {hf['model_type']}; Megatron-Bridge declares one, which was proven on a tiny model"
        fix = "train.bridge=megatron_bridge"
        yield problem("train.bridge", train.bridge, "must be megatron_bridge for this model", reason, fix)
    if train.bridge == "native":
        return
    path, native, package = "train.bridge", "train.bridge=native", BRIDGES[train.bridge]
    if (fault := missing(package)) is not None:
        yield problem(path, train.bridge, f"needs {package.name} {package.version}", fault, f"{package.install}, or {native}")
    if hf is not None and not is_opened and hf["model_type"] not in package.families:
        reason = f"it is verified for {', '.join(package.families)} alone, and this model is {hf['model_type']}"
        yield problem(path, train.bridge, "must be native for this model", reason, native)
    if train.mtp_loss > 0:
        yield problem(path, train.bridge, "must be native while train.mtp_loss > 0", package.mtp_fault, f"{native}, or train.mtp_loss=0")
    if train.bridge == "mbridge" and hf is not None and hf.get("quantization_config") is not None:
        reason = "mbridge reads the files by itself, and its FP8 is not held against moerl's"
        fix = f"{native}, or moerl convert SRC DST --dtype bfloat16 and DST as model.path"
        yield problem(path, train.bridge, "must be native for weights in FP8 (quantization_config)", reason, fix)
    layout = train.layout
    if train.bridge == "mbridge" and layout.ep == 1 and layout.etp != layout.tp and hf is not None and _has_experts(hf):
        reason = "without expert parallelism mbridge gathers experts over tensor parallelism, as if they were split there"
        fix = f"train.layout.etp={layout.tp}, train.layout.ep=2 or more, or {native}"
        yield problem(path, train.bridge, "needs train.layout.etp=train.layout.tp when ep=1", reason, fix)


def missing(package: BridgePackage) -> str | None:
    """Why it cannot be used here."""
    try:
        found = version(package.name)
    except PackageNotFoundError:
        return f"the package {package.name} is not installed here"
    absent = [module for module in package.modules if importlib.util.find_spec(module) is None]
    if absent:
        return f"the module {absent[0]}, which {package.name} needs, cannot be imported here"
    return None if found == package.version else f"version {found} is installed here, which moerl's patches were not written for"


def _has_experts(hf: Mapping[str, Any]) -> bool:
    return any(hf.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
