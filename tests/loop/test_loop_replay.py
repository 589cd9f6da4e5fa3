"""Routes on their way from the engine to the trainer, and the passes that router replay adds to a step."""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
from fake_group import FakeTrainGroup
from in_process_run import make_config, new_engine, play

from moerl.config.derive.model_configs import routes_to_replay
from moerl.rollout.engines.fake_engine import FakeEngine
from moerl.types.errors import GuardError, MoerlError


def replaying(tmp_path, mode, **train):
    config = make_config(tmp_path, num_steps=2)
    return replace(config, train=replace(config.train, router_replay=mode, **train))


def test_the_routes_of_every_sample_reach_the_trainer(tmp_path):
    config = replaying(tmp_path, "rollout")
    run = play(config, engines=[new_engine(routes=routes_to_replay(config))])
    for version, batch in enumerate(run.trainer.batches, start=1):
        completions = [sample.completion for group in run.groups[version] for sample in group.samples]
        assert batch.num_sequences == len(completions) == 12
        for completion, start, end in zip(completions, batch.offsets[:-1], batch.offsets[1:], strict=True):
            np.testing.assert_array_equal(batch.routes_T[start : end - 1], completion.payload.get().routes)
            assert (batch.routes_T[end - 1] == 255).all()
    payload = run.metrics()[-1]["routing/payload_bytes"]
    assert payload == sum(c.routes_bytes for c in completions) == (len(batch.token_ids_T) - 12) * 4 * 2


@pytest.mark.parametrize(
    ("mode", "settings", "recorded", "has_old"),
    [
        ("off", {}, [], False),
        ("trainer", {}, [True], False),
        ("trainer", {"updates_per_step": 2}, [True], True),
        ("trainer", {"old_logprobs": "rollout"}, [True], True),
        ("rollout", {"updates_per_step": 2}, [False], True),
    ],
)
def test_the_trainer_records_in_one_pass_before_the_update(tmp_path, monkeypatch, mode, settings, recorded, has_old):
    """With one update per step its log-probs are not used: the old policy is the policy itself, to the last bit."""
    config = replace(replaying(tmp_path, mode, **settings), num_steps=1)
    calls, given = [], FakeTrainGroup.logprobs

    async def logprobs(self, batch, *, records_routes=False):
        if batch.num_sequences == config.groups_per_step * config.group_size:  # the canary's are fewer
            calls.append(records_routes)
        return await given(self, batch, records_routes=records_routes)

    monkeypatch.setattr(FakeTrainGroup, "logprobs", logprobs)
    run = play(config, engines=[new_engine(routes=routes_to_replay(config))])
    assert calls == recorded
    assert (run.trainer.batches[0].old_logprobs_T is not None) == has_old


@pytest.mark.parametrize(("mode", "stops"), [("off", True), ("trainer", True), ("rollout", False)])
def test_a_reference_that_routes_by_itself_may_differ_from_a_policy_that_follows_the_server(tmp_path, monkeypatch, mode, stops):
    given = FakeTrainGroup.update

    async def update(self, batch, objective, *, lr):
        return replace(await given(self, batch, objective, lr=lr), kl_reference=1e-9)

    monkeypatch.setattr(FakeTrainGroup, "update", update)
    config = replaying(tmp_path, mode)
    with pytest.raises(GuardError, match="kl_reference") if stops else nullcontext():
        play(config, engines=[new_engine(routes=routes_to_replay(config))])


class AnotherModel(FakeEngine):
    """Says less of a route than the trainer's model has."""

    async def generate(self, prompt_ids, sampling, request_id):
        completion = await super().generate(prompt_ids, sampling, request_id)
        return replace(completion, routes=None if completion.routes is None else completion.routes[:, :3])


def test_routes_of_another_model_end_the_run_with_the_sample_and_both_shapes(tmp_path):
    config = replaying(tmp_path, "rollout")
    with pytest.raises(MoerlError, match=r"completion \d+-\d+: routes .* = uint8 \(17, 3, 2\): must be uint8 \(17, 4, 2\)"):
        play(config, engines=[new_engine(kind=AnotherModel, routes=routes_to_replay(config))])
