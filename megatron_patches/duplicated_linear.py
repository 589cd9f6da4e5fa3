"""Count weights that every tensor-parallel rank holds whole once in the gradient norm.

What breaks: Transformer Engine marks every weight of a Linear as a shard of tensor parallelism, also of a "duplicated" one (the
down-projections of latent attention). Their gradients are summed over the ranks and equal, but the norm adds up one copy per rank: too
large at tp > 1, so clipping scales all gradients down too far. Versions: 0.16.1 (read); 0.19.2 marks them itself (read). Target:
TELinear in megatron/core/extensions/transformer_engine.py. Can go: with the last version before 0.19. Needed on GPUs too.
"""

from importlib.metadata import version

from packaging.version import Version

from megatron_patches.errors import require_source

NAME = "duplicated_linear"
_KNOWN = {"700ba06f62b66629": "megatron-core 0.16.1"}
_MARK = "_moerl_duplicated_linear"


def needed() -> bool:
    return Version(version("megatron-core")) < Version("0.19")


def active() -> bool:
    from megatron.core.extensions.transformer_engine import TELinear

    return bool(getattr(TELinear.__init__, _MARK, False))


def apply() -> None:
    from megatron.core.extensions.transformer_engine import TELinear

    upstream = TELinear.__init__
    require_source(upstream, _KNOWN, NAME)

    def __init__(self, *args, parallel_mode, **kwargs):  # type: ignore[no-untyped-def]
        upstream(self, *args, parallel_mode=parallel_mode, **kwargs)
        if parallel_mode == "duplicated":
            for parameter in self.parameters():
                parameter.tensor_model_parallel = False

    setattr(__init__, _MARK, True)
    TELinear.__init__ = __init__  # type: ignore[method-assign]
