"""Rules of `train.layout`: sizes that divide each other and the model, and how layers are cut into stages and chunks.

Of the cut, Megatron's: megatron/core/transformer/transformer_block.py, get_num_layers_to_build.
"""

from collections.abc import Iterator
from dataclasses import replace

from moerl.config.derive.model_shape import ModelShape
from moerl.config.derive.pipeline import chunk_layers, stage_layers
from moerl.config.rules.facts import Facts
from moerl.config.schema.layout import Layout
from moerl.config.schema.run_config import RunConfig
from moerl.types.errors import Problem, problem

_DEEPEP_NODES = (2, 3, 4, 6, 8, 12, 16, 18, 20)
"""Nodes of 8 that DeepEP's kernels for throughput are compiled for (SWITCH_RDMA_RANKS of csrc/kernels/launch.cuh; get_dispatch_config of
deep_ep/buffer.py has the same)."""
DEEPEP_RANKS = (2, 4, 8, *(8 * nodes for nodes in _DEEPEP_NODES))
"""Ranks that they can send tokens among."""
DEEPEP_REASON = f"DeepEP has kernels for 2, 4 or 8 ranks of a node, and for {', '.join(map(str, _DEEPEP_NODES[:-1]))} or 20 nodes of 8"


def train_layout_problems(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    layout, context, shape = config.train.layout, config.model.max_context, facts.shape
    yield from broken_layout(layout, shape)
    if shape is not None and shape.has_sinks and layout.cp > 1 and config.train.megatron.get("cp_comm_type") != "a2a":
        rule, fix = "needs train.megatron.cp_comm_type=a2a for attention with sinks", "+train.megatron.cp_comm_type=a2a, or cp=1"
        yield problem("train.layout.cp", layout.cp, rule, "Transformer Engine cuts windows and sinks over ranks in no other way", fix)
    if shape is not None and layout.cp > 1 and config.train.megatron.get("cp_comm_type") == "a2a":
        yield from _exchanged_head_problems(layout, shape)
    if shape is not None and shape.has_index and layout.cp > 1 and config.train.megatron.get("cp_comm_type") != "all_gather":
        rule, fix = "needs train.megatron.cp_comm_type=all_gather for sparse attention", "+train.megatron.cp_comm_type=all_gather, or cp=1"
        yield problem("train.layout.cp", layout.cp, rule, "Megatron's sparse attention gathers all keys before it chooses", fix)
    if context < layout.sequence_multiple:
        rule = f"must be at most {max(context // 2, 1)} for model.max_context={context}"
        reason = "context parallelism cuts every sequence into 2 * cp chunks of at least one token; shorter sequences would be padding"
        yield problem("train.layout.cp", layout.cp, rule, reason, f"train.layout.cp={max(context // 2, 1)} or less")


def _exchanged_head_problems(layout: Layout, shape: ModelShape) -> Iterator[Problem]:
    """Faults of heads that context-parallel ranks exchange for tokens (Transformer Engine, context_parallel.py)."""
    for count, what in ((shape.num_heads, "attention heads"), (shape.num_kv_heads, "key/value heads")):
        if count % layout.tp == 0 and count // layout.tp % layout.cp:
            rule = f"must divide the {count // layout.tp} {what} of a tensor-parallel rank for cp_comm_type=a2a"
            reason = "ranks exchange tokens for whole heads (Transformer Engine, context_parallel.py)"
            yield _problem("cp", layout.cp, rule, reason, f"{divisors(count // layout.tp)}, or a smaller tp")
            return


def broken_layout(layout: Layout, shape: ModelShape | None) -> Iterator[Problem]:
    """Every rule that `layout` breaks, for a model of `shape` if it is known."""
    yield from _size_problems(layout)
    if shape is not None:
        yield from _model_problems(layout, shape)


def _size_problems(layout: Layout) -> Iterator[Problem]:
    for product, size, reason in (
        ("tp * pp * cp", layout.tp * layout.pp * layout.cp, "what remains after tp, pp and cp is data parallel, a whole number"),
        ("ep * etp * pp", layout.ep * layout.etp * layout.pp, "what remains after ep, etp and pp replicates the experts, a whole number"),
    ):
        if layout.ranks % size:
            yield _problem("ranks", layout.ranks, f"must be a multiple of {product} = {size}", reason, _multiples(size, layout.ranks))
    yield from contradictions(layout)


def _model_problems(layout: Layout, shape: ModelShape) -> Iterator[Problem]:
    heads, kv_heads = shape.num_heads, shape.num_kv_heads
    yield from _uneven(layout, "tp", heads, f"the model's {heads} attention heads", "each rank owns whole heads")
    yield from _uneven(layout, "tp", kv_heads, f"the model's {kv_heads} key/value heads", "moerl does not replicate key/value heads")
    for size, of in ((shape.dense_ffn_size, "dense MLPs"), (shape.shared_ffn_size, "shared experts")):
        yield from _uneven(layout, "tp", size, f"the inner size {size} of the model's {of}", "their columns are split evenly")
    if shape.delta_heads is not None:
        yield from _delta_problems(layout, shape.delta_heads)
    yield from pipeline_problems(layout, shape.num_layers)
    if shape.num_experts is None:
        for name in ("ep", "etp"):
            if (size := getattr(layout, name)) > 1:
                yield _problem(name, size, "must be 1 for a dense model", "there are no experts to distribute", f"{name}=1")
        return
    experts, columns = shape.num_experts, shape.expert_ffn_size
    yield from _uneven(layout, "ep", experts, f"the model's {experts} experts", "each rank owns whole experts")
    yield from _uneven(layout, "etp", columns, f"the expert's inner size {columns}", "its columns are split evenly")
    if shape.has_biased_experts and layout.etp > 1:
        reason = "each rank that holds a part of an expert would add its bias (Megatron-Core, TransformerConfig.__post_init__)"
        yield _problem("etp", layout.etp, "must be 1 for experts with biases", reason, "etp=1 and a larger ep")


def _delta_problems(layout: Layout, heads: int) -> Iterator[Problem]:
    if layout.tp > 1:
        reason = "each rank would hold parts of queries, keys and values that lie apart in the checkpoint's tensors, and pushes send ranges"
        yield _problem("tp", layout.tp, "must be 1 for gated delta nets", reason, "tp=1; ep, pp and cp cut the model")
    yield from _uneven(layout, "cp", heads, f"the {heads} key heads of gated delta nets", "context parallelism gives each rank whole heads")


def _uneven(layout: Layout, name: str, count: int, what: str, reason: str) -> Iterator[Problem]:
    """Fault of a parallel size that does not divide `what` it shares out, `count` of them."""
    if count % getattr(layout, name):
        yield _problem(name, getattr(layout, name), f"must divide {what}", reason, divisors(count))


def pipeline_problems(layout: Layout, num_layers: int) -> Iterator[Problem]:
    """Every rule the cut of a model of `num_layers` breaks, if the layout does not contradict itself."""
    if any(contradictions(layout)):
        return
    if layout.first_stage_layers is None and layout.last_stage_layers is None:
        yield from _even_problems(layout, num_layers)
    else:
        yield from _uneven_problems(layout, num_layers)


def contradictions(layout: Layout) -> Iterator[Problem]:
    """Faults of the cut, whatever the model."""
    if layout.vpp > 1 and layout.pp == 1:
        yield _problem(
            "vpp", layout.vpp, "needs pp > 1", "chunks are interleaved over pipeline stages, and there is one stage", "vpp=1, or pp >= 2"
        )
    sizes = {name: getattr(layout, name) for name in ("first_stage_layers", "last_stage_layers")}
    counted = {name: getattr(layout, name) for name in ("embedding_as_layer", "loss_as_layer")}
    chosen = {name: value for name, value in (sizes | counted).items() if value not in (None, False)}
    if layout.pp == 1:
        for name, value in chosen.items():
            yield _problem(name, value, "needs pp > 1", "it moves layers between pipeline stages, and there is one stage", "leave it out")
    elif any(sizes[name] is not None for name in sizes) and any(counted.values()):
        name = next(name for name, value in counted.items() if value)
        reason = "Megatron takes either the sizes of the outer stages or the extra layers that stand for embedding and loss"
        yield _problem(name, True, "cannot be combined with first_stage_layers or last_stage_layers", reason, f"{name}=false")


def _even_problems(layout: Layout, num_layers: int) -> Iterator[Problem]:
    counted = num_layers + layout.embedding_as_layer + layout.loss_as_layer
    if counted % (layout.pp * layout.vpp):
        extra = "" if counted == num_layers else f" and {counted - num_layers} for embedding and loss"
        rule = f"pp * vpp = {layout.pp * layout.vpp} must divide the model's {num_layers} layers{extra}"
        yield _problem("pp", layout.pp, rule, "every chunk holds the same number of layers", _even_fix(layout, num_layers))
    elif min(min(stage) for stage in chunk_layers(layout, num_layers)) < 1:
        rule = f"{counted // (layout.pp * layout.vpp)} layer per chunk leaves a chunk without one of the model's"
        reason = "the embedding or the loss takes the place of its only layer"
        yield _problem("vpp", layout.vpp, rule, reason, "a smaller vpp, or embedding_as_layer=false and loss_as_layer=false")


def _uneven_problems(layout: Layout, num_layers: int) -> Iterator[Problem]:
    given = {n: getattr(layout, n) for n in ("first_stage_layers", "last_stage_layers") if getattr(layout, n) is not None}
    rest, stages = num_layers - sum(given.values()), layout.pp - len(given)
    name, value = next(iter(given.items()))
    said = " and ".join(f"{key}={count}" for key, count in given.items())
    if rest < stages or (stages == 0 and rest) or (stages and rest % stages):
        left = f"{rest} layers for {stages} other stages" if rest >= 0 else f"{-rest} layers too few"
        rule = f"{said} of {num_layers} layers leave {left}, which must be a whole number of layers each, at least 1"
        yield _problem(name, value, rule, "every layer runs on exactly one stage", _uneven_fix(layout, num_layers))
    elif layout.vpp > 1 and any(count % layout.vpp for count in stage_layers(layout, num_layers)):
        counts = sorted(set(stage_layers(layout, num_layers)))
        rule = f"stages of {' and '.join(map(str, counts))} layers must each be a multiple of vpp={layout.vpp}"
        yield _problem(name, value, rule, "a stage's layers are cut evenly into its chunks", "vpp=1, or stages that are multiples of it")


def _even_fix(layout: Layout, num_layers: int) -> str:
    """pp must also divide the ranks, so only those values are named."""
    fits = [pp for pp in range(1, num_layers + 3) if layout.ranks % pp == 0 and _is_even(replace(layout, pp=pp), num_layers)]
    options = [f"pp={pp}" if layout.vpp == 1 else f"pp={pp} with vpp={layout.vpp}" for pp in fits]
    for counts in (False, True):
        if _is_even(replace(layout, embedding_as_layer=counts, loss_as_layer=counts), num_layers):
            options.append(f"embedding_as_layer={counts} and loss_as_layer={counts}".lower())
    without = " without embedding_as_layer and loss_as_layer" if layout.embedding_as_layer or layout.loss_as_layer else ""
    return "one of: " + "; ".join([*options, _uneven_fix(layout, num_layers) + without])


def _is_even(layout: Layout, num_layers: int) -> bool:
    """Every chunk has as many layers, at least one of them the model's, by a layout that does not contradict itself."""
    counted = num_layers + layout.embedding_as_layer + layout.loss_as_layer
    if any(contradictions(layout)) or counted % (layout.pp * layout.vpp):
        return False
    return min(min(stage) for stage in chunk_layers(layout, num_layers)) >= 1


def _uneven_fix(layout: Layout, num_layers: int) -> str:
    """First and last stage that make the whole most even: the outer stages hold embedding and loss, so the remainder is theirs."""
    pp, vpp = layout.pp, layout.vpp
    if num_layers % vpp or num_layers < pp * vpp:
        return f"fewer chunks or stages: every one of the pp * vpp chunks needs a layer of the model's {num_layers}"
    units, middle = num_layers // vpp, -(-num_layers // vpp // pp)
    while pp > 2 and units - middle * (pp - 2) < 2:
        middle -= 1
    outer = units - middle * (pp - 2)
    first, last = outer - outer // 2, outer // 2
    return f"first_stage_layers={first * vpp} and last_stage_layers={last * vpp}" + (f" ({middle * vpp} each between)" if pp > 2 else "")


def _problem(field: str, value: object, rule: str, reason: str, fix: str) -> Problem:
    return Problem(path=f"train.layout.{field}", value=value, rule=rule, reason=reason, fix=fix)


def divisors(number: int) -> str:
    return "one of " + ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)


def _multiples(number: int, near: int) -> str:
    below, above = near // number * number, (near // number + 1) * number
    return f"ranks={above}" if below == 0 else f"ranks={below} or ranks={above}"
