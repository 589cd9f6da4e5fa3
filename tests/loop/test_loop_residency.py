"""Whose the trainer's GPUs are through a run: whoever leaves goes first, nothing serves or trains without its memory, whatever breaks."""

import asyncio
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from in_process_run import SECONDS, InProcessRun, make_config, new_engine

from moerl.config.schema.rollout_config import RolloutConfig, WeightsConfig
from moerl.residency import FOLLOWS, Residency
from moerl.rollout.engines.fake_engine import FakeEngine
from moerl.rollout.fleet.collector import Intake, LocalCollector
from moerl.rollout.fleet.rollout_pool import RolloutPool
from moerl.rollout.server.contract import PARTS
from moerl.scratch_model import character_tokenizer
from moerl.types.errors import EngineError, ResidencyError
from moerl.types.stored import Here

STEP = [
    ("server", "pause abort"), ("server", "sleep weights cache"), ("trainer", "wake"), ("trainer", "update"),
    ("trainer", "shed"), ("server", "wake weights"), ("server", "pushed"),
    ("trainer", "sleep"), ("server", "wake cache"), ("server", "resume"),
]  # fmt: skip
CANARY = [
    ("server", "pause abort"), ("server", "sleep cache"), ("trainer", "wake"), ("trainer", "logprobs"),
    ("trainer", "sleep"), ("server", "wake cache"), ("server", "resume"),
]  # fmt: skip


class Told(FakeEngine):
    """Notes what it is told."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.notes, self.role = [], "server"

    def note(self, what):
        self.notes.append((self.role, what))

    async def start(self):
        self.note("start")
        await super().start()

    async def pause(self, mode):
        if mode == "abort":  # the other one is the push's own
            self.note("pause abort")
        await super().pause(mode)

    async def resume(self):
        self.note("resume")
        await super().resume()

    async def sleep(self, parts=PARTS):
        self.note("sleep " + " ".join(parts))
        return await super().sleep(parts)

    async def wake(self, parts=PARTS):
        self.note("wake " + " ".join(parts))
        return await super().wake(parts)

    async def generate(self, prompt_ids, sampling, request_id):
        if not request_id.startswith("canary"):
            self.note("generate")
        return await super().generate(prompt_ids, sampling, request_id)

    async def finish(self, version, push_id):
        await super().finish(version, push_id)
        self.note("pushed")


def colocated(config, engines, *, num_shared):
    """A run of which trainer and engines write into one list."""
    run = InProcessRun(config, engines=engines, num_shared=num_shared)
    notes = run.notes = []
    for engine in engines:
        engine.notes = notes
    for verb in ("wake", "shed", "sleep", "update", "logprobs"):
        upstream = getattr(run.trainer, verb)

        async def noted(*args, verb=verb, upstream=upstream, **options):
            notes.append(("trainer", verb))
            return await upstream(*args, **options)

        setattr(run.trainer, verb, noted)
    return run


async def until(is_true):
    async with asyncio.timeout(SECONDS):
        while not is_true():  # noqa: ASYNC110
            await asyncio.sleep(0)


def without(notes, *whats):
    return [note for note in notes if note[1] not in whats]


def settings(tmp_path, **changes):
    return make_config(tmp_path, **{"num_steps": 3, "weights": WeightsConfig(canary_every=0), **changes})


def test_a_step_on_shared_gpus_moves_everything_in_this_order(tmp_path):
    run = colocated(settings(tmp_path), [new_engine(kind=Told)], num_shared=1)
    asyncio.run(run.play())
    first = [("server", "start"), ("server", "pause abort"), ("server", "sleep weights cache"), *STEP[4:], *CANARY]
    assert without(run.notes, "generate") == [*first, *STEP * 3]
    generating = [before for before, after in pairwise(run.notes) if after == ("server", "generate")]
    assert set(generating) <= {("server", "generate"), ("server", "resume")}


def test_every_canary_gives_the_trainer_room_to_score_it_and_the_servers_theirs_back(tmp_path):
    run = colocated(settings(tmp_path, weights=WeightsConfig(canary_every=1)), [new_engine(kind=Told)], num_shared=1)
    asyncio.run(run.play())
    assert without(run.notes, "generate")[-len(STEP + CANARY) :] == STEP + CANARY


def test_servers_on_gpus_of_their_own_are_never_told_to_sleep(tmp_path):
    run = colocated(settings(tmp_path), [new_engine(kind=Told)], num_shared=0)
    asyncio.run(run.play())
    assert not [what for role, what in run.notes if role == "server" and what.startswith(("sleep", "wake"))]
    assert not [name for row in run.metrics() for name in row if name.startswith("residency/")]


def test_the_seconds_of_every_move_are_metrics_of_the_step(tmp_path):
    run = colocated(settings(tmp_path), [new_engine(kind=Told)], num_shared=1)
    asyncio.run(run.play())
    moves = {"servers_sleep", "trainer_wake", "trainer_shed", "servers_wake_weights", "trainer_sleep", "servers_wake_cache"}
    names = {f"residency/{unit}/{move}" for unit in ("seconds", "bytes") for move in moves}
    for row in run.metrics():
        assert {name for name in row if name.startswith("residency/")} == names
        assert row["residency/bytes/servers_sleep"] == 0


class Refusing(Told):
    """Does not go to sleep a second time with its weights, or come back a second time with its cache."""

    refused = "sleep weights cache"

    def note(self, what):
        super().note(what)
        if what == self.refused and self.notes.count((self.role, what)) == 3:
            raise EngineError("out of memory")


class RefusingToWake(Refusing):
    refused = "wake weights"


@pytest.mark.parametrize(
    ("kind", "move", "state"), [(Refusing, "serving to training", "serving"), (RefusingToWake, "training to sharing", "training")]
)
def test_a_move_that_fails_ends_the_run_with_its_reason_and_no_other_move_begins(tmp_path, kind, move, state, monkeypatch):
    monkeypatch.setattr("moerl.rollout.fleet.fleet.LOSS_SECONDS", 0.01)
    run = colocated(settings(tmp_path), [new_engine(kind=kind)], num_shared=1)

    async def scenario():
        with pytest.raises(EngineError, match="out of memory"):
            await run.play()
        assert run.residency.state == state
        for enter in (run.residency.train, run.residency.share, run.residency.serve):
            with pytest.raises(ResidencyError, match=f"^{state} -> .*: the move from {move} has not ended, or failed$"):
                await enter()

    asyncio.run(scenario())
    assert run.notes[-1] == ("server", kind.refused)


def test_a_server_that_ends_while_the_trainer_has_its_gpu_starts_when_the_trainer_sleeps(tmp_path):
    engine = new_engine(kind=Told)
    run = colocated(settings(tmp_path), [engine], num_shared=1)

    async def die_once():
        if run.trainer.version == 1:
            engine.kill()
            await until(lambda: run.residency._pool.fleet.members[0].state == "restarting")

    run.trainer.while_updating = die_once
    asyncio.run(run.play())
    death = [at for at, note in enumerate(run.notes) if note == ("trainer", "update")][1]
    later = run.notes[death + 1 :]
    assert later[: later.index(("server", "start"))] == [("trainer", "shed"), ("trainer", "sleep")]
    revival = [("server", "pushed") if note == ("trainer", "logprobs") else note for note in CANARY]
    assert without(later, "generate")[3 : 3 + len(revival + CANARY)] == revival + CANARY
    assert run.groups.keys() == {1, 2, 3}
    assert run.metrics()[-1]["fleet/restarts"] == 1


def test_a_server_that_ends_while_it_is_put_to_sleep_stops_nothing(tmp_path):
    class Ending(Told):
        async def sleep(self, parts=PARTS):
            if self.notes.count(("trainer", "update")) == 1 and parts == PARTS:
                self.kill()
            return await super().sleep(parts)

    engines = [new_engine("first", kind=Ending), new_engine("second", kind=Told)]
    run = colocated(settings(tmp_path), engines, num_shared=2)
    asyncio.run(run.play())
    assert run.groups.keys() == {1, 2, 3}
    assert run.metrics()[-1]["fleet/restarts"] == 1


def test_in_a_shared_group_the_servers_of_their_own_go_on_while_the_others_sleep(tmp_path):
    shared, own = new_engine("shared", kind=Told), new_engine("own", kind=Told)
    own.role = "own"
    rollout = RolloutConfig(engine="fake", max_response_tokens=16, max_running=2, max_queued=0)
    run = colocated(settings(tmp_path, num_steps=6, max_staleness=1, rollout=rollout), [shared, own], num_shared=1)

    async def wait_for_own():
        seen = run.notes.count(("own", "generate"))
        await until(lambda: run.notes.count(("own", "generate")) > seen or run.trainer.version >= 4)

    run.trainer.while_updating = wait_for_own
    asyncio.run(run.play())
    assert run.groups.keys() == {1, 2, 3, 4, 5, 6}
    awake = False
    for note in run.notes:
        awake = {("server", "resume"): True, ("server", "pause abort"): False}.get(note, awake)
        assert note != ("server", "generate") or awake
    assert not [what for role, what in run.notes if role == "own" and what.startswith(("sleep", "wake"))]


@given(st.lists(st.sampled_from(["train", "share", "serve"]), max_size=8))
def test_whatever_is_asked_in_whatever_order_only_states_that_follow_are_entered(calls):
    entered = {"train": "training", "share": "sharing", "serve": "serving"}

    async def scenario():
        engine = new_engine(kind=Told)
        collector = LocalCollector(Intake(vocab_size=8, decoder=character_tokenizer(64)), keep=Here)
        pool = RolloutPool([engine], max_running=1, max_queued=0, collector=collector, request_seconds=1)
        await engine.start()
        residency = Residency(Sleeper(), pool, num_shared=1)
        await residency.make_room()
        for call in calls:
            before, after = residency.state, entered[call]
            if before in FOLLOWS[after] or before == after == "sharing":
                await getattr(residency, call)()
                assert residency.state == after
                assert engine._asleep == {"serving": set(), "training": {"weights", "cache"}, "sharing": {"cache"}}[after]
                assert residency._train.is_awake == (after != "serving")
            else:
                refusal = f"^{before} -> {after}: the trainer's GPUs are in state {before}, and {after} follows"
                with pytest.raises(ResidencyError, match=refusal):
                    await getattr(residency, call)()
                assert residency.state == before
        await pool.close()

    asyncio.run(scenario())


class Sleeper:
    """As much of a trainer as the machine moves."""

    is_awake = True

    async def wake(self):
        assert not self.is_awake
        self.is_awake = True
        return 1

    async def shed(self):
        assert self.is_awake
        return 1

    async def sleep(self):
        assert self.is_awake
        self.is_awake = False
        return 1
