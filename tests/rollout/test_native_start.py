"""How servers of other engines refuse to start, before they load a model."""

import asyncio
import logging
import socket

import pytest
import torch
from tiny_servers import native_engine

from moerl.rollout.vllm.core import VLLMCore
from moerl.types import EngineError


@pytest.mark.engine
@pytest.mark.parametrize("kind", ["sglang-moe", "vllm-moe32"])
def test_a_port_in_use_is_refused_with_what_to_do(run, checkpoints, tmp_path, kind):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        engine = native_engine(kind, checkpoints[kind.split("-")[1]], tmp_path, port=port)
        with pytest.raises(EngineError, match=rf"rollout.port = {port}: port is in use on 127.0.0.1; .* Set rollout.port=0"):
            run(engine.start())


@pytest.mark.engine
@pytest.mark.skipif(torch.cuda.is_available(), reason="the sizes are those of kernels for CPU")
def test_a_model_and_arguments_that_vllm_cannot_take_are_refused_together(run, checkpoints, tmp_path):
    engine = native_engine("vllm-moe", checkpoints["moe"], tmp_path, engine_args={"max_num_seq": 4})
    with pytest.raises(EngineError, match=r"(?s)rollout\.engine_args\.max_num_seq = 4.*head_dim = 16"):
        run(engine.start())


def test_a_sleep_that_frees_nothing_says_so(caplog):
    with caplog.at_level(logging.INFO):
        asyncio.run(VLLMCore(engine=None, needs=(), sleeps=False).sleep())
    assert "frees no memory" in caplog.text and "enable_sleep_mode" in caplog.text
