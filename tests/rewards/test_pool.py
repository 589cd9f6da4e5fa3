"""The pool against verifiers that raise, hang, die and lie. Timeouts are short because nothing waits for a slow answer here."""

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from moerl.config.schema.data_config import RewardConfig, RewardTerm
from moerl.rewards.reward_pool import RewardPool
from moerl.rewards.reward_process import WorkerProcess
from moerl.rewards.verifier_runner import PendingVerdict
from moerl.rewards.verifiers import VerifierInput
from moerl.types.errors import ConfigError
from moerl.types.exit_codes import ExitCode
from moerl.types.groups import Prompt, Score


def prompt(ground_truth: str = "", **extra_info: object) -> Prompt:
    return Prompt(index=0, token_ids=(1,), text="?", data_source="test", ground_truth=ground_truth, extra_info=extra_info)


def score_all(config: RewardConfig, *texts: str, ground_truth: str = "") -> tuple[list[Score], RewardPool]:
    async def main() -> tuple[list[Score], RewardPool]:
        async with RewardPool(config) as pool:
            return [await pool.score(prompt(ground_truth, index=5), text) for text in texts], pool

    return asyncio.run(main())


def children() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


def is_running(pid: int) -> bool:
    """False for a process that has ended and that nobody has asked about yet."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 60
    while running := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, f"still running: {running}"
        time.sleep(0.01)


def wait_for_files(folder: Path, number: int) -> None:
    deadline = time.monotonic() + 60
    while len(list(folder.iterdir())) < number:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_reward_is_the_weighted_sum_and_parts_are_unweighted(functions):
    terms = {
        "right": RewardTerm(kind="prefix", weight=2.0),
        "form": RewardTerm(kind="format", pattern=r"\d+", weight=-0.5),
        "own": RewardTerm(kind="function", path=f"{functions}:seen", weight=4.0),
    }
    [score], pool = score_all(RewardConfig(terms=terms), "12", ground_truth="1234")
    assert score.error is None
    assert score.reward == 2.0 * 0.5 - 0.5 * 1.0 + 4.0 * 0.25
    assert score.parts == {
        "right": 0.5, "form": 1.0, "own": 0.25, "own.length": 2.0, "own.index": 5.0, "own.same": 0.0, "own.numpy": 2.5,
    }  # fmt: skip
    assert not pool.error_counts


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ("raise", "raised", "KeyError: 'no such answer'"),
        ("mute", "raised", "Mute: its text cannot be made: TypeError (at "),
        ("half", "raised", "ValueError: no field \\ud83d (at "),
        ("exit", "raised", "SystemExit: 3"),
        ("memory", "raised", "MemoryError"),
        ("nan", "not_a_number", "returned nan, which is not a finite number"),
        ("inf", "not_a_number", "returned inf"),
        ("none", "not_a_number", "returned None"),
        ("text", "not_a_number", "returned '1.0'"),
        ("list", "not_a_number", "returned [1.0]"),
        ("array", "not_a_number", "returned array([1, 0]), which is not a finite number"),
        ("huge", "not_a_number", "returned 1000"),
        ("dict", "not_a_number", 'without "score"'),
        ("die", "died", "exit status -9"),
        ("sleep", "timeout", "reward.timeout_seconds=2"),
        ("spin", "timeout", "reward.timeout_seconds=2"),
    ],
)
def test_a_misbehaving_verifier_marks_its_sample_and_the_next_one_is_scored(misbehaving, text, kind, said):
    (bad, good), pool = score_all(misbehaving(timeout_seconds=2.0), text, "fine")
    assert bad.reward == 0.0
    assert bad.error is not None
    assert bad.error.startswith("reward.terms.bad: ")
    assert said in bad.error
    assert good == Score(reward=1.0, parts={"bad": 1.0})
    assert pool.error_counts == {kind: 1}


def test_a_sample_whose_worker_is_killed_is_scored_by_another(misbehaving, tmp_path):
    """From outside, or for the node's memory: the run has the same rewards."""
    (score,), pool = score_all(misbehaving("off", timeout_seconds=20.0), "die once", ground_truth=str(tmp_path / "died"))
    assert score == Score(reward=1.0, parts={"bad": 1.0})
    assert (tmp_path / "died").exists() and not pool.error_counts


def test_a_sum_of_terms_that_is_no_number_marks_its_sample():
    """As one term that is none: an infinite reward would end the run."""
    terms = {"right": RewardTerm(kind="exact", weight=1.5e308), "form": RewardTerm(kind="format", pattern="1+", weight=1.5e308)}
    (bad, good), pool = score_all(RewardConfig(terms=terms), "1", "11", ground_truth="1")
    said = "their sum 1.5e+308 * 1 (right), 1.5e+308 * 1 (form) is inf, which is not a finite number"
    assert bad == Score(reward=0.0, error=f"reward.terms: {said}")
    assert good.reward == 1.5e308
    assert pool.error_counts == {"not_a_number": 1}


def test_errors_are_counted_by_kind(misbehaving):
    _, pool = score_all(misbehaving(timeout_seconds=2.0), "raise", "nan", "raise", "sleep", "fine", "scalar", "bool")
    assert pool.error_counts == {"raised": 2, "not_a_number": 1, "timeout": 1}


@pytest.mark.parametrize("bomb", ["\\boxed{9^{9^{9^{9}}}}", "\\boxed{" + "(" * 300 + "1" + ")" * 300 + "}"])
def test_a_bomb_for_math_verify_costs_one_worker(bomb):
    config = RewardConfig(terms={"math": RewardTerm(kind="math")}, timeout_seconds=2.0)
    (bad, good), pool = score_all(config, bomb, "\\boxed{7}", ground_truth="7")
    assert bad.error == "reward.terms.math: not done after reward.timeout_seconds=2"
    assert good.reward == 1.0
    assert pool.error_counts == {"timeout": 1}


def test_a_worker_may_allocate_what_the_pool_allows_and_no_more(functions):
    config = RewardConfig(terms={"own": RewardTerm(kind="function", path=f"{functions}:allocate")})

    async def main() -> list[Score]:
        async with RewardPool(config, memory_bytes=256 * 2**20) as pool:
            return [await pool.score(prompt(num_bytes=mebibytes * 2**20), "x") for mebibytes in (128, 512, 128)]

    small, large, again = asyncio.run(main())
    assert small.reward == again.reward == 128 * 2**20
    assert large.error.startswith("reward.terms.own: MemoryError (at ")


def test_a_leak_costs_a_worker_and_no_sample(functions):
    """What earlier checks left is not the next one's: it runs again in a worker of its own."""
    config = RewardConfig(terms={"own": RewardTerm(kind="function", path=f"{functions}:leak")})

    async def main() -> list[Score]:
        async with RewardPool(config, memory_bytes=256 * 2**20) as pool:
            return [await pool.score(prompt(), "x") for _ in range(7)]

    scores = asyncio.run(main())
    assert [score.error for score in scores] == [None] * 7
    assert 1 < max(score.reward for score in scores) < 7


def test_a_worker_that_reads_no_more_costs_the_check_that_it_was_sent(functions):
    """One of a megabyte, which no socket takes alone."""
    config = RewardConfig(terms={"own": RewardTerm(kind="function", path=f"{functions}:freeze")}, timeout_seconds=2.0)

    async def main() -> list[Score]:
        async with RewardPool(config) as pool:
            first = await pool.score(prompt(), "freeze")
            await asyncio.sleep(1)
            return [first, await pool.score(prompt(), "x" * 2**20), await pool.score(prompt(), "fine")]

    first, sent, last = asyncio.run(main())
    assert first.reward == last.reward == 1.0
    assert sent.error == "reward.terms.own: not done after reward.timeout_seconds=2"


def test_names_of_numbers_are_bounded_and_can_be_written(functions, caplog):
    """They may come from responses, whose JSON can name half a character."""
    config = RewardConfig(terms={"own": RewardTerm(kind="function", path=f"{functions}:name")})
    scores, _ = score_all(config, "tool \ud83d", "other", "third")
    assert [len(score.parts) for score in scores] == [201, 57, 1]
    assert scores[0].parts["own.tool \\ud83d 7"] == 7.0
    assert "verifiers have named 256 numbers" in caplog.text


def test_whoever_waits_for_a_check_may_go_in_the_moment_of_its_deadline():
    """Else a group that is put off would end the run."""

    async def main() -> None:
        asked = PendingVerdict(b"", asyncio.get_running_loop().create_future())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01) as asked.deadline:
                asyncio.get_running_loop().call_at(asked.deadline.when(), asked.give_up)
                await asyncio.sleep(10)
        asked.give_up()

    asyncio.run(main())


def test_the_term_that_hangs_is_the_one_named(functions):
    terms = {"first": RewardTerm(kind="exact"), "second": RewardTerm(kind="function", path=f"{functions}:misbehave")}
    [score], _ = score_all(RewardConfig(terms=terms, timeout_seconds=2.0), "sleep")
    assert score.error is not None
    assert score.error.startswith("reward.terms.second: ")


def test_a_hanging_check_does_not_hold_up_the_other_worker(misbehaving):
    async def main() -> None:
        async with RewardPool(misbehaving(timeout_seconds=30.0, num_workers=2)) as pool:
            hanging = asyncio.create_task(pool.score(prompt(), "sleep"))
            async with asyncio.timeout(25):
                scores = [await pool.score(prompt(), "fine") for _ in range(20)]
            assert all(score.reward == 1.0 for score in scores)
            assert not hanging.done()
            hanging.cancel()

    asyncio.run(main())


def test_scores_belong_to_their_samples_when_many_are_asked_for_at_once():
    async def main() -> None:
        async with RewardPool(RewardConfig(terms={"prefix": RewardTerm(kind="prefix")}, num_workers=2)) as pool:
            scores = await asyncio.gather(*(pool.score(prompt("x" * 64), "x" * (i % 65)) for i in range(256)))
        assert [score.reward for score in scores] == [(i % 65) / 64 for i in range(256)]

    asyncio.run(main())


@pytest.mark.parametrize("isolation", ["off", "strict"])
def test_a_worker_whose_answer_nobody_reads_ends_without_a_word(functions, capfd, isolation):
    """A check of a group that is put off, or of a run that ends: its traceback stood on the terminal of a healthy run."""

    async def main() -> int:
        worker = await WorkerProcess.start(isolation)
        terms = {"slow": RewardTerm(kind="function", path=f"{functions}:pause", isolation=isolation)}
        assert await worker.set_up(terms, 2**30) == {}
        await worker.ask([pickle.dumps(VerifierInput(text="", data_source="test", ground_truth="", extra_info={}))])
        worker._channel.close()
        return await asyncio.to_thread(worker._process.wait, 60)

    assert asyncio.run(main()) == 0
    assert capfd.readouterr().err == ""


def test_a_cancelled_check_ends_and_leaves_no_answer_for_the_next_one(misbehaving, tmp_path):
    announced = tmp_path / "announced"
    announced.mkdir()

    async def main() -> None:
        async with RewardPool(misbehaving("off", timeout_seconds=600.0)) as pool:
            task = asyncio.create_task(pool.score(prompt(announce=str(announced)), "sleep"))
            await asyncio.to_thread(wait_for_files, announced, 2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await pool.score(prompt(), "scalar") == Score(reward=3.0, parts={"bad": 3.0})
            assert not pool.error_counts

    asyncio.run(main())


def score_together(config: RewardConfig, *texts: str) -> tuple[list[Score], RewardPool, list[int]]:
    """Asked for in one turn of the event loop, by a pool whose checks have been fast; and the sizes of the messages to workers."""
    sizes: list[int] = []

    async def main() -> tuple[list[Score], RewardPool, list[int]]:
        async with RewardPool(config) as pool:
            for slot in pool._slots:
                slot.run = partial(noted, slot.run)
            pool._pace = 1e-6
            return await asyncio.gather(*(pool.score(prompt(), text) for text in texts)), pool, sizes

    async def noted(run, message) -> None:
        sizes.append(len(message))
        await run(message)

    return asyncio.run(main())


FINE = Score(reward=1.0, parts={"bad": 1.0})


def test_checks_asked_for_together_are_shared_out_in_messages(misbehaving):
    scores, _, sizes = score_together(misbehaving(num_workers=2), *["fine", "scalar"] * 12)
    assert [score.reward for score in scores] == [1.0, 3.0] * 12
    assert sizes[:2] == [12, 6]  # a half of what waits, each time
    assert sum(sizes) == 24


@pytest.mark.parametrize(("text", "kind"), [("raise", "raised"), ("sleep", "timeout"), ("die", "died")])
def test_a_check_that_fails_in_a_message_marks_its_sample_alone(misbehaving, text, kind):
    scores, pool, sizes = score_together(misbehaving(timeout_seconds=2.0), "fine", "fine", text, "fine", "scalar")
    assert sizes == [5]
    assert scores[2].error is not None
    assert [*scores[:2], scores[3]] == [FINE] * 3 and scores[4].reward == 3.0
    assert pool.error_counts == {kind: 1}


def test_slow_checks_are_spread_over_the_workers(misbehaving):
    async def main() -> None:
        async with RewardPool(misbehaving("off", num_workers=2, timeout_seconds=30.0)) as pool:
            hanging = asyncio.create_task(pool.score(prompt(), "sleep"))
            pool._pace = 1.0
            scores = await asyncio.gather(*(pool.score(prompt(), "fine") for _ in range(4)))
            assert scores == [FINE] * 4
            hanging.cancel()

    asyncio.run(main())


def test_texts_that_no_socket_takes_at_once_are_scored_with_answers_as_long(functions):
    terms = {"own": RewardTerm(kind="function", path=f"{functions}:wide")}

    async def main() -> list[Score]:
        async with RewardPool(RewardConfig(terms=terms, timeout_seconds=60.0)) as pool:
            pool._pace = 1e-6
            return await asyncio.gather(*(pool.score(prompt(), "x" * 2**size) for size in (10, 20, 15, 15, 15, 21)))

    scores = asyncio.run(main())
    assert [score.reward for score in scores] == [2.0**size for size in (10, 20, 15, 15, 15, 21)]


def test_a_kill_reaches_what_the_function_started(misbehaving, tmp_path):
    pid_file = tmp_path / "pid"
    [score], _ = score_all(misbehaving("off", timeout_seconds=1.0), "child", ground_truth=str(pid_file))
    assert score.error is not None
    wait_until_gone([int(pid_file.read_text())])


def test_a_function_that_cannot_be_imported_stops_the_run_before_it_starts(tmp_path):
    (tmp_path / "broken.py").write_text("import nothing_of_this_name\ndef score(**given): return 1.0\n")
    terms = {"fine": RewardTerm(kind="exact"), "own": RewardTerm(kind="function", path=f"{tmp_path}/broken.py:score")}
    before = children()
    with pytest.raises(ConfigError) as caught:
        score_all(RewardConfig(terms=terms, num_workers=2), "x")
    [problem] = caught.value.problems
    assert problem.path == "reward.terms.own"
    assert "No module named 'nothing_of_this_name'" in problem.reason
    assert children() <= before


@pytest.fixture
def kill_as_they_start(monkeypatch):
    """The first so many workers."""

    def kill(number):
        upstream, left = WorkerProcess.start, [None] * number

        async def start(isolation):
            worker = await upstream(isolation)
            if left:
                left.pop()
                os.kill(worker.pid, signal.SIGKILL)
            return worker

        monkeypatch.setattr(WorkerProcess, "start", start)

    return kill


def test_a_worker_that_is_killed_as_it_starts_is_started_again(kill_as_they_start):
    kill_as_they_start(1)
    [score], pool = score_all(RewardConfig(terms={"form": RewardTerm(kind="format", pattern=r"\d+")}), "12")
    assert (score.reward, score.error) == (1.0, None)
    assert not pool.error_counts


def test_workers_that_are_killed_as_they_start_end_the_run_as_a_kill_does(kill_as_they_start):
    kill_as_they_start(2)
    with pytest.raises(ConfigError, match="it was killed by signal 9 as it started, twice") as caught:
        score_all(RewardConfig(terms={"form": RewardTerm(kind="format", pattern=r"\d+")}), "12")
    assert caught.value.exit_code == ExitCode.KILLED


def test_a_relative_file_is_found_by_workers_started_after_a_change_of_directory(functions, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = RewardConfig(terms={"own": RewardTerm(kind="function", path="functions.py:misbehave")}, timeout_seconds=5.0)

    async def main() -> list[Score]:
        async with RewardPool(config) as pool:
            monkeypatch.chdir("/")
            return [await pool.score(prompt(), text) for text in ("die", "fine")]

    assert [score.reward for score in asyncio.run(main())] == [0.0, 1.0]


def test_nothing_is_left_after_close_and_scoring_then_is_an_error(misbehaving):
    before = children()

    async def main() -> None:
        pool = RewardPool(misbehaving(num_workers=2))
        await pool.close()
        with pytest.raises(RuntimeError, match="not running"):
            await pool.score(prompt(), "fine")
        await pool.start()
        assert len(children() - before) == 4  # two workers, each with its supervisor
        await pool.close()
        await pool.start()
        scores = await asyncio.gather(*(pool.score(prompt(), text) for text in ["scalar", "fine"] * 10))
        assert [score.reward for score in scores] == [3.0, 1.0] * 10
        await pool.close()
        await pool.close()
        with pytest.raises(RuntimeError, match="not running"):
            await pool.score(prompt(), "fine")

    asyncio.run(main())
    assert children() <= before


DRIVER = """
import asyncio, sys
from moerl.config.schema.data_config import RewardConfig, RewardTerm
from moerl.rewards.reward_pool import RewardPool
from moerl.rewards.verifier_runner import PendingVerdict
from moerl.types.groups import Prompt

async def main():
    term = RewardTerm(kind="function", path=sys.argv[1], isolation="off")
    config = RewardConfig(terms={"bad": term}, timeout_seconds=600.0, num_workers=3)
    prompt = Prompt(index=0, token_ids=(1,), text="", data_source="", ground_truth="", extra_info={"announce": sys.argv[2]})
    async with RewardPool(config) as pool:
        busy = [asyncio.create_task(pool.score(prompt, text)) for text in ("spin", "sleep")]
        print(*[worker.pid for slot in pool._slots for worker in slot.workers.values()], flush=True)
        await asyncio.gather(*busy)

asyncio.run(main())
"""


def test_workers_and_what_they_started_die_with_a_killed_driver_even_in_the_middle_of_a_bomb(functions, tmp_path):
    root, announced, log, temporary = Path(__file__).parents[2], tmp_path / "announced", tmp_path / "log", tmp_path / "temporary"
    announced.mkdir()
    temporary.mkdir()
    command, env = [sys.executable, "-c", DRIVER, f"{functions}:misbehave", str(announced)], {**os.environ, "TMPDIR": str(temporary)}
    with log.open("w") as errors, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=root, env=env) as driver:
        assert driver.stdout is not None
        try:
            pids = [int(pid) for pid in driver.stdout.readline().split()]
            assert len(pids) == 3, log.read_text()
            wait_for_files(announced, 4)  # two checks, each with a child in a session of its own
            pids += [int(file.name) for file in announced.iterdir()]
            assert all(is_running(pid) for pid in pids)
            assert len(list(temporary.iterdir())) == 3
        finally:
            os.kill(driver.pid, signal.SIGKILL)
    try:
        wait_until_gone(pids)
        assert list(temporary.iterdir()) == []
    finally:
        for pid in filter(is_running, pids):
            os.kill(pid, signal.SIGKILL)


def test_functions_whose_neighbours_have_one_name_are_refused(tmp_path):
    """A process has one module of a name, and the second function would score with the first one's."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "helper.py").write_text(f"NAME = '{folder}'\n")
        (tmp_path / folder / f"{folder}.py").write_text("import helper\n\ndef score(**_):\n    return 1.0\n")
    terms = {name: RewardTerm(kind="function", path=f"{tmp_path}/{name}/{name}.py:score") for name in ("a", "b")}

    async def start(used):
        async with RewardPool(RewardConfig(terms=used)):
            pass

    asyncio.run(start({"b": terms["b"]}))
    with pytest.raises(ConfigError, match=r"b.py imports helper, and its process has that of another function: .*/a/helper.py"):
        asyncio.run(start(terms))
