"""What budgets count with: bounds that no request exceeds, from the same prices as the invoice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from loramux.billing.budget_prices import PlanTariff
from loramux.limits import Used
from loramux.pricing import METERS, Price, Step
from loramux.records import TenantId

TENANT = TenantId("t")


def prices(nanos: list[int], per: int) -> tuple[Price, ...]:
    return tuple(
        Price(id=m, plan_id="p", meter=m, valid_from=0, per=per, steps=(Step(0, 0), Step(10, n)))
        for m, n in zip(METERS, nanos, strict=False)
    )


@given(
    nanos=st.lists(st.integers(0, 10**9), min_size=4, max_size=4),
    per=st.sampled_from([1, 1000, 1_000_000]),
    prompt=st.integers(0, 10**6),
    most=st.integers(0, 10**6),
    data=st.data(),
)
def test_no_request_costs_more_than_was_held_for_it(
    nanos: list[int], per: int, prompt: int, most: int, data: st.DataObject
) -> None:
    tariff = PlanTariff({TENANT: prices(nanos, per)}, "tiny", 1)
    used = Used(
        prompt, data.draw(st.integers(0, prompt)), data.draw(st.integers(0, most)), data.draw(st.integers(0, 3))
    )
    assert tariff.cost(TENANT, "standard", used) <= tariff.most_it_can_cost(TENANT, "standard", prompt, most)


def test_the_dearest_step_counts_and_nothing_without_a_plan() -> None:
    tariff = PlanTariff({TENANT: prices([3, 1, 7, 5], 1)}, "tiny", 1)
    assert tariff.cost(TENANT, "standard", Used(10, 4, 2, 1)) == 6 * 3 + 4 * 1 + 2 * 7 + 5
    assert tariff.cost(TenantId("other"), "standard", Used(10, 4, 2, 1)) == 0
