"""How often a tenant's requests were answered, and answered in time."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from site_fixture import Site

from loramux.accounts.tenants.authority import TENANT_SCOPES
from loramux.engine.messages import EngineFault

PATH = "/v1/organization/service_levels"


def service_levels(site: Site, tenant: str, **params: Any) -> dict[str, dict[str, Any]]:
    flushed = site.server.app.state.programs.revision_metrics.flush()
    asyncio.run_coroutine_threadsafe(flushed, site.server.loop).result(120)
    with site.http(tenant) as client:
        answer = client.get(PATH, params=params)
    assert answer.status_code == 200, answer.text
    return {one["model"]: one for one in answer.json()["data"]}


def test_service_levels_count_failures_and_first_tokens_of_the_tenant(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = service_levels(site, "all-scopes").get("tiny", {"requests": 0, "first_tokens": 0})
    made = site.server.app.state.platform.tenants.create_key("globex", scopes=TENANT_SCOPES)
    site.keys["globex-all"] = asyncio.run_coroutine_threadsafe(made, site.server.loop).result(120)[1]
    other = service_levels(site, "globex-all")
    client = site.openai("all-scopes")
    for _ in range(3):
        client.completions.create(model="tiny", prompt="hello")
    monkeypatch.setattr(site.engine, "script", lambda request: [EngineFault("internal_error", "broken")])
    with pytest.raises(openai.InternalServerError):
        client.with_options(max_retries=0).completions.create(model="tiny", prompt="hello")
    level = service_levels(site, "all-scopes", first_token_s=30)["tiny"]
    assert level["requests"] == before["requests"] + 4
    assert level["first_tokens"] == before["first_tokens"] + 3
    assert level["first_tokens_in_time"] == 1.0
    assert 0 < level["availability"] < 1
    assert service_levels(site, "globex-all") == other


@pytest.mark.parametrize(("params", "named"), [({"first_token_s": 3}, "0.005, 0.01"), ({"window": "2h"}, "window")])
def test_service_level_without_a_counter_is_refused_with_the_choices(
    site: Site, params: dict[str, Any], named: str
) -> None:
    with site.http("all-scopes") as client:
        refused = client.get(PATH, params=params)
    assert refused.status_code == 400
    assert named in refused.json()["error"]["message"]
