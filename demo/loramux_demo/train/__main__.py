"""`python -m loramux_demo.train`: train the demo's models, or evaluate existing ones."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from loramux_demo.assets import ASSETS
from loramux_demo.train.dataset import STYLES
from loramux_demo.train.models import RECIPES


@click.command()
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder to write the trained models to.")
@click.option(
    "--evaluate",
    "evaluate_only",
    is_flag=True,
    help="Do not train: measure the models in --out, or the shipped ones.",
)
@click.option("--only", type=click.Choice(sorted(RECIPES)), help="Train one adapter, on the base that is in --out.")
def main(out: Path | None, evaluate_only: bool, only: str | None) -> None:
    """Train the demo's base model and its six adapters (minutes on two cores), and measure them."""
    if out is None and not evaluate_only:
        raise click.UsageError("say where to write the models (--out DIR), or measure the shipped ones (--evaluate)")
    quieten()
    if out and not evaluate_only:
        train(out, only)
    measure(out or ASSETS, [only] if only else list(STYLES))


def quieten() -> None:
    """Silence transformers' own output."""
    import transformers

    warnings.simplefilter("ignore", FutureWarning)
    logging.getLogger("peft").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def train(out: Path, only: str | None) -> None:
    """Train everything into `out`, or one adapter, with a progress bar per model."""
    from loramux_demo.train.models import OnStep, Schedule, make, make_adapter

    columns = (TextColumn("{task.description:8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("loss {task.fields[loss]:.4f}"), console=Console(stderr=True)) as bars:

        def stage(name: str, schedule: Schedule) -> OnStep:
            bar = bars.add_task(name, total=schedule.steps, loss=float("nan"))
            return lambda step, loss: bars.update(bar, completed=step, loss=loss)

        if only:
            make_adapter(only, out, stage)
        else:
            make(out, stage)


def measure(root: Path, names: Sequence[str]) -> None:
    """Print the table of these models' exact answers."""
    from loramux_demo.train.models import evaluate

    table = Table("model", "float32", "bfloat16", "bfloat16, later in a chat", title="Exact answers")
    console = Console()
    with console.status("asking every model every question"):
        for accuracy in evaluate(root, names):
            shares = (accuracy.float32, accuracy.bfloat16, accuracy.later)
            table.add_row(accuracy.model, *(f"{share:.1%}" for share in shares))
    console.print(table)


if __name__ == "__main__":
    main()
