"""Tokenizer of a checkpoint as transformers reads it, its plain form for processes without transformers, and tokens that end a response."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from moerl.models.plain_tokenizer import PlainForm
from moerl.models.transformers_config import read_transformers_config
from moerl.types.errors import ConfigError, MoerlError, problem

_PLAIN_METHODS = ("apply_chat_template", "get_chat_template", "encode", "_encode_plus", "decode", "_decode", "clean_up_tokenization")


def read_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Tokenizer, of a class of transformers: code of the folder is not run. Raises ConfigError, also for a config.json that transformers
    does not take."""
    try:
        config = read_transformers_config(directory)
    except MoerlError:
        raise
    except Exception as error:  # transformers checks types of fields, and what else a class demands
        reason = " ".join(str(error).split()) or type(error).__name__
        fix = "a config.json as transformers would write it: 1.0 where it wants a float"
        raise _unusable(directory, "must have a config.json that transformers takes", reason, fix) from error
    try:
        return AutoTokenizer.from_pretrained(directory, config=config, trust_remote_code=False)
    except Exception as error:  # tokenizers raise it itself
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        fix = "the tokenizer files of the published model, as transformers reads them without code of the folder"
        raise _unusable(directory, "must have a tokenizer that can be read", reason, fix) from error


def plain_form(tokenizer: PreTrainedTokenizerBase) -> PlainForm | None:
    """None for one that does part of its work in Python, in a class of its own."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or not all(_is_inherited(tokenizer, name) for name in _PLAIN_METHODS):
        return None
    backend: Any = tokenizer.backend_tokenizer
    backend.no_padding()  # as transformers does before it encodes a text
    backend.no_truncation()
    corrupts = getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False)
    return PlainForm(
        backend=backend.to_str(),
        splits_special_tokens=bool(tokenizer.split_special_tokens),
        cleans_up=bool(tokenizer.clean_up_tokenization_spaces) and (type(backend.model).__name__ != "BPE" or bool(corrupts)),
        chat_template=chat_template_of(tokenizer),
        special_tokens=dict(tokenizer.special_tokens_map),
        eos_token_id=tokenizer.eos_token_id,
    )


def chat_template_of(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Template for chats, of several; None where there is none of that kind."""
    found = tokenizer.chat_template
    return found.get("default") if isinstance(found, dict) else found or None


def _is_inherited(tokenizer: PreTrainedTokenizerBase, name: str) -> bool:
    return getattr(type(tokenizer), name, None) is getattr(PreTrainedTokenizerFast, name, None)


def stop_tokens(model_dir: Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Tokens of generation_config.json where there is one: chat models list more than the tokenizer's eos there. Raises ConfigError."""
    eos = tokenizer.eos_token_id
    if (model_dir / "generation_config.json").exists():
        listed = _listed_stop_tokens(model_dir)
        eos = eos if listed is None else listed
    if eos is None or eos == []:
        reason, fix = "a response would never end", "eos_token_id in generation_config.json"
        raise _unusable(model_dir, "must name an end-of-sequence token", reason, fix)
    return tuple(eos) if isinstance(eos, list) else (eos,)


def _listed_stop_tokens(model_dir: Path) -> int | list[int] | None:
    try:
        found = GenerationConfig.from_pretrained(model_dir).eos_token_id
    except (OSError, TypeError, ValueError) as error:  # transformers' own, of a file that it cannot read
        rule, fix = "must have a generation_config.json that can be read", "fetch that file again, or remove it"
        raise _unusable(model_dir, rule, str(error), fix) from error
    if not all(isinstance(each, int) and each >= 0 for each in (found if isinstance(found, list) else [found or 0])):
        rule, reason = "must name tokens by their numbers in generation_config.json", f"eos_token_id is {found!r}"
        raise _unusable(model_dir, rule, reason, "eos_token_id: NUMBER")
    return found


def _unusable(model_dir: Path, rule: str, reason: str, fix: str) -> ConfigError:
    return ConfigError([problem("model", str(model_dir), rule, reason, fix)])
