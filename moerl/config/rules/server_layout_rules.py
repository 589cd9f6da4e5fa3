"""The rules of rollout.layout: sizes that divide each other and the model, and what an engine lacks."""

from collections.abc import Iterator
from dataclasses import replace

from moerl.config.derive.model_shape import ModelShape
from moerl.config.rules.facts import Facts
from moerl.config.rules.fp8_rules import server_fp8_problems
from moerl.config.rules.parallel_rules import DEEPEP_RANKS, DEEPEP_REASON, divisors
from moerl.config.schema.rollout_config import RolloutConfig, ServerLayout
from moerl.config.schema.run_config import RunConfig
from moerl.types.errors import Problem, problem

_LATENCY_WIDTHS = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
"""Sizes of a token that DeepEP's kernels for latency are compiled for (SWITCH_HIDDEN of csrc/kernels/launch.cuh)."""
LOW_LATENCY_TOKENS = 1024
"""Most tokens that one rank may dispatch at once by DeepEP's kernels for latency (FINISHED_SUM_TAG of its internode_ll.cu)."""

_SGLANG_ONE_GROUP = ("mixtral", "olmoe")
"""model_types whose attention SGLang cuts over all GPUs of a server, whatever its groups (sglang/srt/models, 0.5.23)."""
_LATENCY_REASON = f"DeepEP's kernels for latency send at most {LOW_LATENCY_TOKENS} tokens of a data-parallel group at once"


def layout_problems(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    """Every rule rollout.layout breaks, for the model if it is known."""
    rollout, shape = config.rollout, facts.shape
    layout = rollout.layout
    if rollout.engine == "hf":
        if replace(layout, weights="dtype") != ServerLayout():
            reason = "a server of rollout.engine=hf is one process; of its layout only weights can be chosen"
            yield problem("rollout.layout", layout, "has no effect", reason, "rollout.engine=sglang, or leave it out")
        return
    sizes = [*_size_problems(rollout), *_all_to_all_problems(layout, config.rollout_dtype)]
    yield from sizes
    if shape is not None:
        yield from _model_problems(layout, shape)
    if not sizes:
        yield from server_fp8_problems(config, facts)
    if not sizes and rollout.engine == "vllm":
        yield from _vllm_problems(rollout)
    if rollout.engine == "sglang" and layout.mtp_tokens and shape is not None and shape.num_mtp_layers > 1:
        reason = f"SGLang drafts with one layer (deepseek_weight_loader.py), and the model has {shape.num_mtp_layers}"
        yield _problem("mtp_tokens", layout.mtp_tokens, "must be 0 for this model", reason, "mtp_tokens=0, or rollout.engine=vllm")
    if not sizes and rollout.engine == "sglang" and layout.all_to_all in ("deepep", "deepep_low_latency"):
        yield from _low_latency_problems(rollout)
    if rollout.engine == "sglang" and shape is not None and shape.model_type in _SGLANG_ONE_GROUP:
        yield from _one_group_problems(layout, shape.model_type)
    if facts.hf is not None and layout.all_to_all in ("deepep", "deepep_low_latency"):
        yield from _latency_width_problems(rollout, facts.hf["hidden_size"])
    if config.train.router_replay == "rollout":
        yield from _replay_problems(rollout)


def _one_group_problems(layout: ServerLayout, model_type: str) -> Iterator[Problem]:
    if layout.dp > 1:
        reason = f"SGLang's {model_type} has no data-parallel attention, and would add up tokens of different groups"
        yield _problem("dp", layout.dp, "must be 1 for this model and sglang", reason, "dp=1, or rollout.engine=vllm")
    if layout.tp > 1 and model_type == "olmoe":
        reason = "its norms of queries and keys are over all heads, and SGLang takes them over those of one GPU"
        yield _problem("gpus", layout.gpus, "must be 1 for this model and sglang", reason, "gpus=1, or rollout.engine=vllm")


def _size_problems(rollout: RolloutConfig) -> Iterator[Problem]:
    layout = rollout.layout
    larger, smaller = sorted((layout.gpus, layout.gpus_per_node), reverse=True)
    if larger % smaller:
        rule = f"must divide gpus_per_node={layout.gpus_per_node}, or be a multiple of it"
        whole = max(layout.gpus // layout.gpus_per_node, 1) * layout.gpus_per_node
        yield _problem("gpus", layout.gpus, rule, "servers fill nodes, or nodes fill servers", f"gpus={whole}")
    if layout.gpus % layout.dp:
        reason = "attention is tensor parallel over gpus / dp GPUs, a whole number"
        yield _problem("dp", layout.dp, f"must divide gpus={layout.gpus}", reason, divisors(layout.gpus))
    if layout.gpus % layout.ep:
        reason = "each expert is cut over gpus / ep GPUs, a whole number"
        yield _problem("ep", layout.ep, f"must divide gpus={layout.gpus}", reason, divisors(layout.gpus))
    if rollout.max_running < layout.dp:
        reason = f"each of rollout.layout.dp={layout.dp} data-parallel groups decodes requests of its own"
        fix = f"rollout.max_running={layout.dp}, or a smaller rollout.layout.dp"
        yield problem("rollout.max_running", rollout.max_running, f"must be at least {layout.dp}", reason, fix)


def _all_to_all_problems(layout: ServerLayout, dtype: str) -> Iterator[Problem]:
    if layout.uses_deepep and dtype != "bfloat16":
        rule = f"must be bfloat16 for rollout.layout.all_to_all={layout.all_to_all}"
        reason = "DeepEP sends tokens in bfloat16 or FP8, and no others reach the experts' kernels"
        yield problem("rollout.dtype", dtype, rule, reason, "rollout.dtype=bfloat16, or rollout.layout.all_to_all=gather")
    if layout.uses_deepep and not layout.ep == layout.gpus > 1:
        rule = f"needs ep=gpus={layout.gpus} of more than one GPU; ep={layout.ep}"
        reason = "DeepEP sends tokens to whole experts, over all GPUs of a server"
        yield _problem("all_to_all", layout.all_to_all, rule, reason, f"ep={layout.gpus}, or all_to_all=gather")
    elif layout.uses_deepep:
        yield from _deepep_rank_problems(layout)
    if layout.redundant_experts is not None and layout.ep == 1:
        reason = "there are no GPUs with other experts to which load could move"
        yield _problem("redundant_experts", layout.redundant_experts, "needs ep > 1", reason, "leave it out, or a larger ep")


def _deepep_rank_problems(layout: ServerLayout) -> Iterator[Problem]:
    """Numbers of GPUs that DeepEP refuses when a server starts (csrc/deep_ep.cpp, csrc/kernels/launch.cuh)."""
    rule = f"does not go with {layout.gpus} GPUs"
    if layout.all_to_all != "deepep_low_latency" and layout.gpus not in DEEPEP_RANKS:
        fix = "all_to_all=gather, or another gpus with more or fewer rollout.num_servers"
        yield _problem("all_to_all", layout.all_to_all, rule, DEEPEP_REASON, fix)
    elif layout.gpus > 8 and layout.gpus % 8:
        yield _problem(
            "all_to_all", layout.all_to_all, rule, "DeepEP counts GPUs by eight, above 8", "all_to_all=gather, or a multiple of 8"
        )


def _model_problems(layout: ServerLayout, shape: ModelShape) -> Iterator[Problem]:
    if layout.gpus % layout.dp == 0:  # otherwise tp is no size, and may be 0
        yield from _head_problems(layout, shape)
    if layout.mtp_tokens and not shape.num_mtp_layers:
        reason = "the model's config.json has no num_nextn_predict_layers: nothing could draft"
        yield _problem("mtp_tokens", layout.mtp_tokens, "must be 0 for this model", reason, "mtp_tokens=0")
    yield from _dense_problems(layout) if shape.num_experts is None else _expert_problems(layout, shape, shape.num_experts)


def _head_problems(layout: ServerLayout, shape: ModelShape) -> Iterator[Problem]:
    if shape.num_heads % layout.tp:
        reason = f"each GPU computes whole heads, and gpus={layout.gpus} over dp={layout.dp} groups leaves {layout.tp} for one"
        fix = f"a dp that leaves {divisors(shape.num_heads)}"
        yield _problem("dp", layout.dp, f"must leave a divisor of the model's {shape.num_heads} attention heads", reason, fix)
    heads = shape.num_kv_heads
    if not shape.has_latent_attention and heads % layout.tp and layout.tp % heads:
        reason = f"the {layout.tp} GPUs of a group share heads, or each head is on as many of them"
        fits = (layout.gpus // dp for dp in range(layout.dp + 1, layout.gpus + 1) if layout.gpus % dp == 0)
        tp = next(tp for tp in fits if shape.num_heads % tp == 0 and (heads % tp == 0 or tp % heads == 0))
        fix = f"dp={layout.gpus // tp}"
        yield _problem("dp", layout.dp, f"must leave a divisor or a multiple of the model's {heads} key/value heads", reason, fix)


def _dense_problems(layout: ServerLayout) -> Iterator[Problem]:
    if layout.ep > 1:
        yield _problem("ep", layout.ep, "must be 1 for a dense model", "there are no experts to spread", "ep=1")
    if layout.dp > 1:
        reason = "data-parallel attention pays off where experts are spread; without any, servers of their own do the same"
        fix = f"dp=1, gpus={layout.tp} and {layout.dp} times as many rollout.num_servers"
        yield _problem("dp", layout.dp, "must be 1 for a dense model", reason, fix)


def _expert_problems(layout: ServerLayout, shape: ModelShape, num_experts: int) -> Iterator[Problem]:
    redundant = 0 if layout.redundant_experts is None else layout.redundant_experts
    if (num_experts + redundant) % layout.ep:
        copies = f" and redundant_experts={redundant}" if redundant else ""
        fix = f"redundant_experts={-num_experts % layout.ep}" if layout.redundant_experts is not None else divisors(num_experts)
        reason = "each GPU holds as many whole experts as any other"
        yield _problem("ep", layout.ep, f"must divide the model's {num_experts} experts{copies} together", reason, fix)
    if layout.gpus % layout.ep:
        return  # expert_tp is no size, and may be 0
    if shape.expert_ffn_size % layout.expert_tp:
        reason = f"gpus={layout.gpus} over ep={layout.ep} cut every expert into {layout.expert_tp} parts"
        rule = f"must leave a divisor of the experts' inner size {shape.expert_ffn_size}"
        sizes = (ep for ep in range(1, layout.gpus + 1) if layout.gpus % ep == 0 and (num_experts + redundant) % ep == 0)
        fits = [f"ep={ep}" for ep in sizes if shape.expert_ffn_size % (layout.gpus // ep) == 0]
        yield _problem("ep", layout.ep, rule, reason, " or ".join(fits) or "a smaller gpus")


def _vllm_problems(rollout: RolloutConfig) -> Iterator[Problem]:
    layout = rollout.layout
    if layout.ep not in (1, layout.gpus):
        reason = "vLLM spreads experts over all GPUs of a server, or cuts each of them over all"
        yield _problem("ep", layout.ep, f"must be 1 or gpus={layout.gpus} for vllm", reason, f"ep={layout.gpus}")
    if layout.all_to_all == "deepep":
        reason = "vLLM runs one kind of DeepEP's kernels, for prompts and decoding alike"
        fix = "all_to_all=deepep_low_latency, which suits long answers, or deepep_normal"
        yield _problem("all_to_all", layout.all_to_all, "is not offered by vllm", reason, fix)
    if layout.uses_deepep and layout.dp == 1:
        reason = "in one data-parallel group every GPU has every token, and vLLM would use no all-to-all"
        yield _problem("all_to_all", layout.all_to_all, "needs dp > 1 for vllm", reason, "a larger dp, or all_to_all=gather")
    if layout.uses_deepep and layout.nodes > 1 and layout.gpus_per_node % 8:
        reason = "DeepEP takes every eight GPUs in a row for those of one node, and vLLM does not tell it of fabrics between nodes"
        rule, fix = f"needs nodes of 8 GPUs for vllm, not of {layout.gpus_per_node}", "all_to_all=gather, or rollout.engine=sglang"
        yield _problem("all_to_all", layout.all_to_all, rule, reason, fix)
    per_node = min(layout.gpus_per_node, layout.gpus)
    larger, smaller = sorted((layout.tp, per_node), reverse=True)
    if larger % smaller:
        rule = "must leave groups that fill nodes, or nodes that fill groups"
        reason = f"groups of {layout.tp} GPUs and nodes of {per_node} cut each other"
        yield _problem("dp", layout.dp, rule, reason, f"dp={layout.gpus // per_node}")
    if layout.all_to_all == "deepep_low_latency":
        yield from _low_latency_problems(rollout)


def _low_latency_problems(rollout: RolloutConfig) -> Iterator[Problem]:
    layout = rollout.layout
    most = LOW_LATENCY_TOKENS // (layout.mtp_tokens + 1) * layout.dp
    if rollout.max_running > most:
        rule = f"must be at most {most} for all_to_all={layout.all_to_all}, dp={layout.dp} and mtp_tokens={layout.mtp_tokens}"
        fix = f"rollout.max_running={most}, a larger rollout.layout.dp, or rollout.layout.all_to_all=deepep_normal"
        yield problem("rollout.max_running", rollout.max_running, rule, _LATENCY_REASON, fix)
    if layout.all_to_all == "deepep_low_latency" and rollout.prefill_chunk > LOW_LATENCY_TOKENS:
        rule = f"must be at most {LOW_LATENCY_TOKENS} for all_to_all=deepep_low_latency"
        other = "deepep or deepep_normal" if rollout.engine == "sglang" else "deepep_normal"
        reason, fix = f"prompts go through them too: {_LATENCY_REASON}", f"rollout.prefill_chunk=256, or rollout.layout.all_to_all={other}"
        yield problem("rollout.prefill_chunk", rollout.prefill_chunk, rule, reason, fix)


def _latency_width_problems(rollout: RolloutConfig, width: int) -> Iterator[Problem]:
    # vLLM pads tokens to the next of them (maybe_roundup_layer_hidden_size).
    if width in _LATENCY_WIDTHS or (rollout.engine == "vllm" and width < max(_LATENCY_WIDTHS)):
        return
    kind = rollout.layout.all_to_all
    reason = f"DeepEP's kernels for latency are compiled for {', '.join(map(str, _LATENCY_WIDTHS))}"
    rule = f"does not go with the model's hidden_size={width}"
    yield _problem("all_to_all", kind, rule, reason, "all_to_all=deepep_normal, or gather")


def _replay_problems(rollout: RolloutConfig) -> Iterator[Problem]:
    layout = rollout.layout
    least = -(-rollout.max_running // layout.dp) * (layout.mtp_tokens + 1)
    if layout.mtp_tokens and rollout.prefill_chunk < least:
        given = f"max_running={rollout.max_running} and mtp_tokens={layout.mtp_tokens}"
        rule = f"must be at least {least} for train.router_replay=rollout, {given}"
        reason = "SGLang's record of the experts has room for so many tokens of a pass (state_capturer/routed_experts.py)"
        yield problem(
            "rollout.prefill_chunk", rollout.prefill_chunk, rule, reason, f"rollout.prefill_chunk={least}, or rollout.layout.mtp_tokens=0"
        )
    if layout.redundant_experts is not None:
        reason = "whether the engine reports a copy's number or its expert's is not tested"
        rule = "cannot be kept with train.router_replay=rollout"
        yield _problem("redundant_experts", layout.redundant_experts, rule, reason, "leave it out, or train.router_replay=trainer")


def start_problems(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    """Settings that can be planned and rendered, and not be started yet."""
    layout = config.rollout.layout
    if not config.rollout.traits.has_environment:
        return
    if config.rollout.engine == "vllm" and config.placement.gpu is None:
        for field in ("dp", "ep"):
            if (value := getattr(layout, field)) > 1:
                reason = "vLLM's build for CPU runs no experts in data-parallel groups, nor spread ones; placement.gpu names the run's GPUs"
                fix = f"{field}=1, placement.gpu=NAME, or rollout.engine=sglang"
                yield _problem(field, value, "must be 1 for vllm on CPU", reason, fix)
    if layout.gpus > 1 and config.rollout.engine == "vllm" and facts.shape is not None and facts.shape.has_biased_experts:
        reason = "of experts' biases vLLM gives every process but the first zeros, which no digest of what was sent can show"
        fix = "gpus=1, and as many more rollout.num_servers"
        yield _problem("gpus", layout.gpus, "must be 1 for vllm and a model whose experts have biases", reason, fix)
    if layout.redundant_experts is not None:
        reason = "EPLB moves experts between GPUs while it runs, and a push brings each to the GPUs that had it at the start"
        yield _problem("redundant_experts", layout.redundant_experts, "cannot be kept by a push", reason, "redundant_experts=null")


def _problem(field: str, value: object, rule: str, reason: str, fix: str) -> Problem:
    return problem(f"rollout.layout.{field}", value, rule, reason, fix)
