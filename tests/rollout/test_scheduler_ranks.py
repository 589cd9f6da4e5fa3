"""What one of several processes that hold SGLang's model finds, all of them say: SGLang returns the first one's outcome only."""

import multiprocessing as mp
from types import SimpleNamespace

import torch.distributed as dist

from moerl.rollout.engines.sglang.sglang_scheduler import _weights
from moerl.types.errors import WeightError


def outcome(rank, meeting, failing, answers):
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)

    def finish(version):
        if rank in failing:
            raise WeightError(f"version {version} differs")

    model = SimpleNamespace(
        session=SimpleNamespace(finish=finish), installed=SimpleNamespace(check_reached=lambda parameters: None), parameters=list
    )
    scheduler = SimpleNamespace(moerl_model=model, tp_group=SimpleNamespace(world_size=2, rank_in_group=rank, cpu_group=dist.group.WORLD))
    try:
        _weights(scheduler, "finish", "3")
        answers.put((rank, None))
    except WeightError as error:
        answers.put((rank, str(error)))
    dist.destroy_process_group()


def outcomes(tmp_path, failing):
    context = mp.get_context("fork")  # torch is loaded, and no thread of it runs
    answers = context.Queue()
    ranks = [context.Process(target=outcome, args=(rank, tmp_path / f"meet-{failing}", failing, answers)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    found = dict(answers.get(timeout=60) for _ in ranks)
    for rank in ranks:
        rank.join()
    return [found[0], found[1]]


def test_a_failure_on_any_rank_is_raised_on_all_with_its_rank(tmp_path):
    assert outcomes(tmp_path, (1,)) == ["on rank 1 of the server's 2: version 3 differs"] * 2


def test_what_all_ranks_find_is_said_once(tmp_path):
    assert outcomes(tmp_path, (0, 1)) == ["version 3 differs"] * 2


def test_without_a_failure_no_rank_raises(tmp_path):
    assert outcomes(tmp_path, ()) == [None, None]
