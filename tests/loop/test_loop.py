"""The order of a run's steps: what is drawn when, with which weights it is sampled, and what trains."""

import asyncio
import inspect
from dataclasses import replace

import pytest
from in_process_run import MAX_CONTEXT, InProcessRun, make_config, new_engine, parity, play

from moerl import loop
from moerl.config.algorithm_settings import algorithm
from moerl.config.schema.data_config import RewardConfig, RewardTerm
from moerl.rewards.reward_pool import RewardPool
from moerl.rollout.engines.fake_engine import FakeEngine
from moerl.scratch_model import character_tokenizer
from moerl.types.errors import DynamicSamplingError
from moerl.types.groups import Score

GRPO, DAPO = algorithm("grpo"), algorithm("dapo", "overlong=none", "max_attempts=50")
both = pytest.mark.parametrize("algorithm", [GRPO, DAPO], ids=["grpo", "dapo"])


def during_rollout(run):
    """Updates that end only while the server generates, but for those before which a canary has waited for all that was in flight."""

    async def wait():
        for _ in range(1000):
            if run.trainer.version == 0 or (await run.engines[0].health()).num_running > 0:
                return
            await asyncio.sleep(0)

    return wait


def overlapping(config, **parts):
    """Responses long enough that some are in flight whenever an update begins."""
    config = replace(config, rollout=replace(config.rollout, max_response_tokens=40))
    run = InProcessRun(config, **parts)
    run.trainer.while_updating = during_rollout(run)
    asyncio.run(run.play())
    return run


def test_the_loop_fits_one_screen():
    assert len(inspect.getsource(loop.run).splitlines()) <= 45


@both
def test_without_staleness_every_token_is_of_the_version_that_the_update_starts_from(tmp_path, algorithm):
    run = play(make_config(tmp_path, algorithm=algorithm, num_steps=5))
    assert [run.versions(version) for version in range(1, 6)] == [{0}, {1}, {2}, {3}, {4}]
    assert [row["staleness/max"] for row in run.metrics()] == [0.0] * 5


@both
def test_without_staleness_nothing_is_drawn_between_an_update_and_the_end_of_its_push(tmp_path, algorithm):
    run = play(make_config(tmp_path, algorithm=algorithm, num_steps=5))
    updates = [index for index, (name, _) in enumerate(run.events) if name == "updated"]
    assert [run.events[index + 1] for index in updates] == [("pushed", version) for version in range(1, 6)]


@pytest.mark.parametrize("max_staleness", [1, 2, 3])
def test_a_ticket_is_drawn_only_after_the_push_that_frees_its_slot(tmp_path, max_staleness):
    config = make_config(tmp_path, num_steps=6, max_staleness=max_staleness)
    run = overlapping(config)
    at = {event: index for index, event in enumerate(run.events)}
    tickets = [number for name, number in run.events if name == "drawn"]
    assert tickets == list(range(len(tickets)))
    for ticket in tickets:
        freed_by = max(0, ticket // config.groups_per_step - max_staleness)
        assert at["pushed", freed_by] < at["drawn", ticket]


@both
@pytest.mark.parametrize("max_staleness", [1, 2])
def test_staleness_is_used_and_never_exceeded(tmp_path, algorithm, max_staleness):
    run = overlapping(make_config(tmp_path, algorithm=algorithm, num_steps=8, max_staleness=max_staleness))
    seen = [row["staleness/max"] for row in run.metrics()]
    assert seen[0] == 0
    assert max(seen) == max_staleness
    for version in run.groups:
        assert all(version - 1 - max_staleness <= sampled < version for sampled in run.versions(version))


@pytest.mark.parametrize("partial", [False, True])
def test_a_completion_in_flight_goes_on_with_the_pushed_weights(tmp_path, partial):
    config = make_config(tmp_path, num_steps=6, max_staleness=1)
    run = overlapping(replace(config, rollout=replace(config.rollout, partial=partial)))
    assert (run.metrics()[-1]["fleet/resumed"] > 0) == partial
    spans = [sample.completion.spans for groups in run.groups.values() for group in groups for sample in group.samples]
    versions = [tuple(span.version for span in of_one) for of_one in spans]
    assert any(len(of_one) == 2 for of_one in versions)
    assert all(of_one == tuple(range(of_one[0], of_one[0] + len(of_one))) for of_one in versions)


class OldKeys(FakeEngine):
    """What goes on after a push does so on keys and values of the old weights: a mixture, as engines compute it in mode keep."""

    async def generate(self, prompt_ids, sampling, request_id):
        completion = await super().generate(prompt_ids, sampling, request_id)
        of_old = completion.spans[0].num_tokens if len(completion.spans) > 1 else len(completion.token_ids)
        return replace(completion, logprobs=tuple(value - 0.5 * (at >= of_old) for at, value in enumerate(completion.logprobs)))


def test_what_a_push_left_on_old_keys_and_values_is_not_compared(tmp_path):
    run = overlapping(make_config(tmp_path, num_steps=6, max_staleness=1), engines=[new_engine("mixed", OldKeys)])
    assert any(len(sample.completion.spans) > 1 for groups in run.groups.values() for group in groups for sample in group.samples)
    assert run.metrics()[-1]["fleet/retired"] == 0


def test_every_server_takes_part_and_gets_every_version(tmp_path):
    engines = [new_engine(f"fake-{i}") for i in range(3)]
    run = play(make_config(tmp_path, num_steps=4), engines=engines)
    assert [run.versions(version) for version in range(1, 5)] == [{0}, {1}, {2}, {3}]
    assert all((engine._core.tensors["a"] == 4.0).all() for engine in engines)


# -- dynamic sampling ------------------------------------------------------------------------------------------


def test_grpo_trains_every_group_and_dapo_only_those_that_tell_samples_apart(tmp_path):
    def by_row(prompt, text):
        """Groups of every third ticket score 1 throughout."""
        return Score(reward=1.0 if prompt.index % 3 == 0 else float(sum(map(ord, text)) % 2))

    grpo = play(make_config(tmp_path, name="grpo"), score=by_row)
    assert grpo.trained() == {1: [0, 1, 2], 2: [3, 4, 5], 3: [6, 7, 8], 4: [9, 10, 11]}
    dapo = play(make_config(tmp_path, name="dapo", algorithm=DAPO), score=by_row)
    trained = [ticket for tickets in dapo.trained().values() for ticket in tickets]
    assert len(trained) == 12
    assert trained == sorted(set(trained))
    assert all(ticket % 3 for ticket in trained)
    assert all(len(set(group.rewards_G)) == 2 for groups in dapo.groups.values() for group in groups)
    dropped = sum(row["groups/dropped"] for row in dapo.metrics())
    assert dropped == trained[-1] + 1 - 12 > 0


def test_a_step_that_drops_every_group_stops_the_run_and_explains_the_rewards(tmp_path):
    dapo = algorithm("dapo", "overlong=none", "max_attempts=3")
    run = InProcessRun(make_config(tmp_path, algorithm=dapo), score=lambda prompt, text: Score(reward=0.25))
    with pytest.raises(DynamicSamplingError, match=r"(?s)max_attempts = 3: .*scored 0.25 for every sample\n.*fix: lowest score everywhere"):
        asyncio.run(run.play())
    assert ("updated", 1) not in run.events
    assert len([name for name, _ in run.events if name == "drawn"]) <= 9


# -- rewards ---------------------------------------------------------------------------------------------------

REWARDS = """
def raising(data_source, solution_str, ground_truth, extra_info):
    if len(solution_str) % 2:
        raise KeyError("no such answer")
    return 1.0

def not_a_number(data_source, solution_str, ground_truth, extra_info):
    return float("nan") if len(solution_str) % 2 else 1.0
"""


@pytest.mark.parametrize("function", ["raising", "not_a_number"])
def test_a_reward_that_fails_marks_its_samples_and_the_run_goes_on(tmp_path, function):
    (tmp_path / "rewards.py").write_text(REWARDS)
    term = RewardTerm(kind="function", path=f"{tmp_path / 'rewards.py'}:{function}")
    config = make_config(tmp_path, group_size=16, num_steps=2, reward=RewardConfig(terms={"own": term}))

    async def scenario():
        async with RewardPool(config.reward) as rewards:
            run = InProcessRun(config, rewards=rewards)
            await run.play()
            return run, sum(rewards.error_counts.values())

    run, counted = asyncio.run(scenario())
    groups = [group for of_step in run.groups.values() for group in of_step]
    assert all(len(group.samples) + len(group.errors) == 16 for group in groups)
    assert all(error.startswith("reward.terms.own: ") for group in groups for error in group.errors)
    assert sum(row["reward/errors"] for row in run.metrics()) == sum(len(group.errors) for group in groups) == counted > 0
    assert [batch.num_sequences for batch in run.trainer.batches] == [
        sum(len(group.samples) for group in run.groups[version]) for version in (1, 2)
    ]


class NotesGreedy(FakeEngine):
    greedy: set[tuple[int, ...]]

    async def generate(self, prompt_ids, sampling, request_id):
        completion = await super().generate(prompt_ids, sampling, request_id)
        if sampling.temperature == 0:
            self.greedy.add(completion.token_ids)
        return completion


def test_a_group_whose_completion_at_temperature_0_cannot_be_scored_says_so_and_keeps_its_samples(tmp_path):
    engine, tokenizer = new_engine(kind=NotesGreedy), character_tokenizer(MAX_CONTEXT)
    engine.greedy = set()

    def score(prompt, text):
        is_greedy = text in {tokenizer.decode(list(ids), skip_special_tokens=True) for ids in engine.greedy}
        return Score(reward=0.0, error="boom") if is_greedy and prompt.index % 2 else parity(prompt, text)

    run = InProcessRun(make_config(tmp_path, algorithm=algorithm("remax")), score=score, engines=[engine])
    asyncio.run(run.play())
    groups = [group for version in sorted(run.groups) for group in run.groups[version]]
    assert [group.lacks_greedy for group in groups] == [bool(group.prompt.index % 2) for group in groups]
    assert [group.greedy is None for group in groups] == [group.lacks_greedy for group in groups]
    assert {group.errors for group in groups} == {(), ("at temperature 0: boom",)} and {len(group.samples) for group in groups} == {4}
