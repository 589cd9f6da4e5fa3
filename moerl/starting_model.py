"""The model that a run starts from: its folder, its tokenizer, the tokens that end a response.

transformers reads it, in a process of its own (`python -m moerl.starting_model`), so that the driver imports neither transformers nor
torch.
"""

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from moerl.cluster.forks.fork_client import CannotForkError, ForkedProcess, can_fork
from moerl.config.schema.model_config import ModelConfig
from moerl.config.schema.run_config import RunConfig
from moerl.models.plain_tokenizer import PlainForm, PlainTokenizer, Tokenizer
from moerl.types.errors import MoerlError
from moerl.types.system_errors import told_of_system


@dataclass(frozen=True, slots=True, kw_only=True)
class RunModel:
    directory: Path
    tokenizer: Tokenizer
    stop_token_ids: tuple[int, ...]


_Answer = tuple[tuple[int, ...], PlainForm | None]
"""Tokens that end a response, and the tokenizer if it can do without transformers."""


def load_model(config: RunConfig, environment: Mapping[str, str] | None = None) -> RunModel:
    """Its folder, which a model from scratch gets first, and what is needed of it beside the weights. `environment`: of the process that
    reads it; this one's if not given. Raises ConfigError, CheckpointError."""
    directory = config.run_dir / "model" if config.model.path is None else Path(config.model.path)
    answer = _ask((config.model, directory, config.seed), os.environ if environment is None else environment)
    if isinstance(answer, MoerlError):
        raise answer
    stop_token_ids, form = answer
    tokenizer = _own_tokenizer(directory) if form is None else PlainTokenizer(form)
    return RunModel(directory=directory, tokenizer=tokenizer, stop_token_ids=stop_token_ids)


def _own_tokenizer(directory: Path) -> Tokenizer:
    """One that works in Python: there this process imports transformers."""
    from moerl.models.transformers_tokenizer import chat_template_of, read_tokenizer

    tokenizer: Any = read_tokenizer(directory)
    tokenizer.chat_template = chat_template_of(tokenizer)
    return tokenizer


def _ask(request: tuple[ModelConfig, Path, int], environment: Mapping[str, str]) -> _Answer | MoerlError:
    """Both ways by pickle, through files that have no name: the process runs nobody's code but moerl's."""
    with tempfile.TemporaryFile() as asked, tempfile.TemporaryFile() as answered:
        pickle.dump(request, asked)
        asked.seek(0)
        code = _process(asked, answered, environment).wait()
        answered.seek(0)
        if code != 0:
            raise MoerlError(f"{request[1]}: the process that reads the model ended with {code}; what it wrote is above")
        answer: _Answer | MoerlError = pickle.load(answered)
        return answer


def _process(asked: IO[bytes], answered: IO[bytes], environment: Mapping[str, str]) -> "ForkedProcess | subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "moerl.starting_model"]
    if can_fork(command):
        try:
            return ForkedProcess(command, stdin=asked.fileno(), stdout=answered.fileno(), stderr=2, environment=environment)
        except CannotForkError:
            pass  # as in every other place, it is executed
    return subprocess.Popen(command, stdin=asked, stdout=answered, env=dict(environment))


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no part of the answer
    try:
        answer: _Answer | MoerlError = _read(*pickle.load(sys.stdin.buffer))
    except Exception as error:
        told = told_of_system(error)  # a full disk, by whatever class a library tells of it
        if not isinstance(told, MoerlError):
            raise
        answer = told
    with answers:
        pickle.dump(answer, answers)


def _read(model: ModelConfig, directory: Path, seed: int) -> _Answer:
    from moerl.models.transformers_tokenizer import plain_form, read_tokenizer, stop_tokens
    from moerl.scratch_model import write_scratch_model

    if model.path is None and not directory.exists():
        assert model.scratch is not None
        write_scratch_model(model.scratch, model.max_context, directory, seed)
    tokenizer = read_tokenizer(directory)
    return stop_tokens(directory, tokenizer), plain_form(tokenizer)


if __name__ == "__main__":
    main()
