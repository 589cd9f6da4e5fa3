"""Who is slow, by the bandwidth of every pair: properties for any number of nodes and any faults within the stated bounds."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from moerl.doctor.checks.slow_nodes import judge, outliers, rounds, speed_of

SHARE = 0.7


@given(st.integers(min_value=1, max_value=40))
def test_rounds_hold_every_pair_once_and_nobody_twice_in_a_round(num):
    played = rounds(num)
    assert sorted(itertools.chain(*played)) == list(itertools.combinations(range(num), 2))
    for pairs in played:
        met = list(itertools.chain(*pairs))
        assert len(met) == len(set(met))
    assert len(played) == (num if num % 2 else num - 1)


@st.composite
def clusters(draw, *, slow_nodes=True, slow_links=True):
    """(number of nodes, slow nodes, slow links, speed of every link): at least half of the nodes, and two, are healthy."""
    num = draw(st.integers(min_value=3, max_value=12))
    most = min(num // 2, num - 2) if slow_nodes else 0
    slow = draw(st.sets(st.integers(0, num - 1), max_size=most))
    healthy = [node for node in range(num) if node not in slow]
    pairs = list(itertools.combinations(healthy, 2))
    # A node most of whose links are slow is a slow node: single slow links are fewer.
    broken = draw(st.sets(st.sampled_from(pairs), max_size=1)) if slow_links and len(healthy) >= 3 else set()
    links = {}
    for a, b in itertools.combinations(range(num), 2):
        is_slow = a in slow or b in slow or (a, b) in broken
        links[a, b] = draw(st.floats(0.01, 0.6) if is_slow else st.floats(0.9, 1.1))
    return num, slow, broken, links


@given(clusters())
def test_slow_nodes_and_slow_links_are_told_apart(cluster):
    num, slow, broken, links = cluster
    judged = judge(num, links, share=SHARE)
    assert set(judged.slow) == slow
    assert set(judged.slow_pairs) == broken


@given(clusters(slow_nodes=False, slow_links=False), st.floats(1e-3, 1e3))
def test_noise_alone_accuses_nobody_at_any_speed(cluster, scale):
    num, _, _, links = cluster
    judged = judge(num, {pair: speed * scale for pair, speed in links.items()}, share=SHARE)
    assert (judged.slow, judged.slow_pairs) == ((), ())


def test_the_slow_one_of_three_is_found_although_most_links_are_slow():
    judged = judge(3, {(0, 1): 10.0, (0, 2): 46.0, (1, 2): 11.0}, share=SHARE)
    assert judged.slow == (1,)
    assert judged.reference == 46.0
    assert speed_of(1, {(0, 1): 10.0, (0, 2): 46.0, (1, 2): 11.0}) == 10.5


def test_of_two_nodes_neither_is_accused():
    assert judge(2, {(0, 1): 1.0}, share=SHARE).slow == ()
    assert judge(1, {}, share=SHARE).slow == ()


def test_outliers_are_beside_the_upper_median():
    assert outliers([400.0, 390.0, 180.0, 410.0], share=SHARE) == (2,)
    assert outliers([400.0], share=SHARE) == ()
    assert outliers([], share=SHARE) == ()
