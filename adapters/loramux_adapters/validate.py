"""Checks of a folder with PEFT's two files, from the cheapest to the most expensive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from loramux_adapters.base import BaseDescription
from loramux_adapters.components import AdapterPlan
from loramux_adapters.config import MAX_CONFIG_BYTES, AdapterConfig, parse_adapter_config
from loramux_adapters.errors import ConfigRejected
from loramux_adapters.plan import Limits, plan_adapter
from loramux_adapters.weights_file import SafetensorsHeader, check_finite, read_header

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"

CHECKS = ("config", "header", "tensors", "values")
"""Names of the checks, in their order."""


@dataclass(frozen=True, slots=True)
class ExaminedAdapter:
    """An adapter that passed every check."""

    config: AdapterConfig
    header: SafetensorsHeader
    plan: AdapterPlan


def read_config(directory: Path) -> AdapterConfig:
    """Read `directory`/adapter_config.json, at most 1 MiB of it. Raises ConfigRejected."""
    return parse_adapter_config(read_config_file(directory))


def read_config_file(directory: Path) -> bytes:
    """Read `directory`/adapter_config.json, at most one byte more than is accepted. Raises ConfigRejected."""
    try:
        with (directory / CONFIG_NAME).open("rb") as file:
            return file.read(MAX_CONFIG_BYTES + 1)
    except (FileNotFoundError, IsADirectoryError):
        raise ConfigRejected(
            "config_missing", None, f"There is no {CONFIG_NAME}; PEFT's save_pretrained writes it beside the weights."
        ) from None


def inspect_adapter(directory: Path, base: BaseDescription, limits: Limits) -> AdapterPlan:
    """Run every check that does not read the weights; takes milliseconds. Raises AdapterRejected."""
    config = read_config(directory)
    return plan_adapter(config, read_header(directory / WEIGHTS_NAME), base, limits)


def validate_adapter(directory: Path, base: BaseDescription, limits: Limits) -> AdapterPlan:
    """Run every check and return the plan of the adapter in `directory`. Raises AdapterRejected.

    Memory: the two headers and a few MiB, whatever the files' sizes.
    """
    return examine_adapter(directory, base, limits, "F32", lambda _: None).plan


def examine_adapter(
    directory: Path, base: BaseDescription, limits: Limits, serving: str, passed: Callable[[str], None]
) -> ExaminedAdapter:
    """Run validate_adapter and call `passed` with the name of each check that passes. Raises AdapterRejected.

    `serving` is the dtype that weights are converted to when they are served: F32, F16 or BF16.
    """
    config = read_config(directory)
    passed("config")
    header = read_header(directory / WEIGHTS_NAME)
    passed("header")
    plan = plan_adapter(config, header, base, limits)
    passed("tensors")
    check_finite(directory / WEIGHTS_NAME, header, serving)
    passed("values")
    return ExaminedAdapter(config, header, plan)
