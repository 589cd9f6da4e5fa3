"""The rules across fields: what the schema cannot say. Each broken rule is a `Problem` with its reason and what to write."""

import importlib.util
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

from moerl.config.derive.hf_config import model_config
from moerl.config.derive.model_shape import ModelShape, shape_of_config
from moerl.config.derive.published import differences, published_config, published_names
from moerl.config.rules.bridge_rules import bridge_problems
from moerl.config.rules.checkpoint_files import checkpoint_problems
from moerl.config.rules.engine_rules import engine_problems, replay_problems
from moerl.config.rules.eval_rules import eval_problems, gym_problems
from moerl.config.rules.fp8_rules import fp8_problems
from moerl.config.rules.kubernetes_rules import kubernetes_problems
from moerl.config.rules.megatron_fields import megatron_problems, router_problems
from moerl.config.rules.memory_rules import memory_problems
from moerl.config.rules.network_rules import network_problems
from moerl.config.rules.parallel_rules import broken_layout
from moerl.config.rules.placement_rules import placement_problems
from moerl.config.rules.server_layout_rules import layout_problems
from moerl.config.rules.slurm_rules import slurm_problems, time_problems
from moerl.config.schema.algorithm_config import DAPOConfig
from moerl.config.schema.deadlines import Phase
from moerl.config.schema.model_config import ModelConfig, ScratchModel
from moerl.config.schema.run_config import RunConfig
from moerl.types.errors import Problem, can_be, problem


def validate(config: RunConfig) -> list[Problem]:
    """Every broken rule of a configuration that satisfies the schema."""
    return [found for rule in _RULES for found in rule(config)]


def _run(config: RunConfig) -> Iterator[Problem]:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", config.name):
        reason = "it is the name of the run's directory under output_dir"
        yield problem("name", config.name, "must be letters, digits, dots, dashes and underscores", reason, "name=my-run-1")
    if not can_be(config.run_dir):
        reason = "the run's directory is made there, and no file system takes that"
        yield problem("output_dir", config.output_dir, "must be a path, and name a part of one", reason, "shorter names")
    if config.group_size < 2:
        reason = f"{config.algorithm.name} compares the samples of one prompt with each other; one sample has advantage 0"
        yield problem("group_size", config.group_size, "must be at least 2", reason, "group_size=8")
    samples = config.groups_per_step * config.group_size
    if config.train.updates_per_step > samples:
        reason = f"a step has groups_per_step * group_size = {samples} samples, and every update needs one"
        yield problem("train.updates_per_step", config.train.updates_per_step, f"must be at most {samples}", reason, f"at most {samples}")


def _staleness(config: RunConfig) -> Iterator[Problem]:
    if config.max_staleness == 0:
        if config.rollout.partial:
            reason = "with max_staleness=0 no completion is unfinished when weights are pushed"
            yield problem("rollout.partial", True, "has no effect", reason, "max_staleness=1, or rollout.partial=false")
        return
    if config.deterministic:
        reason = "which weights sample a group then depends on timing"
        yield problem("deterministic", True, "needs max_staleness=0", reason, "max_staleness=0 or deterministic=false")
    if config.train.old_logprobs == "trainer":
        reason = "samples of older weights must be corrected by the probability they were drawn with, which the server recorded"
        yield problem("train.old_logprobs", "trainer", "must be rollout when max_staleness > 0", reason, "train.old_logprobs=rollout")


def _model(config: RunConfig) -> Iterator[Problem]:
    path, scratch = config.model.path, config.model.scratch
    yield from _published_problems(config.model)
    if (path is None) == (scratch is None) and not config.model.is_only_named:
        both = "both are given" if path is not None else "neither is given"
        fix = "model.path=DIRECTORY for a checkpoint, or model.scratch={} for a random tiny model"
        yield problem("model", both, "needs exactly one of path and scratch", "the weights come from one place", fix)
    if path is not None:
        yield from checkpoint_problems(Path(path))
    if scratch is not None:
        yield from _scratch_problems(scratch)


def _published_problems(model: ModelConfig) -> Iterator[Problem]:
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
    found = _hf_config(model) if model.path is not None else None
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


def _lengths(config: RunConfig) -> Iterator[Problem]:
    shape, context = _shape(config.model), config.model.max_context
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


def _micro_batches(config: RunConfig) -> Iterator[Problem]:
    budget, multiple = config.train.micro_batch_tokens, config.train.token_multiple
    longest = -(-config.model.max_context // multiple) * multiple
    if budget < longest:
        padded = "" if longest == config.model.max_context else f", padded to a multiple of {multiple} for the layout"
        reason = (
            f"a sequence is never split over micro-batches, and one may have model.max_context={config.model.max_context} tokens{padded}"
        )
        yield problem("train.micro_batch_tokens", budget, f"must be at least {longest}", reason, f"train.micro_batch_tokens={longest}")
    if budget % multiple:
        reason = "micro-batches are padded to it, for sequence and context parallelism and FP8, and must not grow past the budget"
        fix = f"train.micro_batch_tokens={-(-budget // multiple) * multiple}"
        yield problem("train.micro_batch_tokens", budget, f"must be a multiple of {multiple}", reason, fix)


def _layout(config: RunConfig) -> Iterator[Problem]:
    layout, context, shape = config.train.layout, config.model.max_context, _shape(config.model)
    yield from broken_layout(layout, shape)
    if shape is not None and shape.has_sinks and layout.cp > 1 and config.train.megatron.get("cp_comm_type") != "a2a":
        rule, fix = "needs train.megatron.cp_comm_type=a2a for attention with sinks", "+train.megatron.cp_comm_type=a2a, or cp=1"
        yield problem("train.layout.cp", layout.cp, rule, "Transformer Engine cuts windows and sinks over ranks in no other way", fix)
    if context < layout.sequence_multiple:
        rule = f"must be at most {max(context // 2, 1)} for model.max_context={context}"
        reason = "context parallelism cuts every sequence into 2 * cp chunks of at least one token; shorter sequences would be padding"
        yield problem("train.layout.cp", layout.cp, rule, reason, f"train.layout.cp={max(context // 2, 1)} or less")


def _optimizer(config: RunConfig) -> Iterator[Problem]:
    optimizer, path = config.train.optimizer, "train.optimizer"
    if optimizer.min_lr > optimizer.lr:
        rule, reason = f"must be at most lr={optimizer.lr}", "the learning rate decays from lr down to min_lr"
        yield problem(f"{path}.min_lr", optimizer.min_lr, rule, reason, f"{path}.min_lr={optimizer.lr / 10}")
    if optimizer.decay != "constant" and optimizer.warmup_steps >= config.num_steps:
        rule = f"must be less than num_steps={config.num_steps}"
        reason = f"{optimizer.decay} decay lasts from the warm-up's end to num_steps"
        yield problem(f"{path}.warmup_steps", optimizer.warmup_steps, rule, reason, f"{path}.decay=constant, or a shorter warm-up")
    for index, beta in enumerate(optimizer.betas):
        if not 0 <= beta < 1:
            rule, reason = "must be in [0, 1)", "it is the weight of the past in a running mean"
            yield problem(f"{path}.betas.{index}", beta, rule, reason, f"{path}.betas=[0.9,0.95]")


def _memory(config: RunConfig) -> Iterator[Problem]:
    yield from memory_problems(config.train, _shape(config.model))


def _overlong(config: RunConfig) -> Iterator[Problem]:
    algorithm, limit = config.algorithm, config.rollout.max_response_tokens
    if not isinstance(algorithm, DAPOConfig):
        return
    buffer, path = algorithm.overlong_buffer, "algorithm.overlong_buffer"
    if algorithm.overlong != "penalty":
        if buffer is not None:
            reason = f"it is the length of the penalty's ramp, and algorithm.overlong={algorithm.overlong}"
            yield problem(path, buffer, "has no effect", reason, "leave it out, or algorithm.overlong=penalty")
    elif buffer is None:
        reason = "the penalty grows over this many tokens before rollout.max_response_tokens"
        yield problem(path, None, "must be given for overlong=penalty", reason, f"{path}={max(1, limit // 5)}, or algorithm.overlong=mask")
    elif buffer >= limit:
        reason = f"the penalty starts at max_response_tokens - overlong_buffer = {limit - buffer} tokens"
        fix = f"{path}={max(1, limit // 5)}"
        yield problem(path, buffer, f"must be less than rollout.max_response_tokens={limit}", reason, fix)


def _gym_reward(config: RunConfig) -> Iterator[Problem]:
    yield from gym_problems(config.reward, config.data)


def _rollout(config: RunConfig) -> Iterator[Problem]:
    rollout = config.rollout
    last = rollout.port + rollout.num_servers - 1
    if rollout.port and last > 65535:
        reason = f"{rollout.num_servers} servers count up from it, and the last port would be {last}"
        fix = f"rollout.port={65536 - rollout.num_servers} or lower, or 0"
        yield problem("rollout.port", rollout.port, f"must be at most {65536 - rollout.num_servers}", reason, fix)
    if rollout.python is not None and not (can_be(Path(rollout.python)) and Path(rollout.python).is_file()):
        reason = "the servers are started with it"
        yield problem("rollout.python", rollout.python, "is not a file", reason, "the path of an interpreter, or leave it out for this one")


def _server_layout(config: RunConfig) -> Iterator[Problem]:
    yield from layout_problems(config, _shape(config.model))


def _engine(config: RunConfig) -> Iterator[Problem]:
    yield from engine_problems(config, _shape(config.model))


def _disk_delta(config: RunConfig) -> Iterator[Problem]:
    if config.weights.transport == "disk" and config.weights.disk_delta and config.rollout.engine not in ("hf", "fake"):
        rule = f"cannot be kept with rollout.engine={config.rollout.engine}"
        reason = "a delta is laid over what the model holds under the checkpoint's names, and this engine does not give that back"
        yield problem("weights.disk_delta", True, rule, reason, "weights.disk_delta=false")


def _observe(config: RunConfig) -> Iterator[Problem]:
    if config.observe.wandb != "off" and importlib.util.find_spec("wandb") is None:
        reason = "the package wandb is not installed here"
        yield problem("observe.wandb", config.observe.wandb, "needs wandb", reason, "pip install 'moerl[wandb]', or observe.wandb=off")


def _megatron(config: RunConfig) -> Iterator[Problem]:
    yield from megatron_problems(config.train.megatron)
    yield from router_problems(config.train.megatron, _shape(config.model))


def _router_replay(config: RunConfig) -> Iterator[Problem]:
    yield from replay_problems(config, _shape(config.model))


def _mtp(config: RunConfig) -> Iterator[Problem]:
    shape = _shape(config.model)
    if config.train.mtp_loss > 0 and shape is not None and shape.num_mtp_layers == 0:
        reason = "the model's config.json has no num_nextn_predict_layers: there is nothing to train"
        fix = "train.mtp_loss=0, or a checkpoint with layers of multi-token prediction"
        yield problem("train.mtp_loss", config.train.mtp_loss, "must be 0 for this model", reason, fix)


def _bridge(config: RunConfig) -> Iterator[Problem]:
    yield from bridge_problems(config.train, _hf_config(config.model))


def _fp8(config: RunConfig) -> Iterator[Problem]:
    yield from fp8_problems(config.train, _hf_config(config.model))


def _slurm(config: RunConfig) -> Iterator[Problem]:
    yield from slurm_problems(config.slurm, config.placement.nodes)
    waits = [phase for phase in get_args(Phase) if phase != "eval" or (config.eval is not None and config.eval.every > 0)]
    deadlines = {f"deadlines.{phase}_seconds": config.deadlines.of(phase) for phase in waits}
    yield from time_problems(config.slurm, {"slurm.start_seconds": config.slurm.start_seconds, **deadlines})


_RULES: tuple[Callable[[RunConfig], Iterator[Problem]], ...] = (
    _run,
    _staleness,
    _model,
    _lengths,
    _micro_batches,
    _layout,
    _optimizer,
    _memory,
    _overlong,
    _gym_reward,
    eval_problems,
    _rollout,
    _server_layout,
    _engine,
    _disk_delta,
    _observe,
    _megatron,
    _router_replay,
    _mtp,
    _bridge,
    _fp8,
    _slurm,
    kubernetes_problems,
    lambda config: network_problems(config.network),
    placement_problems,
)


def _shape(model: ModelConfig) -> ModelShape | None:
    hf = _hf_config(model)
    return None if hf is None else shape_of_config(hf)


def _hf_config(model: ModelConfig) -> dict[str, Any] | None:
    """The model's config.json; None where `_model` has already said why there is none."""
    is_there = model.published in published_names() if model.path is None else not any(checkpoint_problems(Path(model.path)))
    return model_config(model) if model.scratch is not None or is_there else None
