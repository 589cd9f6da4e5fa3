"""Limits of a request, whichever engine serves it."""

from dataclasses import dataclass

from moerl.types.completion import SamplingParams
from moerl.types.routes import RouteShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    max_context: int
    vocab_size: int
    routes: RouteShape | None = None
    """None: the model has no experts."""

    def violation(self, prompt_ids: tuple[int, ...], sampling: SamplingParams) -> str:
        """The first rule the request breaks, with what to do; empty if none."""
        num_prompt, num_total = len(prompt_ids), len(prompt_ids) + sampling.max_tokens
        outside = [token for token in (*prompt_ids, *sampling.stop_token_ids) if not 0 <= token < self.vocab_size]
        rules = {
            "the prompt must have at least one token": num_prompt > 0,
            f"token {outside[0] if outside else ''} is outside the model's vocabulary [0, {self.vocab_size})": not outside,
            f"prompt of {num_prompt} tokens + max_tokens = {sampling.max_tokens}: must be at most model.max_context = {self.max_context}; "
            "shorten the prompt or rollout.max_response_tokens, or raise model.max_context": num_total <= self.max_context,
            f"max_tokens = {sampling.max_tokens}: must be at least 1": sampling.max_tokens >= 1,
            f"num_drawn = {sampling.num_drawn}: must be in [0, {num_prompt}), the prompt's tokens": 0
            <= sampling.num_drawn
            < max(num_prompt, 1),
            f"seed = {sampling.seed}: must be in [0, 2^128)": 0 <= sampling.seed < 2**128,
            f"temperature = {sampling.temperature}: must be at least 0": sampling.temperature >= 0,
            f"top_p = {sampling.top_p}: must be in (0, 1]": 0 < sampling.top_p <= 1,
            f"top_k = {sampling.top_k}: must be at least 0": sampling.top_k >= 0,
            "returns_routes: needs a model with experts; this one is dense": self.routes is not None or not sampling.returns_routes,
        }
        return next((rule for rule, holds in rules.items() if not holds), "")
