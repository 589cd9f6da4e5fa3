"""What patched processes do for the tests of the patches; rank 0's value goes to the test."""

from typing import Any

import torch
import torch.distributed as dist


def activate_again() -> tuple[bool, tuple[str, ...], tuple[str, ...]]:
    """Whether a second activation leaves every replaced function as it is; the names of the active patches and of those needed."""
    from megatron.core.tensor_parallel import mappings
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    import megatron_patches

    def functions() -> list[Any]:
        places = (torch, torch.cuda, torch.Tensor, torch.nn.Module, mappings, moe_utils, token_dispatcher)
        return [vars(place)[name] for place in places for name in sorted(vars(place)) if callable(vars(place)[name])]

    before = functions()
    names = megatron_patches.activate()
    after = functions()
    needed = tuple(patch.NAME for patch in megatron_patches.PATCHES if patch.needed())
    return all(a is b for a, b in zip(before, after, strict=True)), names, needed


def undo(name: str) -> None:
    """Put the upstream function back, then ask whether all is in force."""
    from megatron.core.tensor_parallel import mappings
    from megatron.core.transformer.moe import token_dispatcher

    import megatron_patches

    megatron_patches.assert_active()
    if name == "alltoall_splits":
        token_dispatcher.maybe_move_tensor_to_cpu = lambda tensor, **_: tensor
    elif name == "uneven_gloo":
        mappings._gather_along_first_dim = lambda tensor, *_: tensor
    elif name == "lone_rank":
        from megatron.core.distributed import param_and_grad_buffer

        param_and_grad_buffer.dist_reduce_scatter_func = dist.reduce_scatter_tensor
    elif name == "duplicated_linear":
        from megatron.core.extensions.transformer_engine import TELinear

        TELinear.__init__ = torch.nn.Module.__init__
    else:
        torch.cuda.current_device = lambda: 0
    megatron_patches.assert_active()


def patch_changed_source(name: str) -> None:
    """Apply a patch whose target is not what it was written for."""
    from megatron.core.tensor_parallel import mappings
    from megatron.core.transformer.moe import moe_utils

    from megatron_patches import alltoall_splits, duplicated_linear, uneven_gloo

    if name == "alltoall_splits":
        moe_utils.maybe_move_tensor_to_cpu = _another
        alltoall_splits.apply()
    elif name == "duplicated_linear":
        from megatron.core.extensions.transformer_engine import TELinear

        TELinear.__init__ = _another
        duplicated_linear.apply()
    else:
        setattr(mappings, name, _another)
        uneven_gloo.apply()


def _another() -> None: ...


def gather_and_scatter(sizes: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each rank gathers pieces of `sizes` rows and reduces them back; (gathered, scattered) of every rank."""
    from megatron.core.tensor_parallel import mappings

    rank, group = dist.get_rank(), dist.group.WORLD
    mine = torch.full((sizes[rank], 2), float(rank))
    gathered = mappings._gather_along_first_dim(mine, group, sizes)
    scattered = mappings._reduce_scatter_along_first_dim(gathered * (rank + 1), group, sizes)
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, (gathered, scattered))
    return answers


def use_cuda_names() -> dict[str, Any]:
    """What the ways to ask for CUDA give."""
    module = torch.nn.Linear(2, 2).to("cuda").cuda()
    event, stream = torch.cuda.Event(), torch.cuda.Stream()
    event.record()
    with torch.cuda.stream(stream):
        stream.wait_event(event)
    tensors = [
        torch.zeros(2, device="cuda"),
        torch.arange(3, device=torch.device("cuda", 0)),
        torch.empty(2, device=torch.cuda.current_device(), pin_memory=True),
        torch.ones(2).to("cuda:0"),
        torch.ones(2).to(device="cuda", dtype=torch.float64),
        torch.ones(2).cuda(non_blocking=True),
        module.weight,
    ]
    return {
        "devices": {str(tensor.device) for tensor in tensors},
        "dtype": tensors[4].dtype,
        "event": event.query(),
        "is_available": torch.cuda.is_available(),
        "type": torch.ones(1).type(),
        "type_in_megatron": eval(compile("torch.ones(1).type()", "/x/megatron/core/y.py", "eval"), {"torch": torch}),
    }


def rng_round_trip() -> bool:
    torch.cuda.manual_seed(3)
    state = torch.cuda.get_rng_state()
    first = torch.rand(4, device="cuda")
    torch.cuda.set_rng_state(state)
    return torch.rand(4, device="cuda").equal(first)


def attend_over_ranks(bounds: list[int], heads: int, groups: int, channels: int, value_channels: int) -> dict[str, float]:
    """Largest differences of output and gradients between attention over all ranks and attention of the whole on one."""
    from transformer_engine.pytorch.attention import DotProductAttention, zigzag

    generator = torch.Generator().manual_seed(0)
    shapes = ((heads, channels), (groups, channels), (groups, value_channels), (heads * value_channels,))
    *qkv, weight = (torch.randn(bounds[-1], *shape, generator=generator, dtype=torch.float64) for shape in shapes)
    cu_seqlens = torch.tensor(bounds)

    def run(inputs: list[torch.Tensor], weight: torch.Tensor, group: Any) -> list[torch.Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        attention = DotProductAttention(heads, (channels, value_channels), groups, cp_group=group, softmax_scale=0.3)
        out = attention(*leaves, qkv_format="thd", attn_mask_type="padding_causal", cu_seqlens_q=cu_seqlens)
        (out * weight).sum().backward()
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    mine = zigzag(bounds, dist.get_rank(), dist.get_world_size())
    whole = [tensor[mine] for tensor in run(qkv, weight, None)]
    parts = run([tensor[mine] for tensor in qkv], weight[mine], dist.group.WORLD)
    names = ("out", "query", "key", "value")
    return {name: float((a - b).abs().max()) for name, a, b in zip(names, whole, parts, strict=True)}


def grouped_products(sizes: list[int], has_bias: bool) -> dict[str, float]:
    """Largest differences of output and gradients between experts in one layer and each of them alone."""
    import transformer_engine.pytorch as te

    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(sum(sizes), width, generator=generator, dtype=torch.float64) for width in (6, 4))
    layer = te.GroupedLinear(len(sizes), 6, 4, bias=has_bias, params_dtype=torch.float64, init_method=torch.nn.init.normal_)
    mine, alone = x.clone().requires_grad_(), x.clone().requires_grad_()
    parameters = [*layer.parameters()]
    weights, biases = ([getattr(layer, f"{kind}{i}") for i in range(len(sizes))] if kind == "weight" or has_bias else None
                       for kind in ("weight", "bias"))  # fmt: skip
    with torch.no_grad():
        for parameter in parameters:
            parameter.normal_(generator=generator)
    parts = [
        torch.nn.functional.linear(rows, weights[i], None if biases is None else biases[i]) for i, rows in enumerate(alone.split(sizes))
    ]
    wanted = [torch.cat(parts), *torch.autograd.grad(torch.cat(parts), [alone, *parameters], grad)]
    found = layer(mine, torch.tensor(sizes))
    found = [found, *torch.autograd.grad(found, [mine, *parameters], grad)]
    names = ["y", "x", *(name for name, _ in layer.named_parameters())]
    return {name: float((a - b).abs().max()) for name, a, b in zip(names, found, wanted, strict=True)}
