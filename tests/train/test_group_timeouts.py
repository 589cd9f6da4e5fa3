"""The timeout of collectives, in every process group: the deadlines of calls come first."""

from datetime import timedelta

from engine_ranks import run_ranks


def timeouts() -> dict[str, float]:
    import torch
    from megatron.core import parallel_state

    from moerl.config.schema.layout import Layout
    from moerl.train.megatron.process_groups import initialize_groups

    initialize_groups(Layout(ranks=2, tp=2), 1, timeout_seconds=7201)
    groups = {
        "tensor": parallel_state.get_tensor_model_parallel_group(),
        "data": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "expert": parallel_state.get_expert_model_parallel_group(),
        "pipeline": parallel_state.get_pipeline_model_parallel_group(),
    }
    return {name: group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for name, group in groups.items()}


def test_every_group_of_megatron_has_the_timeout_that_ranks_are_started_with():
    minutes = timedelta(minutes=121).total_seconds()
    found = run_ranks(timeouts, 2)
    assert found == dict.fromkeys(("tensor", "data", "expert", "pipeline"), minutes)
