"""Sampling parameters: one table, from which requests, defaults, checks and the samplers take their names and bounds.

`TokenSelection` is the table. A field is a parameter of the choice of a token. The field's default is the neutral
value, and its `Parameter` has all other facts that the code needs. The following parts derive from the table:

    fields and refusals of request bodies     `loramux_api.schemas.sampling`
    fields that an endpoint must not ignore   `loramux_api.unknown_fields`
    defaults of checkpoints and of bundles    `loramux.common.bundle`, `loramux.catalog.validation.bundle`
    the engine's own check of a request       `loramux.engine.worker`
    rows that a sampler must steer             `loramux.engine.execution.sampler`
    the columns of a step on a GPU            `loramux.engine.execution.device_sampler`
    the warm-up                               `loramux.engine.execution.gpu_runner`
    the table in docs/models.md               `tools/reference.py`
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, cast, get_type_hints

import msgspec
from msgspec import Meta

S = TypeVar("S", bound=msgspec.Struct)


@dataclass(frozen=True, eq=False, slots=True)
class Parameter:
    """Facts about one parameter."""

    acts_on: Literal["logits", "draw"]
    """`logits`: the parameter changes the logits of single tokens, before the temperature; the sampler's `steer`
    applies it. `draw`: the parameter decides how a token is drawn from the logits; `draw_tokens` and the kernels apply
    it.
    """
    example: Any
    """A value that is not neutral. The warm-up and the tests use this value."""
    range: Meta | None = None
    """Range of a request's value. If the parameter has a value for each token, this is the range of each value. None:
    the values are token ids, whose range depends on the model.
    """
    recommended: Meta | None = None
    """Range of values that a checkpoint or an adapter may recommend for requests that leave the parameter out; None: no
    recommendation is possible.
    """
    other_neutrals: tuple[float, ...] = ()
    """Further values of a request that mean the neutral one."""


_FACTOR, _PENALTY = Meta(ge=0.01, le=100.0), Meta(ge=-2, le=2)
_TEMPERATURE, _SHARE = Meta(ge=0, le=2), Meta(ge=0, le=1)


class TokenSelection(msgspec.Struct, frozen=True, kw_only=True):
    """The table of parameters, in the usual order of application: first the logits, then the draw."""

    repetition_penalty: Annotated[float, Parameter("logits", 1.1, _FACTOR, recommended=_FACTOR)] = 1.0
    presence_penalty: Annotated[float, Parameter("logits", 0.1, _PENALTY)] = 0.0
    frequency_penalty: Annotated[float, Parameter("logits", 0.1, _PENALTY)] = 0.0
    logit_bias: Annotated[dict[int, float], Parameter("logits", {0: 1.0}, Meta(ge=-100, le=100))] = {}
    allowed_token_ids: Annotated[tuple[int, ...], Parameter("logits", (0, 1))] = ()
    """The only tokens to choose from; empty: all tokens. This parameter cannot be used together with a constraint."""
    temperature: Annotated[float, Parameter("draw", 0.7, _TEMPERATURE, recommended=_TEMPERATURE)] = 1.0
    """The temperature; 0 chooses the most likely token (greedy)."""
    top_k: Annotated[
        int, Parameter("draw", 3, Meta(ge=-1, le=2**31 - 1), recommended=Meta(ge=0, lt=1 << 31), other_neutrals=(-1,))
    ] = 0
    """The number of most likely tokens that are kept; 0 keeps every token."""
    top_p: Annotated[float, Parameter("draw", 0.9, _SHARE, recommended=Meta(gt=0, le=1))] = 1.0
    min_p: Annotated[float, Parameter("draw", 0.01, _SHARE, recommended=_SHARE)] = 0.0


NEUTRAL = TokenSelection()
_TYPES: Mapping[str, Any] = get_type_hints(TokenSelection, include_extras=True)
PARAMETERS: Mapping[str, Parameter] = {name: kind.__metadata__[0] for name, kind in _TYPES.items()}
"""The rows by name."""
KINDS: Mapping[str, type] = {name: kind.__origin__ for name, kind in _TYPES.items() if kind.__origin__ in (int, float)}
"""The parameters that are a single number, with the number's type."""
STEERING = tuple(name for name, one in PARAMETERS.items() if one.acts_on == "logits")
"""The parameters that change logits."""
PENALTIES = tuple(name for name in STEERING if name in KINDS)
"""The parameters of STEERING that are a single number. These penalties change logits of tokens that the prompt or the
answer contains.
"""
DRAWING = tuple(name for name, one in PARAMETERS.items() if one.acts_on == "draw")
"""The parameters of a draw."""
RECOMMENDED = tuple(name for name, one in PARAMETERS.items() if one.recommended is not None)
"""The parameters that a checkpoint may recommend."""


def with_numbers(names: Iterable[str], bound: Callable[[Parameter], Meta | None]) -> Callable[[type[S]], type[S]]:
    """Decorate a struct with an optional field for each of `names`, with values within `bound`. The value is None if
    the field is left out.

    A type checker does not see the fields: `given_numbers` reads them.
    """

    def decorate(struct: type[S]) -> type[S]:
        fields = []
        for name in names:
            meta = bound(PARAMETERS[name])
            kind: Any = KINDS[name] if meta is None else Annotated[KINDS[name], meta]
            fields.append((name, kind | None, None))
        namespace = {"__doc__": struct.__doc__}
        made = msgspec.defstruct(
            struct.__name__, fields, bases=(struct,), kw_only=True, module=struct.__module__, namespace=namespace
        )
        return cast(type[S], made)

    return decorate


def given_numbers(struct: msgspec.Struct) -> dict[str, Any]:
    """Return the numbers of a struct `with_numbers` in the engine's form. Fields that are left out are absent."""
    found = {name: value for name in KINDS if (value := getattr(struct, name, None)) is not None}
    return {
        name: getattr(NEUTRAL, name) if value in PARAMETERS[name].other_neutrals else value
        for name, value in found.items()
    }


def range_fault(params: TokenSelection) -> str | None:
    """Return a sentence about the first value that is not a finite number in its range; None: all values are valid."""
    for name, parameter in PARAMETERS.items():
        value, limits = getattr(params, name), parameter.range
        if limits is None:
            continue
        values, of_each = (value.values(), " for each token") if isinstance(value, dict) else ((value,), "")
        assert limits.ge is not None, "a range has both ends"
        assert limits.le is not None, "a range has both ends"
        if not all(limits.ge <= one <= limits.le for one in values):
            return f"{name} must be a finite number from {limits.ge} to {limits.le}{of_each}."
    return None
