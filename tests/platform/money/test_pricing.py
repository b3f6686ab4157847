"""Costs of usage, compared with Python's decimal: exact until the one rounding of a line."""

import decimal
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loramux.common.units import DAY
from loramux.data.records.usage import DailyQuantities
from loramux.money.billing.invoices import Tax
from loramux.money.pricing import (
    Currency,
    Price,
    PriceStep,
    UnknownCurrency,
    allocate,
    charge,
    cost,
    encode_money,
    minor_units,
    nanos_of,
    plain_text,
    price_for,
)

USD = Currency.of("USD")
NANO = Decimal(10) ** -9


def price(*steps: tuple[int, int], **changes: object) -> Price:
    facts = {"id": "p", "plan_id": "plan", "meter": "output", "valid_from": 0, "per": 1_000_000}
    return Price(**facts | changes, steps=tuple(PriceStep(*step) for step in steps or ((0, 200_000_000),)))


@st.composite
def prices(draw: st.DrawFn) -> Price:
    above = sorted({0, *draw(st.lists(st.integers(1, 10**7), max_size=4))})
    steps = tuple((at, draw(st.integers(0, 10**10))) for at in above)
    return price(*steps, per=draw(st.sampled_from([1, 1000, 1_000_000])))


def in_decimal(one: Price, quantity: int) -> Decimal:
    """The cost in the currency, unit step by unit step, by another way than the product's."""
    total, ends = Decimal(0), [step.above for step in one.steps[1:]] + [None]
    for step, end in zip(one.steps, ends, strict=True):
        upper = quantity if end is None else min(quantity, end)
        if upper > step.above:
            total += Decimal(upper - step.above) * Decimal(step.nanos) * NANO / Decimal(one.per)
    return total


@given(prices(), st.integers(0, 10**9), st.sampled_from(["USD", "JPY", "BHD", "EUR"]))
def test_line_is_rounded_once_as_decimal_rounds(one: Price, quantity: int, code: str) -> None:
    currency = Currency.of(code)
    with decimal.localcontext(prec=60):
        exact = in_decimal(one, quantity)
        rounded = exact.quantize(Decimal(10) ** -currency.digits, rounding=decimal.ROUND_HALF_UP)
        assert minor_units(cost(one, quantity), one.per, currency) == rounded.scaleb(currency.digits)


@pytest.mark.parametrize(
    ("code", "nanos", "minor"),
    [
        ("USD", 5_000_000, 1),
        ("USD", 4_999_999, 0),
        ("USD", -5_000_000, -1),
        ("JPY", 1_499_999_999, 1),
        ("BHD", 500_000, 1),
    ],
)
def test_rounding_takes_halves_away_from_zero_in_the_currencys_digits(code: str, nanos: int, minor: int) -> None:
    assert minor_units(nanos, 1, Currency.of(code)) == minor


@pytest.mark.parametrize("code", ["usd", "XAU", "QQQ", "", "US"])
def test_currency_that_is_unknown_is_refused(code: str) -> None:
    with pytest.raises(UnknownCurrency, match="ISO 4217"):
        Currency.of(code)


@given(prices(), st.lists(st.integers(0, 10**6), min_size=1, max_size=20))
def test_steps_cost_the_same_however_usage_is_divided(one: Price, parts: list[int]) -> None:
    total, before = 0, 0
    for part in parts:
        total += cost(one, before + part) - cost(one, before)
        before += part
    assert total == cost(one, before)


def test_steps_with_a_free_quota_are_graduated() -> None:
    one = price((0, 0), (1000, 20), (5000, 10), per=1)
    assert [cost(one, n) for n in (0, 1000, 1001, 5000, 6000)] == [0, 0, 20, 80_000, 90_000]
    assert cost(one, -6000) == -90_000


@given(st.integers(-(10**15), 10**15), st.lists(st.integers(0, 10**12), min_size=1, max_size=30))
def test_allocation_adds_up_in_proportion(total: int, weights: list[int]) -> None:
    parts = allocate(total, weights)
    assert sum(parts) == total
    if whole := sum(weights):
        assert all(abs(part * whole - total * weight) < whole for part, weight in zip(parts, weights, strict=True))


@given(st.integers(-(10**9), 10**9), st.lists(st.integers(-(10**6), 10**6), min_size=1, max_size=30))
def test_allocation_with_credits_adds_up(total: int, weights: list[int]) -> None:
    assert sum(allocate(total, weights)) == total


@given(
    prices(),
    st.lists(st.tuples(st.integers(0, 30), st.sampled_from("abc"), st.integers(0, 10**6)), min_size=1, max_size=25),
)
def test_charges_of_a_line_add_up_to_the_line(one: Price, used: list[tuple[int, str, int]]) -> None:
    usages = [DailyQuantities(day, "base", "standard", who, {"output": quantity}) for day, who, quantity in used]
    lines = charge(usages, lambda _: (one,), USD)
    if not any(quantity for *_, quantity in used):
        assert lines == []
        return
    [line] = lines
    assert line.quantity == sum(quantity for *_, quantity in used)
    assert sum(part.nanos for part in line.charges) == line.amount * USD.nanos


def test_free_quota_is_used_by_the_earliest_days() -> None:
    one = price((0, 0), (100, 10**9), per=1)
    usages = [DailyQuantities(day, "base", "", who, {"output": 100}) for day, who in ((1, "a"), (2, "a"), (2, "b"))]
    [line] = charge(usages, lambda _: (one,), USD)
    assert [(part.day, part.group, part.nanos) for part in line.charges] == [
        (1, "a", 0),
        (2, "a", 100 * 10**9),
        (2, "b", 100 * 10**9),
    ]


def test_price_for_usage_is_the_most_specific() -> None:
    every, base, tier = price(id="every"), price(id="base", base_model="m"), price(id="tier", tier="batch")
    newer, ended = price(id="newer", base_model="m", valid_from=5 * DAY), price(id="old", valid_until=DAY)
    known = [every, base, tier, newer, ended]
    asked = [("m", "batch", 0), ("x", "batch", 0), ("x", "", 0), ("m", "", 5 * DAY), ("m", "", 5 * DAY - 1)]
    found = [price_for(known, "output", *one) for one in asked]
    assert [one.id for one in found if one] == ["base", "tier", "every", "newer", "base"]
    assert price_for(known, "input_cached", "m", "", 0) is None
    assert price_for([ended], "output", "m", "", DAY) is None


def test_usage_without_a_price_is_on_a_free_line() -> None:
    [line] = charge([DailyQuantities(0, "m", "", "a", {"output": 7, "waived_output": 3})], lambda _: (), USD)
    assert (line.price, line.quantity, line.amount) == (None, 7, 0)


@pytest.mark.parametrize("text", ["-1", "1e-10", "abc", "", "NaN", "Infinity"])
def test_price_text_that_is_malformed_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="price"):
        nanos_of(text, "price")


def test_price_text_is_read_exactly() -> None:
    assert [nanos_of(text, "price") for text in ("0.20", "1e-9", "12345.000000001")] == [
        2 * 10**8,
        1,
        12345 * 10**9 + 1,
    ]


MODELS, KEYS = ("a@1", "b@2", "c@3"), ("k1", "k2", None)


@given(
    one=prices(),
    used=st.lists(
        st.tuples(st.integers(0, 30), st.sampled_from(MODELS), st.sampled_from(KEYS), st.integers(-(10**5), 10**9)),
        min_size=1,
        max_size=40,
    ),
    code=st.sampled_from(["USD", "JPY", "BHD"]),
)
def test_invoice_line_is_rounded_once_however_the_bill_is_divided(
    one: Price, used: list[tuple[int, str, str | None, int]], code: str
) -> None:
    """Divided by day, model and key, by model, or not at all: the line is the exact cost of everything, rounded
    once."""
    currency, total = Currency.of(code), sum(quantity for *_, quantity in used)
    with decimal.localcontext(prec=60):
        exact = in_decimal(one, abs(total))
        rounded = exact.quantize(Decimal(10) ** -currency.digits, rounding=decimal.ROUND_HALF_UP)
        expected = int(rounded.scaleb(currency.digits)) * (1 if total >= 0 else -1)
    for columns in (slice(0, 0), slice(0, 1), slice(0, 2)):
        sums: dict[tuple[int, tuple[str | None, ...]], int] = {}
        for day, model, key, quantity in used:
            place = day, (model, key)[columns]
            sums[place] = sums.get(place, 0) + quantity
        daily = [DailyQuantities(day, "base", "", group, {"output": n}) for (day, group), n in sums.items()]
        lines = charge(daily, lambda _: (one,), currency)
        assert sum(line.amount for line in lines) == expected
        for line in lines:
            assert sum(part.nanos for part in line.charges) == line.amount * currency.nanos
            assert sum(part.quantity for part in line.charges) == total


@given(
    subtotal=st.integers(-(10**12), 10**12),
    percent=st.decimals(0, 100, places=4),
    code=st.sampled_from(["USD", "JPY", "BHD"]),
)
def test_tax_is_rounded_once_on_the_subtotal(subtotal: int, percent: Decimal, code: str) -> None:
    with decimal.localcontext(prec=60):
        exact = (Decimal(subtotal) * percent / 100).quantize(Decimal(1), rounding=decimal.ROUND_HALF_UP)
    currency = Currency.of(code)
    assert Tax(name="VAT", percent=percent).of(subtotal, currency) == exact
    assert Tax(name="VAT", percent=percent, is_exempt=True).of(subtotal, currency) == 0


@given(st.decimals(allow_nan=False, allow_infinity=False))
def test_money_text_has_no_exponent_and_loses_nothing(amount: Decimal) -> None:
    text = plain_text(amount)
    assert "E" not in text.upper()
    assert Decimal(text) == amount
    assert encode_money({"x": amount}) == f'{{"x":"{text}"}}'.encode()
    assert encode_money({"x": amount}, as_numbers=True) == f'{{"x":{text}}}'.encode()
