"""A reward belongs to its check, whatever the check does to the channel of its worker."""

import asyncio
import json
import math
import socket
from pathlib import Path

import pytest

from moerl.config.schema.data_config import RewardConfig, RewardTerm
from moerl.rewards.answer_channel import AnswerChannel, ForgedAnswer, checked_answer
from moerl.rewards.reward_pool import RewardPool
from moerl.types.groups import Prompt, Score

ATTACKS = """
import ctypes, json, linecache, os, signal, sys, time

def channel():
    # Descriptors of sockets: 0 is the null device by now, 1 and 2 are standard error.
    return [int(fd) for fd in os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd/" + fd)
            and os.readlink("/proc/self/fd/" + fd).startswith("socket:")]

def write(line):
    for descriptor in channel():
        try:
            os.write(descriptor, line)
        except OSError:
            pass

def own_number():
    frame = sys._getframe()
    while "number" not in frame.f_locals:
        frame = frame.f_back
    return frame.f_locals["number"]

def answer_in_its_place():
    frame = sys._getframe()
    while not hasattr(frame.f_locals.get("replies"), "send"):
        frame = frame.f_back
    os.kill(os.getppid(), signal.SIGSTOP)
    frame.f_locals["replies"]._pid = os.getpid()
    frame.f_locals["replies"].send(own_number(), {"value": 1000000.0, "extra": {}})

def attack(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "a process that answers in its place":
        child = os.fork()
        if child == 0:
            try:
                answer_in_its_place()
            finally:
                os.kill(os.getppid(), signal.SIGCONT)
                os._exit(0)
        os.waitpid(child, 0)
    if solution_str == "fork":
        os.fork()
    if solution_str == "fork that comes back later" and os.fork() == 0:
        time.sleep(0.25)
    if solution_str == "fork of C":
        ctypes.CDLL(None).fork()
    if solution_str == "line":
        write(json.dumps({"value": 1000000.0, "extra": {}}).encode() + b"\\n")
    if solution_str == "number":
        write(json.dumps({"number": own_number(), "value": 0.5, "extra": {}}).encode() + b"\\n")
    if solution_str == "look ahead":
        frame = sys._getframe()
        while "requests" not in frame.f_locals:
            frame = frame.f_back
        requests = frame.f_locals["requests"]
        return float(len(requests.peek())) if hasattr(requests, "peek") else -1.0
    if solution_str == "half a line":
        write(b"{")
    if solution_str == "flood":
        write(b"x" * 2 ** 17 * 9)
    if solution_str == "exception of no class":
        raise BaseException("neither Exception nor exit")
    if solution_str == "exception at a place of half a character":
        source = "raise ValueError(1)  # \\ud800" + "#" * 10_000
        linecache.cache["<response>"] = (len(source), None, [source], "<response>")
        exec(compile("raise ValueError(1)", "<response>", "exec"))
    if solution_str == "interrupt":
        raise KeyboardInterrupt
    return float(ground_truth)
"""


def prompt(ground_truth: str, **extra_info: object) -> Prompt:
    return Prompt(index=0, token_ids=(1,), text="?", data_source="test", ground_truth=ground_truth, extra_info=extra_info)


def score_in_turn(terms: dict[str, RewardTerm], *asked: tuple[Prompt, str], pause: float = 0.0) -> tuple[list[Score], RewardPool]:
    """Scores of one worker in turn. After the first, which attacks, a pause; the second is asked for again until the attack is counted."""

    async def main() -> tuple[list[Score], RewardPool]:
        async with RewardPool(RewardConfig(terms=terms, timeout_seconds=20.0)) as pool, asyncio.timeout(60):
            scores = [await pool.score(*asked[0])]
            await asyncio.sleep(pause)
            while not pool.error_counts:  # a fork may come back at any time
                scores.append(await pool.score(*asked[1]))
                assert pool.error_counts or scores[-1].reward == float(asked[1][0].ground_truth)
            return scores[:1] + [await pool.score(*each) for each in asked[1:]], pool

    return asyncio.run(main())


@pytest.fixture
def attacks(tmp_path: Path) -> dict[str, RewardTerm]:
    file = tmp_path / "attacks.py"
    file.write_text(ATTACKS)
    return {"own": RewardTerm(kind="function", path=f"{file}:attack")}


@pytest.mark.parametrize(("attack", "pause"), [("fork of C", 0.0), ("fork of C", 0.1), ("number", 0.0), ("number", 0.1)])
def test_no_reward_goes_to_another_sample(attacks, attack, pause):
    scores, pool = score_in_turn(attacks, (prompt("1"), attack), *((prompt(str(i)), "fine") for i in range(2, 6)), pause=pause)
    assert scores[0].error is not None or scores[0].reward in (1.0, 0.5 if attack == "number" else 1.0)
    assert [score.reward for score in scores[1:]] == [2.0, 3.0, 4.0, 5.0]
    assert pool.error_counts == {"forged": 1}


@pytest.mark.parametrize("attack", ["fork", "fork that comes back later", "a process that answers in its place"])
def test_a_fork_cannot_answer(attacks, attack):
    """Where a function runs each response in a forked process, that has the number of the check, and may stop the worker."""
    scores, pool = score_together(attacks, "fine", attack, "fine")
    assert [score.reward for score in scores] == [0.0, 1.0, 2.0]
    assert pool.error_counts == {}


def score_together(terms: dict[str, RewardTerm], *texts: str) -> tuple[list[Score], RewardPool]:
    """In one message; the ground truth of each is its place."""

    async def main() -> tuple[list[Score], RewardPool]:
        async with RewardPool(RewardConfig(terms=terms, timeout_seconds=20.0)) as pool, asyncio.timeout(60):
            pool._pace = 1e-6
            return await asyncio.gather(*(pool.score(prompt(str(place)), text) for place, text in enumerate(texts))), pool

    return asyncio.run(main())


@pytest.mark.parametrize("attack", ["line", "number", "half a line", "fork of C"])
def test_a_forgery_in_a_message_costs_the_one_that_forged(attacks, attack):
    scores, pool = score_together(attacks, "fine", "fine", attack, "fine", "fine")
    own = scores.pop(2)
    assert [(score.reward, score.error) for score in scores] == [(0.0, None), (1.0, None), (3.0, None), (4.0, None)]
    assert own.reward in {"number": (0.0, 0.5), "fork of C": (0.0, 2.0)}.get(attack, (0.0,))  # what its own number lets it say
    assert pool.error_counts == ({"forged": 1} if own.error else {})


def test_no_check_of_a_message_can_find_the_next_one_in_its_process(attacks):
    scores, _ = score_together(attacks, *["look ahead"] * 4)
    assert [score.reward for score in scores] == [-1.0] * 4


@pytest.mark.parametrize("attack", ["line", "half a line", "flood"])
def test_the_sample_that_forges_has_an_error_that_says_so(attacks, attack):
    (score,), pool = score_in_turn(attacks, (prompt("1"), attack))
    assert score.reward == 0.0
    assert score.error is not None and score.error.startswith("reward.terms.own: ")
    assert pool.error_counts == {"forged": 1}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("exception of no class", "BaseException: neither Exception"), ("interrupt", "KeyboardInterrupt"),
        ("exception at a place of half a character", "ValueError(1)  # \\ud800###"),
    ],
)  # fmt: skip
def test_an_exception_of_any_class_is_told_as_what_was_raised(attacks, text, said):
    (bad, good), pool = score_in_turn(attacks, (prompt("1"), text), (prompt("2"), "fine"))
    assert bad.error is not None and said in bad.error
    assert good.reward == 2.0 and pool.error_counts == {"raised": 1}


def received(line: bytes) -> dict:
    """What the pool makes of `line`, the answer to a check of number "7"."""

    async def main() -> dict:
        (requests, _requests), (answers, theirs) = socket.socketpair(), socket.socketpair()
        channel = AnswerChannel(requests, answers)
        try:
            theirs.sendall(line)
            theirs.close()
            answer = checked_answer(await channel.receive("7"))
            with pytest.raises(ConnectionError):
                channel.require_silence()
            return answer
        finally:
            channel.close()
            _requests.close()

    return asyncio.run(main())


def test_an_answer_of_a_worker_is_taken_as_it_is():
    assert received(b'{"number": "7", "value": 0.5, "extra": {"a": 2.0}}\n') == {"value": 0.5, "extra": {"a": 2.0}}
    assert received(b'{"number": "7", "kind": "raised", "error": "x"}\n') == {"kind": "raised", "error": "x"}


ANSWER = {"number": "7", "value": 0.5, "extra": {}}


@pytest.mark.parametrize(
    "line",
    [
        b"no JSON", b"[1]", b"7", b'"7"', b"[" * 100_000, b"1" * 5000, b"\xff",
        *(json.dumps(message).encode() for message in (
            {}, ANSWER | {"number": "8"}, ANSWER | {"number": 7}, ANSWER | {"more": 1}, {"number": "7", "value": 0.5}, {"number": "7"},
            ANSWER | {"value": math.nan}, ANSWER | {"value": math.inf}, ANSWER | {"value": 1}, ANSWER | {"value": True},
            ANSWER | {"value": "1.0"}, ANSWER | {"value": None}, ANSWER | {"extra": []}, ANSWER | {"extra": {"a": math.nan}},
            ANSWER | {"extra": {"a": "b"}}, ANSWER | {"extra": {"\ud800": 1.0}}, ANSWER | {"extra": {"a" * 101: 1.0}},
            {"number": "7", "kind": "raised", "error": "\ud800"}, {"number": "7", "kind": "raised", "error": "a" * 10_000},
            {"number": "7", "kind": "died", "error": "x"}, {"number": "7", "kind": [], "error": "x"},
            {"number": "7", "kind": "raised", "error": 1}, {"number": "7", "kind": "forged", "error": "x"},
            ANSWER | {"kind": "raised", "error": "x"},
        )),
    ],
)  # fmt: skip
def test_a_line_that_no_worker_sends_is_a_forgery(line):
    with pytest.raises(ForgedAnswer):
        received(line + b"\n")


@pytest.mark.parametrize("error", ["\ud800", "a" * 10_000, 7])
def test_what_a_copy_of_the_worker_says_is_told_only_if_files_can_hold_it(error):
    with pytest.raises(ForgedAnswer, match="^an answer whose values no worker sends$"):
        received(json.dumps({"number": "7", "kind": "forged", "error": error}).encode() + b"\n")


def test_a_line_without_end_is_a_forgery_before_it_fills_the_memory():
    async def main() -> None:
        (requests, _requests), (answers, theirs) = socket.socketpair(), socket.socketpair()
        channel = AnswerChannel(requests, answers)
        theirs.setblocking(False)
        writing = asyncio.create_task(asyncio.get_running_loop().sock_sendall(theirs, b"x" * 2**22))
        try:
            with pytest.raises(ForgedAnswer, match="more than 1048576 bytes"):
                await channel.receive("7")
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
            channel.close()
            _requests.close()
            theirs.close()

    asyncio.run(main())
