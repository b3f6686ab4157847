"""`service_tier` of a request: its values, and the places that show it."""

from __future__ import annotations

import asyncio
import time

import openai
import pytest
from site_fixture import Site

from loramux.engine.messages import ServiceClass
from loramux.server.platform import open_tenants

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def gold(site: Site) -> str:
    """A tenant whose tier allows priority; its key is in the site's."""

    async def make() -> str:
        async with open_tenants(site.settings) as tenants:
            await tenants.tiers.put("gold", "standard", 2, ["priority", "flex"])
            await tenants.create("goldco", "gold")
            scopes = frozenset({"inference", "usage"})
            return (await tenants.create_key("goldco", scopes=scopes))[1]

    site.keys["goldco"] = asyncio.run(make())
    return "goldco"


@pytest.mark.parametrize(
    ("asked", "answered", "service_class"),
    [
        (None, "default", ServiceClass.STANDARD),
        ("auto", "default", ServiceClass.STANDARD),
        ("default", "default", ServiceClass.STANDARD),
        ("flex", "flex", ServiceClass.BATCH),
        ("priority", "priority", ServiceClass.INTERACTIVE),
    ],
)
def test_service_tier_sets_the_class_and_is_in_the_answer(
    site: Site, gold: str, asked: str | None, answered: str, service_class: ServiceClass
) -> None:
    extra = {} if asked is None else {"service_tier": asked}
    client = site.openai(gold)
    whole = client.chat.completions.create(model="tiny", messages=HELLO, **extra)
    with client.chat.completions.create(model="tiny", messages=HELLO, stream=True, **extra) as stream:
        chunks = list(stream)
    text = client.completions.create(model="tiny", prompt="hi", extra_body=extra)
    assert {whole.service_tier, text.service_tier, *(chunk.service_tier for chunk in chunks)} == {answered}
    assert [request.service_class for request in site.engine.requests] == [service_class] * 3


def test_service_tier_that_the_plan_lacks_is_refused_with_those_it_has(site: Site) -> None:
    with pytest.raises(openai.PermissionDeniedError) as refused:
        site.openai().chat.completions.create(model="tiny", messages=HELLO, service_tier="priority")
    assert (refused.value.code, refused.value.param) == ("service_tier_not_allowed", "service_tier")
    assert "auto, default, flex" in refused.value.message
    assert not site.engine.requests


def test_service_tier_batch_is_for_batches_only(site: Site) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        site.openai().chat.completions.create(model="tiny", messages=HELLO, extra_body={"service_tier": "batch"})
    assert refused.value.param == "service_tier"


def test_usage_divides_by_service_tier(site: Site, gold: str) -> None:
    since = int(time.time())
    for asked in ("flex", "flex", "priority", "auto"):
        site.openai(gold).chat.completions.create(model="tiny", messages=HELLO, service_tier=asked)
    with site.http(gold) as http:
        ask = {"start_time": since - 100, "group_by": ["service_tier", "batch"]}
        page = http.get("/v1/organization/usage/completions", params=ask).json()
        rest = http.get("/v1/organization/usage/completions", params=ask | {"batch": "true"}).json()
    found = {one["service_tier"]: one for bucket in page["data"] for one in bucket["results"]}
    assert set(found) == {"default", "flex", "priority"}
    assert found["flex"]["num_model_requests"] >= 2
    assert {one["batch"] for one in found.values()} == {False}
    assert [bucket["results"] for bucket in rest["data"]] == [[]] * len(rest["data"])
