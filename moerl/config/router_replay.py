"""The rules of train.router_replay, and the shape of the routes a run moves."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from moerl.config.megatron_allowed import replay_problems_of
from moerl.config.model_config import model_config
from moerl.config.model_shape import ModelShape, shape_of_config
from moerl.config.problems import problem
from moerl.route_types import RouteShape
from moerl.types import Problem

if TYPE_CHECKING:
    from moerl.config.schema import RunConfig

ENGINES_WITH_ROUTES = ("hf", "sglang", "fake")
"""Those of rollout.engine that return the experts tokens went to."""

_WITHOUT_ROUTES = {
    "vllm": "vLLM returns the experts of tokens from its second model runner only, which does not run on CPU; moerl runs the first (0.32)",
}
"""Why, of the engines that do not."""


def replay_problems(config: "RunConfig", shape: ModelShape | None) -> Iterator[Problem]:
    """Every rule it breaks, for a model of `shape` if it is known."""
    mode, path = config.train.router_replay, "train.router_replay"
    if mode == "off":
        return
    if shape is not None and shape.routes is None:
        yield problem(path, mode, "must be off for a dense model", "there are no experts to choose", f"{path}=off")
    if mode == "rollout" and config.rollout.engine not in ENGINES_WITH_ROUTES:
        engine = config.rollout.engine
        reason = _WITHOUT_ROUTES.get(engine, f"rollout.engine={engine} does not say which experts its tokens went to")
        fix = f"{path}=trainer, or rollout.engine={ENGINES_WITH_ROUTES[0]}"
        yield problem(path, mode, f"needs rollout.engine of {', '.join(ENGINES_WITH_ROUTES)}", reason, fix)
    yield from replay_problems_of(config.train.megatron, mode)


def routes_to_replay(config: "RunConfig") -> RouteShape | None:
    """What completions of a valid configuration bring; None if it does not replay an engine's routes."""
    if config.train.router_replay != "rollout":
        return None
    return shape_of_config(model_config(config.model)).routes
