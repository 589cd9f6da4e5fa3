"""Writes a randomly initialised model and its character tokenizer as a Hugging Face checkpoint: weights are a function of the seed."""

import json
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from moerl.config.schema import ScratchModel
from moerl.config.scratch import CHAT_TEMPLATE, EOS, PAD, TOKEN_IDS, TURN_END, TURN_START, UNKNOWN, scratch_config
from moerl.types import CheckpointError


def write_scratch_model(scratch: ScratchModel, max_context: int, directory: Path, seed: int) -> None:
    """`directory` appears complete or not at all. Raises CheckpointError if it exists: it may hold weights somebody wants."""
    if directory.exists():
        raise CheckpointError(
            f"{directory} exists already: a scratch model is never written over something; remove it or name another place"
        )
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.parent) as unfinished:
        built = Path(unfinished) / directory.name
        _random_model(scratch, max_context, seed).save_pretrained(built)
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
