"""What the published checkpoint of a model holds: names and shapes from transformers' own modules, not from moerl's families."""

from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

Shapes = dict[str, tuple[int, ...]]

PUBLISHED_COUNTS = {
    "deepseek-v3": 3_918_786_560 + 680_571_043_840 + 59 * 256,
    "qwen3-235b-a22b": 235_093_634_560,
    "kimi-k2": 1_026_408_232_448,
    "glm-4.5": 358_337_791_296,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-0.6b": 596_049_920,
}
"""Numbers in the published safetensors files. DeepSeek-V3: BF16, then FP8; what else is float32 are scales, and the biases of 59 layers'
routers, which the other counts contain."""


def published_tensors(hf: dict[str, Any]) -> Shapes:
    """Of the checkpoint with that config.json, in bfloat16."""
    num_layers, num_mtp = hf["num_hidden_layers"], hf.get("num_nextn_predict_layers", 0)
    shapes = dict(_decoder(hf, num_layers + num_mtp))
    for layer in range(num_layers, num_layers + num_mtp):
        shapes |= _beside_the_decoder_layer(f"model.layers.{layer}", hf["hidden_size"], hf["vocab_size"])
    return shapes


def _decoder(hf: dict[str, Any], num_layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """A layer of multi-token prediction contains one more decoder layer. Kimi-K2 comes with DeepSeek-V3's code."""
    kind = {"kimi_k2": "deepseek_v3"}.get(hf["model_type"], hf["model_type"])
    with torch.device("meta"):
        config = AutoConfig.for_model(**hf | {"model_type": kind, "num_hidden_layers": num_layers})
        model = AutoModelForCausalLM.from_config(config)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and hf["tie_word_embeddings"]:
            continue  # the embedding, which is in the file once
        stem, last = name.rsplit(".", 1)
        if last == "gate_up_proj":  # transformers 5 fuses experts, checkpoints do not
            experts, rows, columns = tensor.shape
            for expert in range(experts):
                yield f"{stem}.{expert}.gate_proj.weight", (rows // 2, columns)
                yield f"{stem}.{expert}.up_proj.weight", (rows // 2, columns)
        elif last == "down_proj":
            for expert in range(len(tensor)):
                yield f"{stem}.{expert}.down_proj.weight", tuple(tensor.shape[1:])
        else:
            yield name, tuple(tensor.shape)


def _beside_the_decoder_layer(layer: str, hidden: int, vocab: int) -> Shapes:
    """DeepSeek-V3's README_WEIGHTS.md; GLM-4.5 is published with the same names."""
    return {
        f"{layer}.enorm.weight": (hidden,),
        f"{layer}.hnorm.weight": (hidden,),
        f"{layer}.eh_proj.weight": (hidden, 2 * hidden),
        f"{layer}.embed_tokens.weight": (vocab, hidden),
        f"{layer}.shared_head.norm.weight": (hidden,),
        f"{layer}.shared_head.head.weight": (vocab, hidden),
    }
