"""Commands about checkpoints: `moerl convert`, `inspect`, `compare`. What a command needs is imported inside it."""

from pathlib import Path
from typing import Annotated

import typer

from moerl.types.exit_codes import ExitCode

checkpoints = typer.Typer()


@checkpoints.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A Hugging Face folder, RUN/checkpoints/step-N, or torch_dist of others.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="Must not exist, or be empty.")],
    to: Annotated[
        str, typer.Option(help="hf: a Hugging Face folder. moerl: what a run loads. moe: dense made experts. megatron_bridge: for it.")
    ] = "hf",
    dtype: Annotated[str, typer.Option(help="keep, bfloat16, float16, float32, or fp8 (blocks of 128 x 128).")] = "keep",
    scales: Annotated[str, typer.Option(help="Of fp8: float32, or ue8m0 (powers of two).")] = "float32",
    files_from: Annotated[
        Path | None, typer.Option(help="The folder with config.json and tokenizer, if not SRC or its run's model.", show_default=False)
    ] = None,
    experts: Annotated[int | None, typer.Option(help="Of --to moe: copies of the MLP in a layer.", show_default=False)] = None,
    top_k: Annotated[int | None, typer.Option(help="Of --to moe: experts of a token.", show_default=False)] = None,
    router_seed: Annotated[int | None, typer.Option(help="Of --to moe: of the random routers; 0 if not given.", show_default=False)] = None,
    shard_gb: Annotated[float, typer.Option(help="About the size of a file, in 1e9 bytes.", min=1e-6)] = 5.0,
    workers: Annotated[int, typer.Option(help="Files written at the same time.", min=1)] = 2,
    nonfinite: Annotated[str, typer.Option(help="NaN and infinities among weights: warn, error, or ignore.")] = "warn",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be written, and stop.")] = False,
) -> None:
    """Convert a checkpoint; the same command goes on where it was interrupted."""
    from moerl.convert.conversion import conversion_of
    from moerl.convert.conversion import convert as run_conversion

    conversion = conversion_of(
        source, target, files_from=files_from, shard_gb=shard_gb, workers=workers, to=to, dtype=dtype, scales=scales,
        nonfinite=nonfinite, experts=experts, top_k=top_k, router_seed=router_seed,
    )  # fmt: skip
    typer.echo(run_conversion(conversion, dry_run=dry_run))


@checkpoints.command()
def inspect(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A Hugging Face folder, or one checkpoint of a run.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read every file and compare it with its digest.")] = False,
) -> None:
    """Print the tensors of a checkpoint: names, dtypes, shapes, bytes, and totals."""
    from moerl.convert.inspect import inspection

    typer.echo(inspection(path, verify=verify))


@checkpoints.command()
def compare(
    left: Annotated[Path, typer.Argument(metavar="A")],
    right: Annotated[Path, typer.Argument(metavar="B")],
    tolerance: Annotated[float, typer.Option(help="The largest absolute difference that counts as equal.", min=0.0)] = 0.0,
) -> None:
    """Compare two checkpoints tensor by tensor; exit code 1 if they differ."""
    from moerl.convert.compare import compared

    comparison = compared(left, right, tolerance=tolerance)
    typer.echo(str(comparison))
    if not comparison.is_equal:
        raise typer.Exit(ExitCode.FAILED)
