"""Proof of a family that Megatron-Bridge declares: a tiny model of the same config.json, built by Megatron, computes as transformers does.

A process of its own (moerl/models/opened_families.py starts it): config.json on its standard input, an `Opened` as the last line of
its output. Weights are loaded by the declared rules and by Megatron-Bridge itself, and must be the same, there and back.
"""

import dataclasses
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from moerl.config.schema.train_config import OptimizerConfig, TrainConfig
from moerl.models.families.parts.config_fields import broken_fields
from moerl.models.families.parts.family import Rule, Served
from moerl.models.families.parts.rope import rope_parameters
from moerl.models.opened_families import Opened, remember
from moerl.train import rank_imports
from moerl.train.engine_settings import EngineSettings
from moerl.types.errors import CheckpointError

if TYPE_CHECKING:
    from moerl.train.megatron_engine import MegatronEngine

TOLERANCE = 1e-4
"""Largest difference of a log-prob, in nats. Families of moerl/models stay below 1e-5, and a wrong reading of config.json moves them by
more than 1e-2."""
POSITIONS = 512
_WIDE = 0.2
"""Standard deviation of matrices: with the usual 0.02 attention and routers would hardly move log-probs."""
_SIZES = {
    "hidden_size": 64, "intermediate_size": 48, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, "vocab_size": 101,
    "head_dim": 16, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
}  # fmt: skip


def prove(hf: Mapping[str, Any]) -> Opened:
    """The family that Megatron-Bridge declares of a config.json, if moerl can build it and the proof holds; else the reason. Whatever
    packages raise ends the process, and is no result."""
    from moerl.models.bridge.bridge_family import declared_family

    try:
        if broken := [rule for rule, _, _ in broken_fields(hf)]:
            raise CheckpointError("; ".join(broken))
        _refuse_invisible(hf)
        small = tiny(hf)
        whole, of_small = declared_family(hf), declared_family(small)
        found = dataclasses.replace(of_small, served=_served(of_small.rules))
        remember(small, found)
        rules, distance = _compare(small, found)
    except CheckpointError as error:
        return Opened(refusal=str(error))
    if not distance < TOLERANCE:
        reason = f"Megatron's log-probs of a tiny model of it differ from transformers' by up to {distance:.2g} (limit {TOLERANCE:g})"
        return Opened(refusal=f"{reason}: Megatron-Bridge leaves out something that its config.json says")
    return dataclasses.replace(found, fields=whole.fields, rotary=whole.rotary, rules=rules, distance=distance)


def _refuse_invisible(hf: Mapping[str, Any]) -> None:
    """Raises CheckpointError for what sequences of a proof are too short to show, or its model too small."""
    if hf.get("sliding_window") is not None or "sliding_attention" in (hf.get("layer_types") or ()):
        raise CheckpointError(
            f"it has windows (sliding_window={hf.get('sliding_window')!r}), which moerl builds for its own families alone; "
            "sliding_window=null in config.json, if contexts fit into the window"
        )
    if (kind := rope_parameters(hf)["rope_type"]) in ("dynamic", "longrope"):
        raise CheckpointError(f"its rotary embedding is another one in longer sequences (rope_type={kind!r}), which moerl does not build")
    if hf.get("clip_qkv") is not None:
        raise CheckpointError(
            f"it clips queries, keys and values (clip_qkv={hf['clip_qkv']!r}), which Megatron does not; a tiny model may stay below"
        )
    if hf.get("num_nextn_predict_layers"):
        raise CheckpointError("it has layers of multi-token prediction, which Megatron-Bridge's registry does not name")


def tiny(hf: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json that says the same of smaller sizes: whatever is no size stays."""
    layers, dense = hf["num_hidden_layers"], hf.get("first_k_dense_replace", 0)
    small = dict(hf) | {name: size for name, size in _SIZES.items() if hf.get(name) is not None}
    small["num_hidden_layers"] = min(layers, 2 + min(dense, 1))
    if dense:
        small["first_k_dense_replace"] = 1
    small |= {name: value[: small["num_hidden_layers"]] for name, value in hf.items() if isinstance(value, list) and len(value) == layers}
    is_latent, groups = hf.get("kv_lora_rank") is not None, hf.get("num_key_value_heads") or hf["num_attention_heads"]
    small["num_attention_heads"] = 4
    if hf.get("num_key_value_heads") is not None:
        small["num_key_value_heads"] = 4 if is_latent or groups == hf["num_attention_heads"] else min(groups, 2)
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if hf.get(name) is not None:
            small[name] = _experts(hf, hf[name])
    return small | {name: None for name in ("pad_token_id", "bos_token_id", "eos_token_id") if name in hf}


def _experts(hf: Mapping[str, Any], number: int) -> int:
    """Twice those of a token, and as many in every group."""
    groups = hf.get("n_group") or 1
    return min(number, -(-2 * hf["num_experts_per_tok"] // groups) * groups)


def _served(rules: tuple[Rule, ...]) -> Served:
    """Names of a layer of experts in checkpoints."""
    for rule in rules:
        if rule.is_expert and rule.shard == "gate_up":
            block, _, gate = rule.hf[0].removeprefix("model.layers.{layer}.").partition(".experts.{expert}.")
            down = next(each.hf[0] for each in rules if each.is_expert and each.shard == "row")
            parts = (gate, rule.hf[1].rpartition("{expert}.")[2], down.rpartition("{expert}.")[2])
            up_to = tuple(part.removesuffix(".weight") for part in parts)
            return Served(block=block, projections=(up_to[0], up_to[1], up_to[2]))
    return Served()


def _compare(hf: Mapping[str, Any], found: Opened) -> tuple[tuple[Rule, ...], float]:
    """The rules that the model's parameters follow, and the largest difference of a log-prob. Raises CheckpointError where weights are not
    loaded, or not given back, as they are in the checkpoint."""
    from moerl.models.bridge.rank_parameters import owned_by
    from moerl.train.megatron_engine import MegatronEngine

    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        expected, tokens = _write(hf, directory)
        train = TrainConfig(optimizer=OptimizerConfig(lr=0.0), dtype="float32", micro_batch_tokens=POSITIONS)
        options: dict[str, Any] = {"max_context": POSITIONS, "temperature": 1.0, "uses_reference": False, "export_dtype": "float32"}
        both = [dataclasses.replace(train, bridge=bridge) for bridge in ("native", "megatron_bridge")]
        try:
            engines = [MegatronEngine(EngineSettings(train=each, model_dir=directory, trains=False, **options)) for each in both]
        except KeyError as error:  # by Family.find
            raise CheckpointError(f"Megatron-Bridge's registry: {error.args[0]}") from error
        original = load_file(directory / "model.safetensors")
        for engine in engines:
            _require_same(dict(engine.export()), original)
        with torch.no_grad():
            distance = (_log_probs(engines[1], tokens) - expected).abs().max().item()
    used = {item.rule for chunk in engines[0].model.chunks for item in owned_by(chunk, found.family, expert_rank=0)}
    return tuple(rule for rule in found.rules if rule in used), distance


def _require_same(exported: Mapping[str, torch.Tensor], original: Mapping[str, torch.Tensor]) -> None:
    wrong = sorted(exported.keys() ^ original.keys())
    wrong += [name for name in sorted(exported.keys() & original.keys()) if not exported[name].equal(original[name])]
    if wrong:
        raise CheckpointError(f"tensors of a tiny model do not come back as they were: {', '.join(wrong[:5])}")


def _write(hf: Mapping[str, Any], directory: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """A random checkpoint. Returns transformers' log-probs [positions, vocabulary] of tokens [positions]."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**hf), dtype=torch.float32).eval()
    for tensor in (*model.parameters(), *(buffer for name, buffer in model.named_buffers() if name.endswith("correction_bias"))):
        noise = torch.randn(tensor.shape)
        tensor.data = _WIDE * noise if tensor.ndim > 1 else tensor + 0.3 * noise
    model.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(hf))
    weights = load_file(directory / "model.safetensors")
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    tokens = torch.randint(0, hf["vocab_size"], (POSITIONS,))
    with torch.no_grad():
        return model(input_ids=tokens[None]).logits[0].log_softmax(-1), tokens


def _log_probs(engine: "MegatronEngine", tokens: torch.Tensor) -> torch.Tensor:
    (head,) = engine.model.chunks[0](tokens[None], torch.arange(len(tokens))[None], None)
    return torch.nn.functional.linear(head.hidden_TH, head.weight_VH).log_softmax(-1)


def main() -> None:
    hf = json.loads(sys.stdin.read())
    output, sys.stdout = sys.stdout, sys.stderr  # packages print on both
    rank_imports.load_quietly()
    from moerl.train.megatron.process_groups import initialize_groups

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    train = TrainConfig(optimizer=OptimizerConfig(lr=0.0))
    initialize_groups(train.layout, 1)
    output.write(TypeAdapter(Opened).dump_json(prove(hf)).decode() + "\n")


if __name__ == "__main__":
    main()
