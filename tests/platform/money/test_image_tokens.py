"""Tokens of images: a separate meter, line and price, from the settlement to the invoice."""

from __future__ import annotations

from loramux.common.units import TokenCounts
from loramux.data.records.usage import DailyQuantities
from loramux.money.pricing import Currency, Price, PriceStep, charge
from loramux.money.usage.settlement import Settlement

CENTS = 10**7
"""Nano-units of a cent."""


def lines(prices: list[Price], **quantities: int) -> dict[str, tuple[int, int]]:
    """Return the quantity and the cents of each line of one day."""
    usage = DailyQuantities(day=0, base_model="base", tier="standard", group=(), quantities=quantities)
    charged = charge([usage], lambda _: prices, Currency.of("USD"))
    return {line.meter: (line.quantity, line.amount) for line in charged}


def price(meter: str, *steps: PriceStep) -> Price:
    return Price(id=meter, plan_id="p", meter=meter, valid_from=0, steps=steps)


def test_images_without_a_price_continue_the_steps_of_the_input_price() -> None:
    stepped = price("input_uncached", PriceStep(0, 0), PriceStep(100, 3 * CENTS), PriceStep(150, CENTS))
    together = 50 * 3 + 10 * 1
    assert lines([stepped], input_uncached=60, image_tokens=100) == {
        "input_uncached": (60, 0),
        "image_tokens": (100, together),
    }
    assert lines([stepped], input_uncached=160) == {"input_uncached": (160, together)}
    assert lines([stepped], image_tokens=160) == {"image_tokens": (160, together)}


def test_images_with_a_price_have_their_own_steps() -> None:
    text = price("input_uncached", PriceStep(0, 0), PriceStep(100, 3 * CENTS))
    image = price("image_tokens", PriceStep(0, 7 * CENTS))
    assert lines([text, image], input_uncached=110, image_tokens=10) == {
        "input_uncached": (110, 30),
        "image_tokens": (10, 70),
    }


def test_an_abandoned_prompt_counts_its_images_once() -> None:
    computed = TokenCounts(prompt=20, cached=8, output=1, image=6)
    end = Settlement(
        request_id="r", ended_by="caller", finish_reason=None, undelivered=computed + computed, prompt_tokens=20
    )
    assert end.abandoned == TokenCounts(prompt=20, cached=0, output=2, image=12)
    one = Settlement(request_id="r", ended_by="caller", finish_reason=None, undelivered=computed, prompt_tokens=20)
    assert one.abandoned == computed
