"""The command line: ``packload``."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import packload

try:
    from packload.demo.run import Settings, run
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "matplotlib":
        raise
    _DEMO_INSTALLED = False
else:
    _DEMO_INSTALLED = True

app = typer.Typer(help="Packed batches for PyTorch.", no_args_is_help=True, pretty_exceptions_enable=False)
console = Console()


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(packload.__version__)
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Packed batches for PyTorch."""


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=1, help="Training steps, padded and packed.")] = 30,
    more_steps: Annotated[int, typer.Option(min=0, help="Packed training steps after those.")] = 120,
    batch_size: Annotated[int, typer.Option(min=1, help="Reviews in a batch.")] = 32,
    held_out: Annotated[int, typer.Option(min=1, help="Reviews to test on.")] = 1000,
    limit: Annotated[int | None, typer.Option(min=2, help="Use only so many reviews.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the split, the weights and the order.")] = 0,
    device: Annotated[str, typer.Option(help="Where to train: cpu, cuda.")] = "cpu",
    threads: Annotated[int, typer.Option(min=1, help="Threads of PyTorch on the CPU.")] = 1,
    out: Annotated[Path, typer.Option(help="The picture to write.")] = Path("demo.png"),
) -> None:
    """Train a transformer on movie reviews, in padded and in packed batches, and compare."""
    if not _DEMO_INSTALLED:
        typer.echo("the demo needs more packages: pip install 'packload[demo]'", err=True)
        raise typer.Exit(1)
    settings = Settings(steps, more_steps, batch_size, held_out, limit, seed, device, threads, out)
    try:
        run(settings, console)
    except FileNotFoundError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
