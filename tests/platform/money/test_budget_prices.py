"""Prices of budgets: bounds that no request exceeds, from the same prices as the invoice."""

from __future__ import annotations

from functools import partial

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from loramux.common.identity import TenantId
from loramux.common.units import DAY, TokenCounts
from loramux.data.records.requests import OpenedRequest
from loramux.money.billing.catalog import PlanTariff, PricePlan, Subscriptions
from loramux.money.limits.budgets import ChargedUsage, spent_by
from loramux.money.pricing import Currency, Price, PriceStep
from loramux.money.usage.settlement import Settlement

TENANT = TenantId("t")
PRICED = ("input_uncached", "input_cached", "output", "adapter_load", "image_tokens")


def subscriptions(nanos: list[int], per: int, valid_from: int = 0) -> Subscriptions:
    prices = tuple(
        Price(id=m, plan_id="p", meter=m, valid_from=valid_from, per=per, steps=(PriceStep(0, 0), PriceStep(10, n)))
        for m, n in zip(PRICED, nanos, strict=False)
    )
    return Subscriptions(((0, PricePlan(id="p", name="p", currency=Currency.of("USD"), minimum=0, prices=prices)),))


def request(prompt: int = 10, most: int = 5, adapter: str | None = "sha256:a") -> OpenedRequest:
    return OpenedRequest(
        id="r",
        tenant_id=TENANT,
        key_id="k",
        model="tiny",
        base_model="tiny",
        tier="standard",
        adapter_digest=adapter,
        prompt_tokens=prompt,
        max_tokens=most,
    )


@given(
    nanos=st.lists(st.integers(0, 10**9), min_size=4, max_size=5),
    per=st.sampled_from([1, 1000, 1_000_000]),
    prompt=st.integers(0, 10**6),
    most=st.integers(0, 10**6),
    data=st.data(),
)
def test_budget_hold_covers_every_request(
    nanos: list[int], per: int, prompt: int, most: int, data: st.DataObject
) -> None:
    tariff = PlanTariff({TENANT: subscriptions(nanos, per)}, 1)
    cached = data.draw(st.integers(0, prompt))
    image = data.draw(st.integers(0, prompt - cached))
    tokens = TokenCounts(prompt=prompt, cached=cached, output=data.draw(st.integers(0, most)), image=image)
    loads = data.draw(st.integers(0, 3))
    end = Settlement(request_id="r", ended_by="completion", finish_reason="stop", delivered=tokens, adapter_loads=loads)
    gone = data.draw(st.integers(0, most - tokens.output)), data.draw(st.integers(1, 3))
    computed = TokenCounts(prompt=prompt * gone[1], cached=tokens.cached, output=gone[0])
    if tokens.output:
        computed = msgspec.structs.replace(computed, prompt=prompt * (gone[1] - 1), cached=prompt * (gone[1] - 1))
    left = msgspec.structs.replace(end, ended_by="caller", undelivered=computed, prompt_tokens=prompt)
    if not tokens.output:
        left = msgspec.structs.replace(left, delivered=TokenCounts())
    used = ChargedUsage(end.billed, end.billed_loads)
    held = tariff.most_it_can_cost(request(prompt, most, "sha256:a" if loads else None))
    assert tariff.cost(TENANT, "tiny", "standard", used) <= held
    price = partial(tariff.cost, TENANT, "tiny", "standard")
    assert spent_by(price, ChargedUsage(left.billed, left.billed_loads), left.unbilled).spent <= held


def test_budget_hold_covers_a_price_that_rises_before_the_settlement() -> None:
    plans = {TENANT: subscriptions([3, 1, 7, 5], 1, valid_from=DAY)}
    opened, settled = PlanTariff(plans, DAY - 1), PlanTariff(plans, DAY + 1)
    used = ChargedUsage(TokenCounts(prompt=10, cached=4, output=5), 1)
    assert opened.cost(TENANT, "tiny", "standard", used) == 0
    assert settled.cost(TENANT, "tiny", "standard", used) <= opened.most_it_can_cost(request())


def test_budget_holds_nothing_of_a_request_that_costs_nothing() -> None:
    assert PlanTariff({TENANT: subscriptions([0, 0, 0, 5], 1)}, 1).most_it_can_cost(request(adapter=None)) == 0
    assert PlanTariff({}, 1).most_it_can_cost(request()) == 0


def test_budget_tariff_takes_the_dearest_step_and_nothing_without_a_plan() -> None:
    tariff = PlanTariff({TENANT: subscriptions([3, 1, 7, 5], 1)}, 1)
    used = ChargedUsage(TokenCounts(prompt=10, cached=4, output=2), 1)
    assert tariff.cost(TENANT, "tiny", "standard", used) == 6 * 3 + 4 * 1 + 2 * 7 + 5
    assert tariff.cost(TenantId("other"), "tiny", "standard", used) == 0
