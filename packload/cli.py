"""The command line: ``packload``."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import packload
from packload.report import command as policies_command
from packload.shards import cli as shards_cli

try:
    from packload.demo.run import Settings, run
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "matplotlib":
        raise
    _DEMO_INSTALLED = False
else:
    _DEMO_INSTALLED = True

try:
    from packload.report.picture import save_picture
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "matplotlib":
        raise
    _PLOT_INSTALLED = False
else:
    _PLOT_INSTALLED = True

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


app.command()(shards_cli.shard)
app.command()(shards_cli.index)


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


@app.command()
def policies(
    source: Annotated[
        str, typer.Argument(help="Lengths: a .csv or .npy file, or a data set as module:attribute.")
    ],
    batch_size: Annotated[int, typer.Option(min=1, help="Samples of a random and of a bucketed batch.")],
    budget: Annotated[float, typer.Option(help="What a batch filled to a budget costs at most.")],
    world_size: Annotated[int, typer.Option(min=1, help="Number of ranks.")] = 1,
    column: Annotated[
        list[str] | None, typer.Option(help="Column of the file, or field; again for samples of two sizes.")
    ] = None,
    cost: Annotated[str | None, typer.Option(help=policies_command.COST_HELP)] = None,
    seed: Annotated[int, typer.Option(help="Seed of the plans.")] = 0,
    oversize: Annotated[
        str, typer.Option(help=f"Samples above the budget: {', '.join(policies_command.OVERSIZE)}.")
    ] = "raise",
    picture: Annotated[Path | None, typer.Option(help="A picture to draw, e.g. policies.png.")] = None,
) -> None:
    """Compare random, bucketed and budget batches on the lengths of your data."""
    if picture is not None and not _PLOT_INSTALLED:
        typer.echo("a picture needs matplotlib: pip install 'packload[plot]'", err=True)
        raise typer.Exit(1)
    sys.path.insert(0, str(Path.cwd()))  # as for python -m: data sets of the project at hand are found
    options = policies_command.Options(
        source, column or (), batch_size, budget, world_size, cost, seed, oversize, picture
    )
    try:
        policies_command.run(options, console, save_picture if picture is not None else None)
    except policies_command.SourceError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
