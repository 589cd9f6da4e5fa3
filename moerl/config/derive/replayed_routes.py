"""Shape of the routes that a run moves from its servers to its trainer."""

from typing import TYPE_CHECKING

from moerl.config.derive.hf_config import model_config
from moerl.config.derive.model_shape import shape_of_config
from moerl.types.routes import RouteShape

if TYPE_CHECKING:
    from moerl.config.schema.run_config import RunConfig


def routes_to_replay(config: "RunConfig") -> RouteShape | None:
    """Shape of the routes that completions of a valid configuration bring; None if it does not replay an engine's routes."""
    if config.train.router_replay != "rollout":
        return None
    return shape_of_config(model_config(config.model)).routes
