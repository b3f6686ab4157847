"""What usage costs, against Python's decimal: exact until the one rounding of a line."""

import decimal
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loramux.pricing import Currency, Price, Step, UnknownCurrency, Usage, charge, cost, minor_units, most, price_for
from loramux.pricing.charges import DAY
from loramux.pricing.money import allocate, nanos_of

USD = Currency.of("USD")
NANO = Decimal(10) ** -9


def price(*steps: tuple[int, int], **changes: object) -> Price:
    facts = {"id": "p", "plan_id": "plan", "meter": "output", "valid_from": 0, "per": 1_000_000}
    return Price(**facts | changes, steps=tuple(Step(*step) for step in steps or ((0, 200_000_000),)))


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
def test_a_line_is_rounded_once_as_decimal_rounds(one: Price, quantity: int, code: str) -> None:
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
def test_halves_go_away_from_zero_in_the_currencys_own_digits(code: str, nanos: int, minor: int) -> None:
    assert minor_units(nanos, 1, Currency.of(code)) == minor


@pytest.mark.parametrize("code", ["usd", "XAU", "QQQ", "", "US"])
def test_what_is_no_currency_is_refused(code: str) -> None:
    with pytest.raises(UnknownCurrency, match="ISO 4217"):
        Currency.of(code)


@given(prices(), st.lists(st.integers(0, 10**6), min_size=1, max_size=20))
def test_steps_do_not_care_how_usage_was_cut(one: Price, parts: list[int]) -> None:
    total, before = 0, 0
    for part in parts:
        total += cost(one, before + part) - cost(one, before)
        before += part
    assert total == cost(one, before)


def test_a_free_quota_and_volume_steps() -> None:
    one = price((0, 0), (1000, 20), (5000, 10), per=1)
    assert [cost(one, n) for n in (0, 1000, 1001, 5000, 6000)] == [0, 0, 20, 80_000, 90_000]
    assert cost(one, -6000) == -90_000


@given(st.integers(-(10**15), 10**15), st.lists(st.integers(0, 10**12), min_size=1, max_size=30))
def test_parts_add_up_and_are_in_proportion(total: int, weights: list[int]) -> None:
    parts = allocate(total, weights)
    assert sum(parts) == total
    if whole := sum(weights):
        assert all(abs(part * whole - total * weight) < whole for part, weight in zip(parts, weights, strict=True))


@given(st.integers(-(10**9), 10**9), st.lists(st.integers(-(10**6), 10**6), min_size=1, max_size=30))
def test_parts_add_up_where_credits_are_among_them(total: int, weights: list[int]) -> None:
    assert sum(allocate(total, weights)) == total


@given(
    prices(),
    st.lists(st.tuples(st.integers(0, 30), st.sampled_from("abc"), st.integers(0, 10**6)), min_size=1, max_size=25),
)
def test_every_part_of_a_line_is_somebodys_and_all_parts_are_the_line(
    one: Price, used: list[tuple[int, str, int]]
) -> None:
    usages = [Usage(day, "base", "standard", who, {"output": quantity}) for day, who, quantity in used]
    lines = charge(usages, lambda _: (one,), USD)
    if not any(quantity for *_, quantity in used):
        assert lines == []
        return
    [line] = lines
    assert line.quantity == sum(quantity for *_, quantity in used)
    assert sum(part.nanos for part in line.charges) == line.amount * USD.nanos


def test_a_free_quota_is_used_by_the_days_that_came_first() -> None:
    one = price((0, 0), (100, 10**9), per=1)
    usages = [Usage(day, "base", "", who, {"output": 100}) for day, who in ((1, "a"), (2, "a"), (2, "b"))]
    [line] = charge(usages, lambda _: (one,), USD)
    assert [(part.day, part.group, part.nanos) for part in line.charges] == [
        (1, "a", 0),
        (2, "a", 100 * 10**9),
        (2, "b", 100 * 10**9),
    ]


def test_the_price_that_says_most_about_the_usage_holds() -> None:
    every, base, tier = price(id="every"), price(id="base", base_model="m"), price(id="tier", tier="batch")
    newer, ended = price(id="newer", base_model="m", valid_from=5 * DAY), price(id="old", valid_until=DAY)
    known = [every, base, tier, newer, ended]
    asked = [("m", "batch", 0), ("x", "batch", 0), ("x", "", 0), ("m", "", 5 * DAY), ("m", "", 5 * DAY - 1)]
    found = [price_for(known, "output", *one) for one in asked]
    assert [one.id for one in found if one] == ["base", "tier", "every", "newer", "base"]
    assert price_for(known, "input_cached", "m", "", 0) is None
    assert price_for([ended], "output", "m", "", DAY) is None


def test_usage_without_a_price_is_on_a_line_that_costs_nothing() -> None:
    [line] = charge([Usage(0, "m", "", "a", {"output": 7, "waived_output": 3})], lambda _: (), USD)
    assert (line.price, line.quantity, line.amount) == (None, 7, 0)


@given(prices(), prices(), st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 5000))
def test_no_request_costs_more_than_the_most_it_can(
    per_input: Price, per_output: Price, prompt: int, cached: int, output: int, before: int
) -> None:
    from msgspec.structs import replace

    cached = min(cached, prompt)
    known = [replace(per_input, meter="input_uncached"), replace(per_input, meter="input_cached"), per_output]
    bound = most(known, "m", "", 0, prompt_tokens=prompt, max_tokens=output)
    exact = Decimal(0)
    for one, quantity in zip(known, (prompt - cached, cached, output), strict=True):
        exact += Decimal(cost(one, before + quantity) - cost(one, before)) / one.per
    assert bound >= exact


@pytest.mark.parametrize("text", ["-1", "1e-10", "abc", "", "NaN", "Infinity"])
def test_what_is_no_price_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="price"):
        nanos_of(text, "price")


def test_prices_are_read_exactly() -> None:
    assert [nanos_of(text, "price") for text in ("0.20", "1e-9", "12345.000000001")] == [
        2 * 10**8,
        1,
        12345 * 10**9 + 1,
    ]
