"""Options that `loramux plan` and `loramux simulate` share: the workload, and the devices and models."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from loramux.common.units import DAY, HOUR, MINUTE
from loramux.data.entities import ServedRequest
from loramux.engine.messages import ServiceClass
from loramux.simulator.description import describe_log, traffic_as_toml
from loramux.simulator.hardware import DEVICES, MODELS, WEIGHT_BITS, Device, Model
from loramux.simulator.profiles import Profile, profile_names, read_profile
from loramux.simulator.scenario import ScenarioError, model_of
from loramux.simulator.traffic import LoggedRequest
from loramux_api.cli.common import config_option, note, with_billing

MOST_LOGGED = 100_000
"""Maximum number of requests that are taken from the ledger; the newest are taken."""
MOST_DAYS = 90
UNKNOWN_RANK = 16
_AGES = {"m": MINUTE, "h": HOUR, "d": DAY}

Milliseconds = click.FloatRange(min=0, min_open=True)

Command = TypeVar("Command", bound=Callable[..., Any])


def workload_options(command: Command) -> Command:
    """Add the options that choose a workload."""
    options = [
        click.option(
            "--workload",
            type=click.Path(dir_okay=False, path_type=Path),
            metavar="FILE",
            help="Requests: a log (.jsonl, .csv) or a description (.toml).",
        ),
        click.option(
            "--from-usage", metavar="TIME", help="Instead: the requests of the last TIME in --config's database, as 7d."
        ),
        click.option("--base", metavar="NAME", help="With --from-usage: only requests to this base and its adapters."),
        click.option(
            "--save-workload",
            "save_to",
            type=click.Path(dir_okay=False, path_type=Path),
            metavar="FILE",
            help="With --from-usage: write the workload, as a log (.jsonl) or a description (.toml).",
        ),
        config_option(required=False),
    ]
    return _decorated(command, options)


def device_options(command: Command) -> Command:
    """Add the options that choose a device and a form of the model."""
    options = [
        click.option("--gpu", type=click.Choice(list(DEVICES)), help="Device, estimated from its data sheet."),
        click.option(
            "--profile",
            metavar="FILE|NAME",
            help=f"Instead: a measured device. {_shipped()}`loramux measure` writes one.",
        ),
        click.option(
            "--dollars-per-hour", type=click.FloatRange(min=0), help="Price of one GPU; default: a list price."
        ),
        click.option(
            "--quantization",
            type=click.Choice(["none", *WEIGHT_BITS]),
            help="Form of the linears' weights; default: none, or the profile's.",
        ),
        click.option(
            "--kv-cache-dtype",
            type=click.Choice(["auto", "fp8"]),
            help="Form of keys and values; default: auto, or the profile's.",
        ),
        click.option(
            "--tensor-parallel-size",
            type=click.IntRange(1, 64),
            default=1,
            show_default=True,
            help="Ranks of an engine, each on a separate GPU.",
        ),
    ]
    return _decorated(command, options)


def _decorated(command: Command, options: Sequence[Callable[[Any], Any]]) -> Command:
    for option in reversed(options):
        command = option(command)
    return command


def _shipped() -> str:
    return f"Shipped: {', '.join(names)}. " if (names := profile_names()) else ""


@dataclass(frozen=True, slots=True)
class Hardware:
    """A device, and the models that it serves."""

    gpu: str
    """Name of the device."""
    device: Device
    """Resources of one rank, at the price of all."""
    models: Mapping[str, Model]
    """One rank's share of each model, by the base's name; the name is empty if there is one model."""
    profile: Profile | None
    quantization: str
    kv_cache_dtype: str
    num_ranks: int

    def times_of(self, model: Model) -> str:
        """Return the source of the times of steps, as a phrase."""
        if self.profile is None:
            return f"ESTIMATED from the data sheet of {self.gpu}; `loramux measure` measures a machine"
        if self.device.measured_steps_of(model) is None:
            return f"ESTIMATED for another model or form than the {self.profile.source}"
        return self.profile.source

    def others(self) -> dict[str, Device]:
        """Return the other presets, each with the resources of a rank."""
        if self.profile is not None:
            return {}
        presets = ((name, device) for name, device in DEVICES.items() if not device.is_shared_by_ranks)
        return {name: device.of_rank(self.num_ranks) for name, device in presets if name != self.gpu}


def choose_hardware(
    gpu: str | None,
    profile: str | None,
    models: Sequence[str],
    dollars_per_hour: float | None,
    quantization: str | None,
    kv_cache_dtype: str | None,
    tensor_parallel_size: int,
) -> Hardware:
    """Return the device and the models that the options choose. Raises ScenarioError."""
    measured = None if profile is None else read_profile(profile)
    if measured is not None and gpu is None:
        device = measured.device
    elif measured is None and gpu is not None:
        device = DEVICES[gpu]
    else:
        raise click.UsageError("give either --gpu, an estimate from a data sheet, or --profile, a measured device")
    if dollars_per_hour is not None:
        device = msgspec.structs.replace(device, dollars_per_hour=dollars_per_hour)
    named = _named_models(models, measured)
    changes: dict[str, Any] = {}
    if quantization is not None:
        changes["bits_per_weight"] = WEIGHT_BITS.get(quantization)
    if kv_cache_dtype is not None:
        changes["bytes_per_kv_element"] = 1 if kv_cache_dtype == "fp8" else None
    shapes = {name: msgspec.structs.replace(model, **changes) for name, model in named.items()}
    if tensor_parallel_size > 1:
        try:
            shapes = {name: shape.share_of(tensor_parallel_size) for name, shape in shapes.items()}
        except ValueError as error:
            raise ScenarioError(f"--tensor-parallel-size: {error}") from error
        device = device.of_rank(tensor_parallel_size)
    is_fp8 = any(shape.bytes_per_kv_element == 1 for shape in shapes.values())
    return Hardware(
        gpu=gpu or (measured.machine if measured else ""),
        device=device,
        models=shapes,
        profile=measured,
        quantization=quantization or (str(measured.engine["quantization"]) if measured and not models else "none"),
        kv_cache_dtype="fp8" if is_fp8 else "auto",
        num_ranks=tensor_parallel_size,
    )


def _named_models(models: Sequence[str], profile: Profile | None) -> dict[str, Model]:
    """Return the models by the bases' names. Without any, that of the profile."""
    if not models:
        if profile is None:
            raise click.UsageError(f"give --model: a config.json, its folder, or one of {', '.join(MODELS)}")
        return {"": profile.model}
    named = {}
    for text in models:
        name, separator, place = text.partition("=")
        name, place = (name, place) if separator else ("", text)
        if len(models) > 1 and not name:
            raise click.UsageError(f"with several bases, each has a name: --model NAME={text}")
        if name in named:
            raise click.UsageError(f"--model has the base {name!r} twice")
        named[name] = profile.model if profile and place == profile.model_name else model_of(place)
    return named


def usage_log(config: Path | None, age: str, base: str | None) -> list[LoggedRequest]:
    """Return the requests that the database's servers served in the last `age`, the newest MOST_LOGGED at most."""
    number, unit = age[:-1], age[-1:]
    if not (number.isdecimal() and unit in _AGES and 0 < int(number) <= MOST_DAYS * DAY // _AGES[unit]):
        message = f"{age!r} is no time such as 7d, 12h or 30m, up to {MOST_DAYS}d"
        raise click.BadParameter(message, param_hint="--from-usage")
    if config is None:
        raise click.UsageError("--from-usage reads a server's database; give its settings with --config")
    since = time.time_ns() // 1000 - int(number) * _AGES[unit]
    served = with_billing(config, lambda desk: desk.usage.served_since(since, base, MOST_LOGGED))
    if not served:
        raise ScenarioError(f"no request was served in the last {age}" + (f" on the base {base!r}" if base else ""))
    return _anonymous(served)


def save_workload(log: Sequence[LoggedRequest], path: Path, age: str, as_json: bool) -> None:
    """Write the log, or its description, by the file's suffix."""
    if path.suffix == ".toml":
        path.write_text(traffic_as_toml(describe_log(log, f"traffic of the last {age}")))
    elif path.suffix == ".jsonl":
        path.write_bytes(msgspec.json.Encoder().encode_lines(log))
    else:
        raise click.BadParameter(
            f"{path} is neither .jsonl (a log) nor .toml (a description)", param_hint="--save-workload"
        )
    note(as_json, f"The workload is in {path}.")


def _anonymous(served: Sequence[ServedRequest]) -> list[LoggedRequest]:
    """Return the requests with numbers instead of ids of tenants and adapters."""
    tenants: dict[str, str] = {}
    adapters: dict[str, str] = {}
    log = []
    for one in served:
        is_background = one.tier.rpartition("/")[2] in ("batch", "flex", "shadow")
        digest = one.adapter_digest
        log.append(
            LoggedRequest(
                arrival_s=(one.opened_at - served[0].opened_at) / 1e6,
                prompt_tokens=one.prompt_tokens,
                output_tokens=max(1, one.output_tokens),
                tenant=tenants.setdefault(one.tenant_id, f"tenant-{len(tenants)}"),
                adapter=adapters.setdefault(digest, f"adapter-{len(adapters)}") if digest else "",
                rank=one.rank or UNKNOWN_RANK,
                base=one.base_model,
                service_class=ServiceClass.BATCH if is_background else ServiceClass.STANDARD,
                max_tokens=max(1, one.max_tokens),
            )
        )
    return log
