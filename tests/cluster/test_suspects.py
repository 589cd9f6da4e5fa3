"""Of silent processes, who did not arrive: stopped and ended ones, those behind in a collective, those that wait for nobody."""

from moerl.hangs.progress import COLLECTIVE, FIRST_GROUP, MICRO_BATCH, WAIT, WORK, Line
from moerl.hangs.suspects import Seen, doing, find_suspects

PAIR, EVEN = "[0, 1] TENSOR", "[0-6/2] DATA"


def line(first, second=0, text="", written=90.0):
    return Line(written=written, first=first, second=second, text=text)


def rank(number, *, inside=None, counts=(), state="sleeping", waits=False):
    """`inside`: the text of a group, in whose all_reduce it is. `counts`: of its groups, by text."""
    groups = {FIRST_GROUP + place: line(count, text=text) for place, (text, count) in enumerate(dict(counts).items())}
    here = next((place for place, group in groups.items() if group.text == inside), FIRST_GROUP)
    progress = {
        WORK: line(1, text="update"),
        COLLECTIVE: line(int(inside is not None), here, "all_reduce"),
        WAIT: line(int(waits)),
        **groups,
    }
    return Seen(state=state, clock=100.0, progress=progress, rank=number)


def suspects(*found):
    seen = {f"rank {each.rank}": each for each in found}
    return find_suspects(seen, list(seen))


def test_a_stopped_process_is_suspected_and_not_those_that_wait_for_it():
    found = suspects(rank(0, inside=PAIR, counts={PAIR: 5}), rank(1, inside=PAIR, counts={PAIR: 5}, state="stopped"))
    assert list(found) == ["rank 1"]
    assert "stopped" in found["rank 1"]


def test_processes_that_ended_or_whose_node_is_gone_are_suspected():
    found = suspects(
        rank(0, inside=PAIR, counts={PAIR: 5}), rank(1, state="gone"), rank(2, state="unreachable"), rank(3, state="not started")
    )
    assert list(found) == ["rank 1", "rank 2", "rank 3"]


def test_the_rank_that_has_not_entered_is_suspected():
    found = suspects(rank(0, inside=PAIR, counts={PAIR: 5}), rank(1, counts={PAIR: 4}))
    assert found == {"rank 1": "it has not entered all_reduce of [0, 1] TENSOR, number 5, in which rank 0 waits"}


def test_of_a_chain_of_waiting_ranks_its_free_end_is_suspected():
    """1 is late for 0 since it waits for 2."""
    first = rank(0, inside=PAIR, counts={PAIR: 5})
    second = rank(1, inside="[1, 2] EXPERT", counts={PAIR: 4, "[1, 2] EXPERT": 8})
    assert list(suspects(first, second, rank(2, counts={"[1, 2] EXPERT": 7}))) == ["rank 2"]


def test_a_rank_that_never_communicated_in_the_group_is_found_by_the_group_s_ranks():
    found = suspects(
        *(rank(number, inside=EVEN, counts={EVEN: 1}) for number in (0, 2, 6)), rank(4), rank(3, inside=PAIR, counts={PAIR: 1})
    )
    assert list(found) == ["rank 4"]


def test_without_counts_those_that_wait_for_no_other_are_suspected():
    found = suspects(rank(0, waits=True), rank(1))
    assert list(found) == ["rank 1"]


def test_when_all_are_in_the_same_collective_no_one_is_singled_out():
    found = suspects(*(rank(number, inside=PAIR, counts={PAIR: 5}) for number in (0, 1)))
    assert list(found) == ["rank 0", "rank 1"]
    assert "the network" in found["rank 0"]


def test_a_server_without_a_record_has_not_finished():
    assert find_suspects({"server a:1": Seen(state="sleeping", clock=1.0)}, ["server a:1"]) == {"server a:1": "it has not finished"}


def test_a_record_is_told_in_words():
    seen = rank(1, inside=PAIR, counts={PAIR: 5}, waits=True)
    lines = {**seen.progress, MICRO_BATCH: line(3, 8)}
    said = doing(Seen(state="sleeping", clock=100.0, progress=lines))
    assert said == "in update for 10.0 s; micro-batch 3 of 8; inside all_reduce of [0, 1] TENSOR, number 5, for 10.0 s"
    old = {**lines, MICRO_BATCH: line(8, 8, written=10.0), COLLECTIVE: line(0, 0, "isend")}
    said = doing(Seen(state="sleeping", clock=100.0, progress=old))
    waits = "waits for a communication that was begun before, for 10.0 s"
    assert said == f"in update for 10.0 s; newest communication isend for 10.0 s; {waits}"
    assert doing(Seen(state="gone")) == ""


def test_where_nobody_is_inside_the_rank_that_launched_fewest_is_suspected():
    """On GPUs: a collective returns when it is launched."""
    group = "[0-3] TENSOR"
    found = suspects(*(rank(number, counts={group: 9 if number == 2 else 10}, waits=number == 1) for number in range(4)))
    assert found == {"rank 2": "it has launched 9 collectives of [0-3] TENSOR, and 3 others 10"}
