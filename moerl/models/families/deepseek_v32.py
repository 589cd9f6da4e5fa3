"""DeepSeek-V3.2 (685B) and GLM-5 (744B-A40B): DeepSeek-V3's architecture, with an indexer that chooses what each query attends to.

Names: transformers, models/deepseek_v32/modeling_deepseek_v32.py and models/glm_moe_dsa/modeling_glm_moe_dsa.py. Which positions are
chosen has no gradient, so that the indexers are not trained (moerl/train/megatron/attention_variants.py).
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from moerl.models.families.deepseek_v3 import latent_config, latent_layer, latent_rotary, latent_rules
from moerl.models.families.parts.family import BrokenRule, Family, Rule, Served
from moerl.models.families.parts.family_checks import Fixed, fixed_values, has_megatron
from moerl.models.families.parts.layer_rules import HF_LAYER, HF_MTP, LAYER, MTP, ends
from moerl.models.families.parts.sigmoid_routers import mtp_ends

_INDEX_TENSORS = {
    "linear_wq_b.weight": "wq_b.weight", "linear_wk.weight": "wk.weight", "k_norm.weight": "k_norm.weight",
    "k_norm.bias": "k_norm.bias", "linear_weights_proj.weight": "weights_proj.weight",
}  # fmt: skip
_K_NORM_EPS = 1e-6
"""Written into transformers' and the engines' source."""


def _layer(megatron: str, hf: str) -> tuple[Rule, ...]:
    """Indexers are whole on every tensor-parallel rank."""
    indexer, theirs = f"{megatron}.self_attention.core_attention.indexer", f"{hf}.self_attn.indexer"
    return (
        *latent_layer(megatron, hf, fuses_norms=False),
        *(Rule(megatron=f"{indexer}.{ours}", hf=(f"{theirs}.{name}",)) for ours, name in _INDEX_TENSORS.items()),
    )


def _config(hf: Mapping[str, Any], *, turns_neighbours: bool) -> dict[str, Any]:
    """`turns_neighbours`: rotary channels of an indexer lie side by side, as those of attention, and not in two halves."""
    return latent_config(hf) | {
        "experimental_attention_variant": "dsa",
        "dsa_indexer_n_heads": hf["index_n_heads"],
        "dsa_indexer_head_dim": hf["index_head_dim"],
        "dsa_indexer_topk": hf["index_topk"],
        "dsa_indexer_k_norm_epsilon": _K_NORM_EPS,
        "dsa_indexer_rope_interleaved": turns_neighbours,
        "dsa_indexer_rotate_activation": False,  # both sides of a product, by an orthogonal matrix: it serves FP8 kernels alone
    }


def _rules(hf: Mapping[str, Any], *, turns_neighbours: bool) -> Iterator[BrokenRule]:
    yield from latent_rules(hf)
    turned: Fixed = {"indexer_rope_interleave": ((turns_neighbours, None), "the family's indexers turn these channels")}
    yield from fixed_values(hf, turned)
    if not has_megatron("0.19", otherwise=True):
        reason = "sparse attention of older versions knows no packed sequences, of which all batches consist"
        yield BrokenRule("needs megatron-core 0.19 or newer", reason, "Python 3.12 with the pins of constraints-py312.txt")
    if hf["q_lora_rank"] is None:
        yield BrokenRule("needs q_lora_rank", "the indexers take the compressed queries", "a published model of this type")
    kinds = {*(hf.get("index_topk_pattern") or ""), *(hf.get("indexer_types") or ())}  # the former: letters, or a list of names
    if hf.get("index_topk_freq", 1) != 1 or kinds & {"S", "shared"}:
        reason = "the family's table has an indexer in every layer; layers that share one are not verified"
        yield BrokenRule("must not share indexers between layers in config.json", reason, "a model with index_topk_freq=1")
    dense = hf["first_k_dense_replace"]
    types = ["dense"] * dense + ["sparse"] * (hf["num_hidden_layers"] - dense)
    if hf.get("mlp_layer_types") not in (None, types):
        reason = "the family's table has dense layers first, then layers with experts"
        yield BrokenRule(f"needs mlp_layer_types to be {dense} dense layers before sparse ones", reason, "another model of this type")


def _family(*, turns_neighbours: bool) -> Family:
    return Family(
        rules=(
            *ends(repeated_by_mtp=True),
            *_layer(LAYER, HF_LAYER),
            *_layer(f"{MTP}.transformer_layer", HF_MTP),
            *mtp_ends(),
        ),
        transformer_config=partial(_config, turns_neighbours=turns_neighbours),
        broken_rules=partial(_rules, turns_neighbours=turns_neighbours),
        rotary=latent_rotary,
        served=Served(has_index=True),
    )


DEEPSEEK_V32 = _family(turns_neighbours=False)
GLM_MOE_DSA = _family(turns_neighbours=True)
