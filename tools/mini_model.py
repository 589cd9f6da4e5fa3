"""Write a tiny random checkpoint: python tools/mini_model.py runs/mini num_layers=2 num_experts=4"""

from pathlib import Path
from typing import Annotated

import typer
from pydantic import TypeAdapter, ValidationError

from moerl.config.schema.model_config import ScratchModel
from moerl.scratch_model import write_scratch_model
from moerl.types.errors import CheckpointError


def main(
    directory: Annotated[Path, typer.Argument(help="Must not exist yet.")],
    settings: Annotated[
        list[str] | None, typer.Argument(help="name=value, the names of model.scratch; the rest keeps its default.")
    ] = None,
    max_context: Annotated[int, typer.Option(help="max_position_embeddings of the model.")] = 128,
    seed: int = 0,
) -> None:
    """A randomly initialised model with a character tokenizer, as a Hugging Face checkpoint."""
    pairs = dict(setting.partition("=")[::2] for setting in settings) if settings is not None else {}
    try:
        scratch = TypeAdapter(ScratchModel).validate_strings(pairs)
        write_scratch_model(scratch, max_context, directory, seed)
    except (ValidationError, CheckpointError) as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(f"wrote {directory}")


if __name__ == "__main__":
    typer.run(main)
