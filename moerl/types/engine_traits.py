"""Traits of rollout engines: the models each serves, what it does not return, what it wants whole. A row for each, by rollout.engine."""

from dataclasses import dataclass
from math import inf
from typing import Literal

_SERVED = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "llama", "mixtral", "deepseek_v3", "kimi_k2", "glm4_moe")
_OPENED = ("mistral", "olmoe", "deepseek_v2")
"""model_types without a family in moerl/models, opened by Megatron-Bridge, whose runs with both engines are tested."""

Joined = Literal["none", "fp8", "all"]
"""Tensors that a server must have whole before it loads them, where they come in pieces. fp8: values with their scales."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTraits:
    """Answers to what rules, placement and plans ask about an engine."""

    runs_in_driver: bool = False
    """It has no processes."""
    served: tuple[str, ...] | None = None
    """Families of moerl/models whose log-probs and pushes are tested with it. None: it serves all of them, in this environment and on
    CPU; with a list it has an environment of its own, and runs on GPUs."""
    no_routes: str = ""
    """Why it does not return the experts that tokens went to; empty: it does."""
    no_sets: str = ""
    """Why it does not say what top-k and top-p left; empty: it does."""
    temperatures: tuple[float, float] = (0.0, inf)
    """Least and greatest above 0 at which it samples."""
    joined: Joined = "none"
    ue8m0_from: float | None = None
    """Least compute capability on which its kernels take scales of FP8 blocks as powers of two. None: none."""

    @property
    def accepted(self) -> tuple[str, ...]:
        """model_types that an engine with a list serves."""
        return (*(self.served or ()), *_OPENED)

    @property
    def has_environment(self) -> bool:
        """It runs in an environment of its own, on the run's GPUs where there are any."""
        return self.served is not None


TRAITS = {
    "hf": EngineTraits(joined="fp8"),  # widens FP8 from whole pairs
    "sglang": EngineTraits(served=_SERVED, temperatures=(1e-6, inf), ue8m0_from=10.0),  # lower ones are 0 to it
    "vllm": EngineTraits(
        served=(*_SERVED, "gpt_oss"),
        no_routes="vLLM returns the experts of tokens from its second model runner only, which does not run on CPU; moerl runs the first "
        "(0.32)",
        no_sets="vLLM says what was left only from its second model runner, which moerl does not run",
        temperatures=(0.01, 2.0),  # lower ones it raises to this, higher ones it refuses (sampling_params.py)
        joined="all",  # its loader keeps tensors until it has all of a layer (vllm/layerwise_bytes.py)
        ue8m0_from=9.0,
    ),
    "fake": EngineTraits(runs_in_driver=True, no_sets="it has no model"),
}
"""By the choices of rollout.engine."""
