"""Hand float64 gradients to the optimizer as they are.

What breaks: the distributed optimizer casts every gradient to float32, which a float64 parameter does not take; training in float64 is
how layouts are compared without rounding. Versions: 0.16.1, 0.19.2 (read); target: megatron/core/optimizer/distrib_optimizer.py.
Can go: when upstream casts only what is narrower. Other dtypes keep the upstream path.
"""

import torch

from megatron_patches.errors import require_source

NAME = "float64_gradients"
_KNOWN = {"ffcdecd38d14405a": "megatron-core 0.16.1", "b14b52f057fb4a96": "megatron-core 0.19.2"}
_MARK = "_moerl_float64_gradients"


def needed() -> bool:
    return not torch.cuda.is_available()


def active() -> bool:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    return bool(getattr(DistributedOptimizer._copy_model_grads_to_main_grads, _MARK, False))


def apply() -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    upstream = DistributedOptimizer._copy_model_grads_to_main_grads
    require_source(upstream, _KNOWN, NAME)

    def copy_gradients(self):  # type: ignore[no-untyped-def]
        wide = [group for group in self.model_fp32_groups if group and group[0].dtype == torch.float64]
        if not wide:
            upstream(self)
            return
        for parameters, shards in zip(self.model_fp32_groups, self.shard_fp32_groups, strict=True):
            for parameter, shard in zip(parameters, shards, strict=True):
                part = self._get_model_param_range_map(parameter)["param"]
                shard.grad = parameter.main_grad.view(-1)[part.start : part.end]

    setattr(copy_gradients, _MARK, True)
    DistributedOptimizer._copy_model_grads_to_main_grads = copy_gradients
