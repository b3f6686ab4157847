"""Plans as an operator writes them: a TOML file, checked whole before anything of it is stored."""

from __future__ import annotations

import tomllib
from datetime import UTC, date, datetime, time
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from loramux.billing.errors import InvalidPlan
from loramux.pricing import ANY, METERS, Currency, Step, UnknownCurrency, nanos_of
from loramux.records.identity import GRAMMAR_IN_WORDS, is_name
from loramux.records.service_tiers import CHOSEN, is_priced_tier
from loramux.units import DAY, SECOND

Count = Annotated[int, Meta(ge=1, le=2**62)]


class StepSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One step of a price: from `above` units in a period on, `per` units cost `price`."""

    above: Annotated[int, Meta(ge=0, le=2**62)]
    price: str


class PriceSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A price: one number, or steps of volume; `free` units a period cost nothing before it begins to count."""

    meter: str
    base_model: str = ANY
    tier: str = ANY
    valid_from: date
    valid_until: date | None = None
    per: Count = 1
    free: Annotated[int, Meta(ge=0, le=2**62)] = 0
    price: str | None = None
    steps: tuple[StepSpec, ...] = ()

    def check(self, where: str) -> None:
        """Raise InvalidPlan unless the price is valid."""
        if self.meter not in METERS:
            raise InvalidPlan(f"{where}.meter is one of {', '.join(METERS)}; got {self.meter[:40]!r}", "meter")
        if not is_priced_tier(self.tier):
            ends = ", ".join(f"/{tier}" for tier in CHOSEN)
            raise InvalidPlan(f"{where}.tier is a tier or *, alone or with {ends}; got {self.tier[:80]!r}", "tier")
        if (self.price is None) == (not self.steps):
            raise InvalidPlan(f"{where} has either a price or steps", "price")
        if self.valid_until is not None and self.valid_until <= self.valid_from:
            raise InvalidPlan(f"{where}.valid_until is after its valid_from", "valid_until")
        above = [step.above for step in self.steps]
        if self.steps and (above[0] != 0 or above != sorted(set(above))):
            raise InvalidPlan(f"{where}.steps begin above 0 and rise", "steps")
        self.graduated(where)

    def graduated(self, where: str) -> tuple[Step, ...]:
        """Return the steps, with a free quota as the first of them. Raises InvalidPlan."""
        given = self.steps or (StepSpec(0, self.price or "0"),)
        try:
            priced = [Step(self.free + step.above, nanos_of(step.price, f"{where}.price")) for step in given]
        except ValueError as error:
            raise InvalidPlan(str(error), "price") from None
        return (Step(0, 0), *priced) if self.free else tuple(priced)


class PlanSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A plan and its prices."""

    name: str
    currency: str
    minimum: str = "0"
    """The least that a month costs."""
    prices: tuple[PriceSpec, ...] = ()

    def check(self) -> None:
        """Raise InvalidPlan unless the plan is valid."""
        if not is_name(self.name):
            raise InvalidPlan(f"a plan's name is {GRAMMAR_IN_WORDS}; got {self.name[:80]!r}", "name")
        self.minimum_units()
        for number, price in enumerate(self.prices):
            price.check(f"{self.name}.prices[{number}]")

    def minimum_units(self) -> int:
        """Return the minimum in the currency's minor units. Raises InvalidPlan."""
        try:
            currency, nanos = Currency.of(self.currency), nanos_of(self.minimum, f"{self.name}.minimum")
        except (UnknownCurrency, ValueError) as error:
            raise InvalidPlan(str(error), "currency") from None
        if nanos % currency.nanos:
            message = (
                f"{self.name}.minimum has at most {currency.digits} digits behind the point, as {self.currency} has"
            )
            raise InvalidPlan(message, "minimum")
        return nanos // currency.nanos


class PlanFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[[plans]] and [[plans.prices]]."""

    plans: tuple[PlanSpec, ...]


def read_plans(path: Path) -> tuple[PlanSpec, ...]:
    """Read the plans in a file. Raises InvalidPlan naming the file and the field."""
    try:
        plans = msgspec.convert(tomllib.loads(path.read_text()), PlanFile).plans
    except OSError as error:
        raise InvalidPlan(f"{path} cannot be read: {error.strerror}", "file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise InvalidPlan(f"{path}: {error}", "file") from None
    for plan in plans:
        plan.check()
    return plans


def midnight(day: date) -> int:
    """Return the day's first moment, UTC, in microseconds."""
    return int(datetime.combine(day, time(), UTC).timestamp()) * SECOND


def day_of(microseconds: int) -> str:
    """Format the day of a moment."""
    return datetime.fromtimestamp(microseconds // DAY * DAY // SECOND, UTC).date().isoformat()
