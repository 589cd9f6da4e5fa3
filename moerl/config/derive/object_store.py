"""How much of Ray's object store a run's samples can take. Imports no Ray."""

from moerl.config.derive.model_configs import model_config, routes_to_replay
from moerl.config.schema.run_config import RunConfig

TOKEN_BYTES = 12
"""Bytes of a token without its routes: id and log-prob, and some four letters of text."""
COLUMN_BYTES = 4
"""Bytes of a token in each column of a step: log-probs of the old policy and of the reference that the trainer computes before an update,
advantages of tokens, what models beside the policy say."""


def sample_bytes(config: RunConfig) -> int:
    """Bytes of one sample as long as the context: tokens * (12 + layers with experts * experts per token); over 256 experts twice as
    many; with rollout.top_p or top_k 8 more, and 4 for each entry that may be left."""
    routes = routes_to_replay(config)
    per_token = 0 if routes is None else routes.num_layers * routes.top_k * routes.dtype.itemsize
    if config.filters_samples:
        per_token += 8 + 4 * (config.rollout.top_k or model_config(config.model)["vocab_size"])
    return _longest(config) * (TOKEN_BYTES + per_token)


def most_bytes(config: RunConfig) -> int:
    """With every slot of the buffer full of the longest samples, and the columns of a step."""
    step = config.groups_per_step * config.group_size
    number = config.needs_old_logprobs + config.uses_reference + config.credits_tokens + _num_beside(config)
    return config.most_groups * config.group_size * sample_bytes(config) + step * _longest(config) * COLUMN_BYTES * number


def _num_beside(config: RunConfig) -> int:
    """Values and returns; log-probs of the model of outcomes, twice, and their difference; a teacher's."""
    needs = config.algorithm.needs
    return 2 * ("values" in needs) + 3 * ("process_rewards" in needs) + (config.distillation is not None)


def _longest(config: RunConfig) -> int:
    """Tokens of a sample."""
    return min(config.data.max_prompt_tokens + config.rollout.max_response_tokens, config.model.max_context)


def shortage(config: RunConfig, store_bytes: float) -> str | None:
    """Text for people if the samples may not fit into a store of that size."""
    most = most_bytes(config)
    if most <= store_bytes:
        return None
    num_samples = config.most_groups * config.group_size
    return (
        f"Ray's object store has {_gb(store_bytes)}, and the samples of {config.most_groups} groups in flight take up to "
        f"{_gb(most)}: with group_size={config.group_size}, {num_samples} of {_gb(sample_bytes(config))} at the longest. What does not "
        "fit is written to the disk under Ray's --temp-dir and read back for training, which is slow. Start Ray with "
        f"--object-store-memory={most}, on all machines together (shared memory must have the room: df -h /dev/shm), or make the step, "
        "rollout.max_response_tokens or max_staleness smaller"
    )


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3g} GB"
