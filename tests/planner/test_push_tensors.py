"""Tensors that a push is planned with, held against the model that Megatron builds: every one, in every family."""

from engine_ranks import run_ranks
from planned_jobs import tensors_of_models
from test_parameter_counts import cases_of_families

from moerl.train.push.planned_tensors import tensors_to_push

LAYOUTS = ("one", "pp2-first3", "pp2-vpp2", "tp2-pp2-ep2-dp2")


def test_tensors_of_a_push_are_those_that_megatron_builds():
    cases = {name: (hf, train) for name, (hf, train, _) in cases_of_families() if name.rpartition(" ")[2] in LAYOUTS}
    planned = [tensors_to_push(hf, train.layout, dtype="bfloat16", with_mtp=train.mtp_loss > 0) for hf, train in cases.values()]
    built = run_ranks(tensors_of_models, 1, list(cases.values()))
    by_name = [[sorted(tensors, key=lambda tensor: tensor.name) for tensors in side] for side in (planned, built)]
    assert [name for name, ours, theirs in zip(cases, *by_name, strict=True) if ours != theirs] == []
    assert len(cases) > 40
