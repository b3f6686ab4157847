"""`loramux.client` against both servers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from peft_uploads import form, make_adapter
from site_fixture import Site

from loramux.client import AsyncClient, Client, NotAuthenticated, NotFound, NotPermitted


@pytest.fixture(scope="session")
def folder(base_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(base_dir, tmp_path_factory.mktemp("client"), seed=11)


@pytest.fixture
def client(site: Site) -> Iterator[Client]:
    with Client(site.url, api_key=site.keys["all-scopes"]) as client:
        yield client


def test_an_adapters_log_names_the_revision_that_answered(site: Site, client: Client, folder: Path) -> None:
    with site.http() as http:
        made = http.post("/v1/adapters", **form(folder, "logged")).json()
    for prompt in ("a", "bc"):
        site.openai().completions.create(model="acme/logged", prompt=prompt)
    site.openai().completions.create(model="tiny", prompt="x")
    requests = client.adapters.requests("logged")
    assert {(one.model, one.digest, one.status) for one in requests} == {("acme/logged@1", made["digest"], "settled")}
    assert [one.prompt_tokens for one in requests] == [3, 2]
    assert client.adapters.requests("acme/logged", limit=1, before=requests[0].id) == requests[1:]
    assert client.adapters.events("logged")[0].data.digest == made["digest"]
    assert client.adapters.get("logged").digest == made["digest"]
    assert "acme/logged" in [adapter.name for adapter in client.adapters.all()]
    used = client.usage.completions(int(time.time()) - 3600, models=["acme/logged@1"], group_by=["model"])
    assert used[-1].results[0].num_model_requests == 2
    with Client(site.url, api_key=site.keys["globex"]) as other:
        assert other.adapters.requests("acme/logged") == []
        with pytest.raises(NotFound):
            other.adapters.get("acme/logged")
    client.adapters.delete("logged")
    assert client.adapters.events("acme/logged")[0].type == "adapter.revision.retired"


def test_webhooks_by_the_awaited_client(site: Site) -> None:
    async def use() -> None:
        async with AsyncClient(site.url, api_key=site.keys["all-scopes"]) as client:
            hook = await client.webhooks.create("http://127.0.0.1:9/hook")
            assert hook.secret
            assert not (await client.webhooks.test(hook.id)).delivered
            assert not (await client.webhooks.enable(hook.id, enabled=False)).enabled
            assert await client.webhooks.deliveries(hook.id) == []
            assert [one.id for one in await client.webhooks.all()] == [hook.id]
            assert (await client.webhooks.delete(hook.id)).deleted

    asyncio.run(use())


def test_refusals_have_types(site: Site) -> None:
    with Client(site.url, api_key="sk-lm-wrong") as client, pytest.raises(NotAuthenticated) as told:
        client.adapters.all()
    assert told.value.request_id
    with Client(site.url, api_key=site.keys["acme"]) as client, pytest.raises(NotPermitted):
        client.webhooks.all()
