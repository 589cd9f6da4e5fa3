"""FusedAdam and FusedSGD with Transformer Engine's constructor and state layout.

The step count is in the param group, not in each parameter's state: Megatron's distributed optimizer saves and loads it
there. (With torch.optim.AdamW instead, loading a distributed checkpoint fails in megatron-core 0.16.1.)
"""

from itertools import chain
from typing import Any

import torch

FusedSGD = torch.optim.SGD
_RANGE = torch.finfo(torch.float16).max / 2
"""float16 states are stored divided by a scale per tensor, so that their largest value is this."""


class FusedAdam(torch.optim.Optimizer):
    """Adam (arXiv:1412.6980), decoupled weight decay with adam_w_mode (arXiv:1711.05101).

    With master_weights it owns the wide copies of narrow parameters; states narrower than float32 are widened for each step.
    """

    def __init__(self, params: Any, lr: float = 1e-3, bias_correction: bool = True, betas: tuple[float, float] = (0.9, 0.999),
                 eps: float = 1e-8, adam_w_mode: bool = True, weight_decay: float = 0.0, master_weights: bool = False,
                 master_weight_dtype: torch.dtype = torch.float32, exp_avg_dtype: torch.dtype = torch.float32,
                 exp_avg_sq_dtype: torch.dtype = torch.float32, use_decoupled_grad: bool = False, store_param_remainders: bool = False,
                 **unsupported: Any) -> None:  # fmt: skip
        unsupported |= {"store_param_remainders": store_param_remainders, "bias_correction=False": not bias_correction}
        if asked := sorted(name for name, value in unsupported.items() if value):
            raise RuntimeError(f"FusedAdam options {asked} need Transformer Engine on a GPU")
        super().__init__(params, {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.adam_w_mode, self.master_weights, self.use_decoupled_grad = adam_w_mode, master_weights, use_decoupled_grad
        self.name_to_dtype_map = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype, "master_param": master_weight_dtype}
        self._scales: dict[Any, dict[str, torch.Tensor]] = {}

    # -- states, under the names and with the meaning Megatron's distributed optimizer expects ----------------------

    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool = False) -> None:
        names = ("exp_avg", "exp_avg_sq", "master_param") if self.master_weights else ("exp_avg", "exp_avg_sq")
        for name in names:
            values = param.detach() if name == "master_param" else torch.zeros_like(param)
            self.set_scaled_state(param, name, values.to(self._wide(param)))

    def get_unscaled_state(self, param: torch.Tensor, name: str) -> torch.Tensor:
        """In float32 or wider; the state itself if it is stored so."""
        stored = self.state[param][name]
        if stored.dtype == torch.float16:
            return stored.float() * self._scales[param][name]
        return stored.float() if stored.dtype == torch.bfloat16 else stored

    def set_scaled_state(self, param: torch.Tensor, name: str, values: torch.Tensor) -> None:
        dtype = self.name_to_dtype_map[name]
        if dtype == torch.float16:
            scale = values.abs().amax() / _RANGE if values.numel() else values.new_zeros(())
            self._scales.setdefault(param, {})[name] = scale
            values = torch.where(scale > 0, values / scale, 0.0)
        state = self.state[param]
        if name in state:
            state[name].copy_(values)
        else:
            state[name] = values.to(dtype if values.dtype != torch.float64 else None, copy=True)

    @staticmethod
    def _wide(param: torch.Tensor) -> torch.dtype:
        return torch.float64 if param.dtype == torch.float64 else torch.float32

    def state_dict(self) -> dict[str, Any]:
        """States in float32 whatever they are stored in."""
        answer = super().state_dict()
        for index, param in enumerate(chain.from_iterable(group["params"] for group in self.param_groups)):
            if index in answer["state"]:
                answer["state"][index] = {name: self.get_unscaled_state(param, name) for name in answer["state"][index]}
        return answer

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """torch alone would cast every state to the parameter's type."""
        super().load_state_dict(state_dict)
        for index, param in enumerate(chain.from_iterable(group["params"] for group in self.param_groups)):
            if index in state_dict["state"]:
                self.state[param] = {}
                for name, values in state_dict["state"][index].items():
                    self.set_scaled_state(param, name, values.to(self._wide(param)))

    # -- the update ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1  # of groups without parameters too, since Transformer Engine 2.19
            for param in group["params"]:
                grad = getattr(param, "decoupled_grad", None) if self.use_decoupled_grad else param.grad
                if grad is not None:
                    self._update(param, grad, group)

    def _update(self, param: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        if param not in self.state:
            self.initialize_state(param)
        (beta1, beta2), states = group["betas"], {name: self.get_unscaled_state(param, name) for name in self.state[param]}
        weight, grad = states.get("master_param", param), grad.to(states["exp_avg"].dtype)
        step = torch.tensor(float(group["step"]), device=weight.device)
        adam = torch._fused_adamw_ if self.adam_w_mode else torch._fused_adam_  # one pass over memory, PyTorch's own
        adam([weight], [grad], [states["exp_avg"]], [states["exp_avg_sq"]], [], [step], lr=group["lr"], beta1=beta1, beta2=beta2,
             weight_decay=group["weight_decay"], eps=group["eps"], amsgrad=False, maximize=False)  # fmt: skip
        if weight is not param:
            param.copy_(weight)
        for name, values in states.items():
            if values is not self.state[param][name]:
                self.set_scaled_state(param, name, values)
