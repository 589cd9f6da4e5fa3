"""FusedAdam and FusedSGD with Transformer Engine's constructor and state layout, and its operations on lists of tensors.

The step count is in the param group, not in each parameter's state: Megatron's distributed optimizer saves and loads it
there. (With torch.optim.AdamW instead, loading a distributed checkpoint fails in megatron-core 0.16.1.)
"""

from typing import Any

import torch

FusedSGD = torch.optim.SGD


def multi_tensor_applier(op: Any, noop_flag: torch.Tensor, tensor_lists: Any, *args: Any) -> Any:
    return op(0, noop_flag, tensor_lists, *args)


def multi_tensor_l2norm(chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Any, per_tensor: bool) -> tuple[torch.Tensor, None]:
    """[1] norm over every tensor together, in float32, or in float64 for float64 tensors."""
    if per_tensor:
        raise RuntimeError("norms per tensor are not in the reference transformer_engine")
    computed = torch.promote_types(tensor_lists[0][0].dtype, torch.float32)
    norms = [torch.linalg.vector_norm(tensor, dtype=computed) for tensor in tensor_lists[0]]
    return torch.linalg.vector_norm(torch.stack(norms)).reshape(1), None


def multi_tensor_scale(chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Any, scale: float) -> None:
    """Second list = first list * scale."""
    for source, target in zip(*tensor_lists, strict=True):
        torch.mul(source, scale, out=target)


class FusedAdam(torch.optim.Optimizer):
    """Adam (arXiv:1412.6980), decoupled weight decay with adam_w_mode (arXiv:1711.05101)."""

    def __init__(self, params: Any, lr: float = 1e-3, bias_correction: bool = True, betas: tuple[float, float] = (0.9, 0.999),
                 eps: float = 1e-8, adam_w_mode: bool = True, weight_decay: float = 0.0, **unsupported: Any) -> None:  # fmt: skip
        if asked := sorted(name for name, value in unsupported.items() if value):
            raise RuntimeError(f"FusedAdam options {asked} need Transformer Engine on a GPU")
        super().__init__(params, {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)

    def _update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        state, grad, (beta1, beta2) = self.state[param], param.grad, group["betas"]
        assert grad is not None
        if not state:
            state["exp_avg"] = torch.zeros_like(param, dtype=torch.float32 if param.dtype != torch.float64 else None)
            state["exp_avg_sq"] = torch.zeros_like(state["exp_avg"])
        if group["weight_decay"] != 0:
            if self.adam_w_mode:
                param.mul_(1 - group["lr"] * group["weight_decay"])
            else:
                grad = grad + group["weight_decay"] * param
        state["exp_avg"].lerp_(grad.to(state["exp_avg"].dtype), 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        correction1 = 1 - beta1 ** group["step"] if group["bias_correction"] else 1.0
        correction2 = 1 - beta2 ** group["step"] if group["bias_correction"] else 1.0
        denominator = (state["exp_avg_sq"] / correction2).sqrt_().add_(group["eps"])
        param.addcdiv_(state["exp_avg"], denominator, value=-group["lr"] / correction1)
