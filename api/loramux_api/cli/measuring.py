"""loramux measure: the speed of this machine's engine and server, as a profile for `plan` and `simulate`."""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import subprocess
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import click
import msgspec

from loramux.common.settings.file import Settings, load_settings
from loramux.common.settings.serving import ModelSettings
from loramux.engine.messages import ModelFacts
from loramux.simulator.fitting import fit_device, fit_steps
from loramux.simulator.hardware import WEIGHT_BITS, Front, MeasuredSteps, Model, StepWork
from loramux.simulator.measuring import RANKS, EngineMeasurement, running_engine, write_adapter
from loramux.simulator.profiles import Profile
from loramux.simulator.scenario import model_of
from loramux_api.cli.common import CONFIG_HELP, json_option, note, put
from loramux_api.cli.default_server import model_name
from loramux_api.cli.front_cost import free_port, measure_front, server_settings

FRONT_SHARE = 0.2
"""Share of the time that the server's own cost takes."""


@click.command()
@click.argument("model", required=False, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--config",
    type=click.Path(dir_okay=False, path_type=Path),
    help=f"{CONFIG_HELP} The engine's settings are measured.",
)
@click.option("--base", metavar="NAME", help="With --config: the base to measure. Default: the first.")
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default="profile.json",
    show_default=True,
    metavar="FILE",
    help="The profile.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(5, 3600),
    default=50,
    show_default=True,
    help="Time for measuring; loading the model twice comes on top.",
)
@click.option("--skip-server", is_flag=True, help="Measure the engine alone, and estimate the server's own process.")
@json_option
def measure(
    model: Path | None,
    config: Path | None,
    base: str | None,
    output: Path,
    seconds: float,
    skip_server: bool,
    as_json: bool,
) -> None:
    """Measure this machine: the times of an engine's steps, of loads, and of the server's own process.

    MODEL is the folder of a transformers checkpoint; --config takes model and engine settings from a settings file
    instead. Nothing else should run on the machine. The profile is for `loramux plan --profile FILE` and
    `loramux simulate --profile FILE`. No server may run on the same card.

    \b
    Example:
      loramux measure ./Llama-3.1-8B-Instruct --output h100-llama.json
      loramux plan --workload requests.jsonl --profile h100-llama.json --ttft-ms 1000
    """
    settings = _settings(model, config, base)
    profile = asyncio.run(_measure(settings, seconds, skip_server, as_json))
    output.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")
    note(as_json, f"The profile is in {output}.")
    put(as_json, profile, _text(profile))


def _settings(model: Path | None, config: Path | None, base: str | None) -> Settings:
    """Return settings with one base, the measured one."""
    if (model is None) == (config is None):
        raise click.UsageError("give either MODEL or --config with a settings file")
    if model is not None:
        return Settings(model=ModelSettings(path=str(model.absolute()), served_model_name=model_name(model)))
    assert config is not None
    settings = load_settings(config)
    found = [one for one in settings.served_bases if base in (None, one.name)]
    if not found:
        names = ", ".join(one.name for one in settings.served_bases)
        raise click.BadParameter(f"{config} has no base {base!r}; it has {names}", param_hint="--base")
    return msgspec.structs.replace(settings, model=found[0].model, engine=found[0].engine, bases=())


async def _measure(settings: Settings, seconds: float, skip_server: bool, as_json: bool) -> Profile:
    path = Path(settings.model.path)
    with tempfile.TemporaryDirectory(prefix="loramux-measure-") as name:
        folder = Path(name)
        note(as_json, f"loading {path.name}")
        ranks = [rank for rank in RANKS if rank <= settings.adapters.max_rank]
        folders = {rank: folder / f"r{rank}" for rank in ranks}
        for rank in ranks:
            await asyncio.to_thread(write_adapter, folders[rank], path, rank)
        async with running_engine(settings) as engine:
            shape = _shape(settings, engine.facts)
            engine_seconds = seconds if skip_server else (1 - FRONT_SHARE) * seconds
            measurement = EngineMeasurement(
                engine, shape, folders, engine_seconds, lambda part: note(as_json, f"measuring {part}")
            )
            measured, loads = await measurement.run()
            facts = engine.facts
        steps = fit_steps(shape, measured)
        front = None
        if not skip_server:
            note(as_json, "measuring the server")
            front = await measure_front(server_settings(settings, folder / "server", free_port()), steps, facts.limits)
    on_cpu = _card(settings.engine.device) is None
    pool_bytes = facts.pages_total * facts.block_size * shape.kv_bytes_per_token
    device = fit_device(steps, loads, pool_bytes=pool_bytes, is_shared_by_ranks=on_cpu, front=front)
    return Profile(
        machine=_machine(settings.engine.device),
        commit=_commit(),
        date=datetime.now(UTC).date().isoformat(),
        model_name=settings.model.served_model_name,
        engine={
            "dtype": facts.dtype,
            "quantization": settings.model.quantization,
            "kv_cache_dtype": facts.kv_cache_dtype,
            "num_threads": settings.engine.num_threads or (os.cpu_count() if on_cpu else None),
            "block_size": facts.block_size,
        },
        device=device,
    )


def _shape(settings: Settings, facts: ModelFacts) -> Model:
    return msgspec.structs.replace(
        model_of(settings.model.path),
        bytes_per_element=4 if facts.dtype == "float32" else 2,
        bits_per_weight=WEIGHT_BITS.get(settings.model.quantization),
        bytes_per_kv_element=1 if facts.kv_cache_dtype == "fp8" else None,
    )


def _card(device: str) -> str | None:
    """Return the name of the GPU that the engine uses; None: it uses the CPU."""
    tool = shutil.which("nvidia-smi")
    if device == "cpu" or tool is None:
        return None
    index = device.partition(":")[2] or "0"
    command = [tool, "--query-gpu=name", "--format=csv,noheader", "-i", index]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - the driver's own tool
    return done.stdout.strip() or None


def _machine(device: str) -> str:
    if card := _card(device):
        return card
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


def _commit() -> str:
    """Return the checkout's commit, or the release if the package is installed."""
    git = shutil.which("git")
    if git is not None:
        here = str(Path(__file__).parent)
        command = [git, "-C", here, "log", "-1", "--format=%h", "--", here]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own command
        if done.returncode == 0 and done.stdout.strip():
            head = [git, "-C", here, "rev-parse", "--short=12", "HEAD"]
            return subprocess.run(head, capture_output=True, text=True, check=False).stdout.strip()  # noqa: S603
    return version("loramux")


def _text(profile: Profile) -> str:
    steps, front = profile.device.measured, profile.device.front
    assert steps is not None
    lines = [f"Profile        {profile.source}", *_step_lines(steps)]
    device = profile.device
    lines.append(f"Loads          {1e3 * device.load_overhead_s:.1f} ms and {device.link_bandwidth / 1e9:.2f} GB/s")
    lines.append(f"Server         {_front_text(front)}")
    return "\n".join(lines)


def _step_lines(steps: MeasuredSteps) -> list[str]:
    def milliseconds(work: StepWork) -> str:
        return f"{1e3 * steps.seconds(work):,.2f} ms"

    model, prompt, rank = steps.model, steps.token_s[-1][0], 16
    rows = sorted({1, steps.row_s[-1][0]})
    lines = [f"Decode         {n} rows: {milliseconds(StepWork(n, n, n, 0, 0, n))}" for n in rows]
    lines.append(
        f"Prompt         {prompt} tokens: {milliseconds(StepWork(prompt, prompt, prompt * prompt // 2, 0, 0))}"
    )
    one = model.adapter_bytes(rank)
    for number in (1, rows[-1]):
        work = StepWork(rows[-1], rows[-1], rows[-1], number * one, rows[-1] * rank, rows[-1], number)
        lines.append(f"Adapters       {number} of rank {rank}, {rows[-1]} rows: {milliseconds(work)}")
    return lines


def _front_text(front: Front | None) -> str:
    if front is None:
        return "not measured"
    return (
        f"{1e6 * front.token_s:.0f} us a token, {1e3 * front.request_s:.2f} ms a request, "
        f"{1e3 * front.latency_s:.2f} ms to an idle engine and back"
    )
