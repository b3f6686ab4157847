"""loramux finetune and loramux trainer: fine-tuning jobs on a running server, and the process that runs them."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from loramux.common import logs
from loramux.common.settings.file import Settings, load_settings
from loramux_api.cli.common import CommandGroup, config_option, json_option, put, table
from loramux_api.cli.remote import Remote, on_server
from loramux_client.objects import FineTuningEvent, FineTuningJob

if TYPE_CHECKING:
    from loramux.training.trainer import Trainer

logger = logging.getLogger(__name__)
ENDED = ("succeeded", "failed", "cancelled")
POLL_SECONDS = 1.0
IDLE_SECONDS = 30.0
"""Seconds without a job after which a trainer ends that a server has started."""
STDIN = 0


@click.group(cls=CommandGroup)
def finetune() -> None:
    """Fine-tune a base, or one of your adapters, on a file of examples.

    \b
    Example:
      export LORAMUX_API_KEY=sk-lm-...
      loramux finetune create examples.jsonl --model qwen3-8b --suffix support --watch
      loramux finetune list
    """


@finetune.command("create")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--model", required=True, help="A base model, or one of your adapters to go on from.")
@click.option("--suffix", help="Name of the adapter; default: a new name.")
@click.option(
    "--validation",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A second file, whose loss is measured after each epoch.",
)
@click.option("--epochs", type=click.IntRange(1, 100), help="Number of epochs. Default: the server's choice.")
@click.option("--batch-size", type=click.IntRange(1, 256), help="Examples in a step. Default: the server's choice.")
@click.option("--learning-rate-multiplier", type=float, help="Factor of the server's learning rate. Default: 1.")
@click.option("--seed", type=click.IntRange(0), help="Seed of the order and of the first weights.")
@click.option("--rank", type=click.IntRange(1), help="Rank of the adapter. Default: the server's choice.")
@click.option("--watch", "watches", is_flag=True, help="Wait for the end, and show the progress.")
@on_server
def create(
    remote: Remote,
    file: Path,
    *,
    model: str,
    suffix: str | None,
    validation: Path | None,
    watches: bool,
    **given: object,
) -> None:
    """Send FILE, lines of {messages, tools}, and fine-tune MODEL on it.

    \b
    Example:
      loramux finetune create examples.jsonl --model qwen3-8b --suffix support --epochs 3 --watch
    """
    wishes = {name: given[name] for name in ("batch_size", "learning_rate_multiplier") if given[name] is not None}
    if given["epochs"] is not None:
        wishes["n_epochs"] = given["epochs"]
    client = remote.client
    made = client.fine_tuning.run(
        file,
        model,
        suffix=suffix,
        validation=validation,
        hyperparameters=wishes or None,
        seed=given["seed"],
        lora=None if given["rank"] is None else {"r": given["rank"]},
    )
    _end(remote, _watched(remote, made.id) if watches else made)


@finetune.command("list")
@click.option("--limit", type=click.IntRange(1, 100), default=20, show_default=True, help="Number of jobs.")
@on_server
def list_jobs(remote: Remote, limit: int) -> None:
    """List your project's jobs, newest first.

    \b
    Example:
      loramux finetune list
    """
    found = remote.client.fine_tuning.list(limit=limit)
    remote.put(found, _jobs_table(found) or "No jobs yet; create one: loramux finetune create FILE --model M")


@finetune.command("watch")
@click.argument("id")
@on_server
def watch(remote: Remote, id: str) -> None:
    """Show the progress of a job until its end.

    \b
    Example:
      loramux finetune watch ftjob-...
    """
    _end(remote, _watched(remote, id))


@finetune.command("cancel")
@click.argument("id")
@on_server
def cancel(remote: Remote, id: str) -> None:
    """Cancel a job. Its last checkpoint becomes a revision, and the tokens up to it are billed.

    \b
    Example:
      loramux finetune cancel ftjob-...
    """
    found = remote.client.fine_tuning.cancel(id)
    remote.put(found, _jobs_table([found]))


@click.command()
@config_option(required=False)
@click.option(
    "--idle-seconds",
    type=click.FloatRange(0),
    help="End after this time without a job, and give the machine back; default: never.",
)
@click.option("--settings-on-stdin", is_flag=True, hidden=True)
@json_option
def trainer(config: Path | None, *, idle_seconds: float | None, settings_on_stdin: bool, as_json: bool) -> None:
    """Run fine-tuning jobs of the servers with the same database and store. SIGTERM or Ctrl-C stops it.

    Its jobs then go on from their last checkpoints, here or elsewhere. It needs the extra `loramux[training]`.

    \b
    Example:
      loramux trainer --config loramux.toml
      ray job submit --entrypoint-num-gpus 1 -- loramux trainer --config loramux.toml --idle-seconds 600
    """
    os.umask(0o077)
    if settings_on_stdin:
        with open(STDIN, "rb", buffering=0, closefd=False) as stdin:  # no byte is read ahead: notes follow
            settings = msgspec.json.decode(stdin.readline(), type=Settings)
    elif config is not None:
        settings = load_settings(config)
    else:
        raise click.UsageError("give the settings of the servers: --config FILE")
    logs.configure(settings.logging.format, settings.logging.level)
    if not settings_on_stdin:
        put(
            as_json, {"config": str(config)}, f"loramux: taking fine-tuning jobs of {config}. Ctrl-C stops the trainer."
        )
    asyncio.run(
        _run(settings, IDLE_SECONDS if settings_on_stdin else idle_seconds, STDIN if settings_on_stdin else None)
    )


async def _run(settings: Settings, idle_seconds: float | None, notes: int | None) -> None:
    """Run jobs until a signal, or until no job has come for `idle_seconds`. `notes`: the pipe with a server's notes."""
    from loramux.server.trainer import open_trainer
    from loramux_api.training_examples import example_format

    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    async with open_trainer(settings, example_format, notes) as trainer:
        await _tend(trainer, stopped, idle_seconds)


async def _tend(trainer: Trainer, stopped: asyncio.Event, idle_seconds: float | None) -> None:
    from loramux.common.errors import LoramuxError
    from loramux.training.trainer import LOOK_SECONDS

    busy_at = time.monotonic()
    while not stopped.is_set():
        try:
            if await trainer.tend():
                busy_at = time.monotonic()
        except LoramuxError as error:  # the database or the store does not answer at present
            logger.warning("the trainer waits: %s", error)
        if idle_seconds is not None and time.monotonic() - busy_at > idle_seconds:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_SECONDS):
                await stopped.wait()


def _watched(remote: Remote, id: str) -> FineTuningJob:
    """Show a job's progress on standard error, and return the ended job."""
    console = Console(stderr=True, quiet=remote.as_json)
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[figures]}"), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("waiting", total=None, figures="")
        while (job := remote.client.fine_tuning.get(id)).status not in ENDED:
            figures = _latest(remote.client.fine_tuning.events(id, limit=10))
            progress.update(
                bar,
                description=job.status,
                completed=figures.get("step", 0),
                total=figures.get("total_steps"),
                figures=f"loss {figures['train_loss']:.4f}, {figures['trained_tokens']:.0f} tokens"
                if "train_loss" in figures
                else "",
            )
            time.sleep(POLL_SECONDS)
    return job


def _latest(events: list[FineTuningEvent]) -> dict[str, float]:
    return next((event.data for event in events if event.data and "train_loss" in event.data), {})


def _end(remote: Remote, job: FineTuningJob) -> None:
    remote.put(job, _jobs_table([job]))
    if job.status == "failed":
        raise click.exceptions.Exit(1)


def _jobs_table(found: list[FineTuningJob]) -> str:
    rows = [
        (one.id, one.status, one.fine_tuned_model or one.model, one.trained_tokens, one.error and one.error.message)
        for one in found
    ]
    return table(("id", "state", "model", "trained tokens", "error"), rows)
