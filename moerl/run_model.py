"""The model that a run starts from: its folder, its tokenizer, the tokens that end a response."""

from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from moerl.config.schema.run_config import RunConfig
from moerl.models.transformers_config import read_transformers_config
from moerl.scratch_model import write_scratch_model
from moerl.types.errors import ConfigError, MoerlError, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class RunModel:
    directory: Path
    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: tuple[int, ...]


def load_model(config: RunConfig) -> RunModel:
    """Its folder, which a model from scratch gets first, and what is needed of it beside the weights."""
    if config.model.path is not None:
        directory = Path(config.model.path)
    else:
        assert config.model.scratch is not None
        directory = config.run_dir / "model"
        if not directory.exists():
            write_scratch_model(config.model.scratch, config.model.max_context, directory, config.seed)
    tokenizer = _read_tokenizer(directory)
    return RunModel(directory=directory, tokenizer=tokenizer, stop_token_ids=_stop_tokens(directory, tokenizer))


def _read_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Tokenizer, of a class of transformers: code of the folder is not run. Raises ConfigError."""
    try:
        return AutoTokenizer.from_pretrained(directory, config=read_transformers_config(directory), trust_remote_code=False)
    except MoerlError:
        raise
    except Exception as error:  # tokenizers raise it itself
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        fix = "the tokenizer files of the published model, as transformers reads them without code of the folder"
        found = Problem(path="model", value=str(directory), rule="must have a tokenizer that can be read", reason=reason, fix=fix)
        raise ConfigError([found]) from error


def _stop_tokens(model_dir: Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Tokens of generation_config.json where there is one: chat models list more than the tokenizer's eos there."""
    eos = tokenizer.eos_token_id
    if (model_dir / "generation_config.json").exists():
        listed = _listed_stop_tokens(model_dir)
        eos = eos if listed is None else listed
    if eos is None:
        reason = "a response would never end"
        fix = "eos_token_id in generation_config.json"
        raise ConfigError([Problem(path="model", value=str(model_dir), rule="must name an end-of-sequence token", reason=reason, fix=fix)])
    return tuple(eos) if isinstance(eos, list) else (eos,)


def _listed_stop_tokens(model_dir: Path) -> int | list[int] | None:
    try:
        found = GenerationConfig.from_pretrained(model_dir).eos_token_id
    except (OSError, TypeError, ValueError) as error:  # transformers' own, of a file that it cannot read
        rule, fix = "must have a generation_config.json that can be read", "fetch that file again, or remove it"
        raise ConfigError([Problem(path="model", value=str(model_dir), rule=rule, reason=str(error), fix=fix)]) from error
    if not all(isinstance(each, int) for each in (found if isinstance(found, list) else [found or 0])):
        rule, reason = "must name tokens by their numbers in generation_config.json", f"eos_token_id is {found!r}"
        raise ConfigError([Problem(path="model", value=str(model_dir), rule=rule, reason=reason, fix="eos_token_id: NUMBER")])
    return found
