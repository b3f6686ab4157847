"""`loramux_client` against both servers."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from peft_uploads import form, make_adapter
from site_fixture import Site

from loramux_client import (
    AsyncClient,
    Client,
    Conflict,
    NotAuthenticated,
    NotFound,
    NotPermitted,
    Progress,
    UploadRejected,
    uploads,
)


@pytest.fixture(scope="session")
def folder(base_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(base_dir, tmp_path_factory.mktemp("client"), seed=11)


@pytest.fixture
def client(site: Site) -> Iterator[Client]:
    with Client(site.url, api_key=site.keys["all-scopes"]) as client:
        yield client


def test_adapter_requests_name_the_revision_that_answered(site: Site, client: Client, folder: Path) -> None:
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
    assert "acme/logged" in [adapter.name for adapter in client.adapters.list()]
    used = client.usage.completions(int(time.time()) - 3600, models=["acme/logged@1"], group_by=["model"])
    assert used[-1].results[0].num_model_requests == 2
    with Client(site.url, api_key=site.keys["globex"]) as other:
        assert other.adapters.requests("acme/logged") == []
        client.adapters.grant("logged", "globex")
        site.openai("globex").completions.create(model="acme/logged", prompt="defg")
        assert [one.prompt_tokens for one in other.adapters.requests("acme/logged")] == [5]
        assert len(client.adapters.requests("logged")) == 2
        client.adapters.revoke("logged", "globex")
        with pytest.raises(NotFound):
            other.adapters.get("acme/logged")
    client.adapters.delete("logged")
    assert client.adapters.events("acme/logged")[0].type == "adapter.revision.retired"


def test_push_resumes_and_waits_for_validation(client: Client, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "PART_BYTES", 1000)
    files = client.run(uploads.describe(folder))
    begun = client.uploads.create("cut", files)
    first = (folder / "adapter_model.safetensors").read_bytes()[:1500]
    assert client.uploads.put_part(begun.id, "adapter_model.safetensors", 0, first).received == 1500
    with pytest.raises(Conflict) as told:
        client.uploads.put_part(begun.id, "adapter_model.safetensors", 0, first)
    assert told.value.code == "wrong_offset"
    seen: list[Progress] = []
    done = client.uploads.push(folder, "acme/cut", on_progress=seen.append)
    assert (done.id, done.state, done.revision) == (begun.id, "ready", "acme/cut@1")
    sent = [one.done for one in seen if one.stage == "sending" and one.file == "adapter_model.safetensors"]
    assert sent[0] == 1500
    assert sent[-1] == (folder / "adapter_model.safetensors").stat().st_size
    assert done.report is not None
    assert done.report.found is not None
    assert done.report.found.rank == 4
    assert client.adapters.get("cut").digest == done.digest
    client.adapters.delete("cut")


def test_async_push_rejected_raises_with_report(site: Site, folder: Path, tmp_path: Path) -> None:
    spoiled = shutil.copytree(folder, tmp_path / "spoiled")
    config = json.loads((spoiled / "adapter_config.json").read_bytes()) | {"target_modules": ["no_such_module"]}
    (spoiled / "adapter_config.json").write_text(json.dumps(config))

    async def push() -> UploadRejected:
        async with AsyncClient(site.url, api_key=site.keys["all-scopes"]) as client:
            with pytest.raises(UploadRejected) as told:
                await client.uploads.push(spoiled)
            event = (await client.adapters.events("spoiled"))[0]
            assert (event.type, event.data.upload) == ("adapter.revision.rejected", told.value.upload.id)
            assert event.data.error is not None
            assert event.data.error.code == told.value.code
            assert (await client.uploads.cancel(told.value.upload.id)).deleted
            return told.value

    rejected = asyncio.run(push())
    assert rejected.code
    assert "target_modules" in str(rejected)


def test_async_client_manages_webhooks(site: Site) -> None:
    async def use() -> None:
        async with AsyncClient(site.url, api_key=site.keys["all-scopes"]) as client:
            hook = await client.webhooks.create("http://127.0.0.1:9/hook")
            assert hook.secret
            assert not (await client.webhooks.test(hook.id)).delivered
            assert not (await client.webhooks.enable(hook.id, enabled=False)).enabled
            assert await client.webhooks.deliveries(hook.id) == []
            assert hook.id in [one.id for one in await client.webhooks.list()]
            assert (await client.webhooks.delete(hook.id)).deleted

    asyncio.run(use())


def test_api_errors_have_types(site: Site) -> None:
    with Client(site.url, api_key="sk-lm-wrong") as client, pytest.raises(NotAuthenticated) as told:
        client.adapters.list()
    assert told.value.request_id
    with Client(site.url, api_key=site.keys["acme"]) as client, pytest.raises(NotPermitted):
        client.webhooks.list()
