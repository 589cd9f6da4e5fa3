"""Writes a randomly initialised model and its character tokenizer as a Hugging Face checkpoint: weights are a function of the seed."""

import dataclasses
import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from moerl.config.derive.scratch_config import CHAT_TEMPLATE, EOS, PAD, TOKEN_IDS, TURN_END, TURN_START, UNKNOWN, scratch_config
from moerl.config.schema.model_config import ScratchModel
from moerl.types.errors import CheckpointError


def write_scratch_model(scratch: ScratchModel, max_context: int, directory: Path, seed: int) -> None:
    """`directory` appears complete or not at all. Raises CheckpointError if it exists: it may hold weights somebody wants."""
    if directory.exists():
        raise CheckpointError(
            f"{directory} exists already: a scratch model is never written over something; remove it or name another place"
        )
    directory.parent.mkdir(parents=True, exist_ok=True)
    disable_progress_bar()  # the terminal is the run's
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.parent) as unfinished:
        built = Path(unfinished) / directory.name
        _random_model(scratch, max_context, seed).save_pretrained(built)
        if scratch.family == "deepseek_v3" and scratch.mtp_layers > 0:
            _add_mtp(built / "model.safetensors", scratch, max_context, seed)
        character_tokenizer(max_context).save_pretrained(built)
        # transformers 5 writes other names than published checkpoints use (num_local_experts, rope_parameters).
        (built / "config.json").write_text(json.dumps(scratch_config(scratch, max_context), indent=2) + "\n")
        built.rename(directory)


def character_tokenizer(max_context: int) -> PreTrainedTokenizerFast:
    """One token per character: a byte-pair encoding without merges. Other characters become <unk>."""
    backend = Tokenizer(BPE(vocab=TOKEN_IDS, merges=[], unk_token=UNKNOWN))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        additional_special_tokens=[TURN_START, TURN_END],
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_context,
        clean_up_tokenization_spaces=False,
    )


def _random_model(scratch: ScratchModel, max_context: int, seed: int) -> PreTrainedModel:
    """In float32, whatever the process's default is."""
    config = AutoConfig.for_model(**scratch_config(scratch, max_context))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(do_sample=True, eos_token_id=TOKEN_IDS[EOS], pad_token_id=TOKEN_IDS[PAD])
    return model


def _add_mtp(file: Path, scratch: ScratchModel, max_context: int, seed: int) -> None:
    """The layers of multi-token prediction as published: decoder layers after the model's last, which transformers does not build.

    A model with that many layers more has them; what they hold beside a decoder layer is added.
    """
    deeper = dataclasses.replace(scratch, num_layers=scratch.num_layers + scratch.mtp_layers)
    weights, extended = load_file(file), _random_model(deeper, max_context, seed)
    with tempfile.TemporaryDirectory(dir=file.parent) as directory:
        extended.save_pretrained(directory)
        added = load_file(Path(directory) / file.name)
    generator, ones = torch.Generator().manual_seed(seed), torch.ones(scratch.hidden_size)
    for layer in range(scratch.num_layers, deeper.num_layers):
        prefix = f"model.layers.{layer}."
        weights |= {name: tensor for name, tensor in added.items() if name.startswith(prefix)}
        weights |= {f"{prefix}{name}.weight": ones.clone() for name in ("enorm", "hnorm", "shared_head.norm")}
        projection = torch.randn(scratch.hidden_size, 2 * scratch.hidden_size, generator=generator)
        weights[f"{prefix}eh_proj.weight"] = projection * extended.config.initializer_range
        weights[f"{prefix}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
        weights[f"{prefix}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file(weights, file, metadata={"format": "pt"})
