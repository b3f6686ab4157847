"""JSON objects of base models, which operators use. Times are Unix seconds."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from loramux.common.settings.serving import Dtype, EngineRange, GenerationConfig, Quantization, ToolParser
from loramux.serving.lifecycle import BaseStatus
from loramux_api.bodies import Body
from loramux_api.schemas.bounds import Fields, Name, Path
from loramux_api.schemas.tenancy import seconds


class BaseBody(Body, forbid_unknown_fields=True):
    """A base model to add: one table of `[[bases]]`."""

    name: Name
    """The base model's name in requests."""
    path: Path
    """The absolute folder of a transformers checkpoint, on every server."""
    dtype: Dtype = "auto"
    quantization: Quantization = "none"
    generation_config: GenerationConfig = "auto"
    tool_parser: ToolParser | None = None
    former_names: Annotated[tuple[Name, ...], Meta(max_length=100)] = ()
    engines: EngineRange = EngineRange()
    engine: Fields = msgspec.field(default_factory=dict)
    """Settings of the base model's engines; settings that are left out are taken from `[engine]`."""


class RetireBody(Body, forbid_unknown_fields=True):
    """A base model to retire."""

    name: Name
    successor: Name | None = None
    """The base model that refusals name instead."""
    force: bool = False
    """Retire the base model even if aliases point at adapters for it."""


class BaseObject(msgspec.Struct, kw_only=True):
    """A base model, with its state on this server."""

    name: str
    object: Literal["base_model"] = "base_model"
    path: str
    state: Literal["loading", "serving", "failed", "draining", "retired"]
    problem: str | None
    """Reason why the base model did not load."""
    source: Literal["settings", "added"]
    engines_ready: int
    engines_min: int
    engines_max: int
    seconds_in_state: float
    """Seconds since the state began; 0 if that is not known."""
    retired_at: int | None
    successor: str | None
    """Base model to use instead of a retired one."""


def base_object(status: BaseStatus) -> BaseObject:
    """Return the base as a JSON object."""
    return BaseObject(
        name=status.base_model,
        path=status.path,
        state=status.state,
        problem=status.problem,
        source="added" if status.is_added else "settings",
        engines_ready=status.engines_ready,
        engines_min=status.engines_min,
        engines_max=status.engines_max,
        seconds_in_state=round(status.seconds, 1),
        retired_at=seconds(status.retired_at),
        successor=status.successor,
    )
