"""An adapter's life over HTTP: canary, promote, rollback, conditions, idempotency, sharing, pins, undo."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from peft_uploads import form, make_adapter
from site_fixture import Site

BOT = "/v1/adapters/acme/bot"


@pytest.fixture(scope="session")
def folders(base_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [make_adapter(base_dir, tmp_path_factory.mktemp("adapter"), seed=seed) for seed in (1, 2)]


@pytest.fixture
def client(site: Site, folders: list[Path]) -> Iterator[httpx.Client]:
    """Two revisions of acme/bot."""
    site.engine.pinned.clear()
    with site.http() as client:
        for folder in folders:
            assert client.post("/v1/adapters", **form(folder, "bot")).status_code == 201
        yield client
        client.delete(BOT, params={"undo_s": 0})


def told(response: httpx.Response, status: int = 200) -> Any:
    assert response.status_code == status, response.text
    return response.json()["error"] if status >= 400 else response.json()


def test_canary_promote_and_roll_back(site: Site, client: httpx.Client) -> None:
    targets = [{"revision": 1, "weight": 50}, {"revision": 2, "weight": 50}]
    made = told(client.put(f"{BOT}/aliases/canary", json={"targets": targets}))
    assert {alias["name"]: alias["targets"] for alias in made["aliases"]}["canary"] == targets
    ask = site.openai().completions.create
    first, again = (
        {user: ask(model="acme/bot:canary", prompt="x", user=user).model for user in "abcdefghijklmnop"}
        for _ in range(2)
    )
    assert first == again
    assert set(first.values()) == {"acme/bot@1", "acme/bot@2"}
    asked = site.engine.requests[-1]
    assert asked.adapter is not None
    digest = told(client.get(f"{BOT}/revisions/{first['p'][-1]}"))["digest"]
    assert asked.adapter.digest.startswith(digest)
    assert told(client.post(f"{BOT}/promote", json={"revision": 1}))["revision"] == 1
    assert ask(model="acme/bot", prompt="x").model == "acme/bot@1"
    assert told(client.post("/v1/adapters/bot/aliases/default/rollback"))["revision"] == 2
    assert told(client.get(f"{BOT}/aliases/default/history"))["data"][0]["restores"] is not None
    assert [one["name"] for one in told(client.get(f"{BOT}/aliases"))["data"]] == ["canary", "default"]
    assert told(client.delete(f"{BOT}/aliases/default"), 409)["code"] == "alias_needed"
    told(client.delete(f"{BOT}/aliases/canary"))
    wrong = {"targets": [{"revision": 1, "weight": 1.5}]}
    assert told(client.put(f"{BOT}/aliases/canary", json=wrong), 400)["param"].startswith("targets")


def test_changes_on_condition_and_once(client: httpx.Client) -> None:
    got = client.get(BOT)
    tag = got.headers["etag"]
    assert got.json()["etag"] == tag
    assert client.get(BOT, headers={"If-None-Match": tag}).status_code == 304
    moved = client.post(f"{BOT}/promote", json={"revision": 1}, headers={"If-Match": tag})
    assert moved.headers["etag"] != tag
    late = told(client.post(f"{BOT}/promote", json={"revision": 2}, headers={"If-Match": tag}), 412)
    assert (late["code"], late["param"]) == ("precondition_failed", "If-Match")
    told(client.post(f"{BOT}/promote", json={"revision": 2}))
    key = {"Idempotency-Key": "roll-1"}
    back = [client.post(f"{BOT}/aliases/default/rollback", headers=key) for _ in range(3)]
    assert len({response.text for response in back}) == 1
    assert told(client.get(BOT))["revision"] == 1
    other = told(client.post(f"{BOT}/aliases/default/rollback?version=2", headers=key), 422)
    assert other["param"] == "Idempotency-Key"


def test_revisions_pins_and_undo(site: Site, client: httpx.Client) -> None:
    revisions = told(client.get(f"{BOT}/revisions"))["data"]
    assert [(one["name"], one["aliases"]) for one in revisions] == [("acme/bot@2", ["default"]), ("acme/bot@1", [])]
    assert told(client.put(f"{BOT}/pins/2"))["pin"]["pinned_by"].startswith("key_")
    assert [key.partition("/")[0] for key, _ in site.engine.pinned] == [revisions[0]["digest"]]
    assert told(client.delete(f"{BOT}/pins/2"))["pin"] is None
    assert told(client.delete(f"{BOT}/pins/2"), 404)["code"] == "pin_not_found"
    assert told(client.delete(f"{BOT}/revisions/2"), 409)["code"] == "revision_in_use"
    gone = told(client.delete(f"{BOT}/revisions/1", params={"undo_s": 100}))
    assert (gone["state"], gone["undo_until"] - gone["deleted_at"]) == ("deleted", 100)
    told(client.post(f"{BOT}/undelete", params={"revision": 1}))
    for missing in ("9", "0", "x", "1.5"):
        assert told(client.get(f"{BOT}/revisions/{missing}"), 404)["code"] == "revision_not_found"
    assert told(client.patch(BOT, json={"ttl_s": 3600}))["expires_at"] > 0
    assert told(client.patch(f"{BOT}/revisions/1", json={"ttl_s": None}))["expires_at"] is None
    assert told(client.patch(BOT, json={"ttl_s": 0}), 400)["param"] == "ttl_s"
    told(client.delete(BOT))
    assert told(client.get(BOT), 404)["code"] == "adapter_not_found"
    assert told(client.post(f"{BOT}/undelete"))["revision"] == 2
    actions = [entry["action"] for entry in told(site.http("all-scopes").get("/v1/audit"))["data"]]
    assert actions[:3] == ["adapter.undelete", "adapter.delete", "revision.update"]


def test_sharing(site: Site, client: httpx.Client) -> None:
    theirs = site.openai("globex")
    with pytest.raises(openai.NotFoundError):
        theirs.completions.create(model="acme/bot", prompt="x")
    told(client.put(f"{BOT}/grants/globex"))
    assert [one["tenant"] for one in told(client.get(f"{BOT}/grants"))["data"]] == ["globex"]
    assert theirs.completions.create(model="acme/bot", prompt="x").model == "acme/bot@2"
    assert "acme/bot" in [model.id for model in theirs.models.list()]
    assert theirs.models.retrieve("acme/bot").owned_by == "acme"
    asked = site.engine.requests[-1]
    site.openai().completions.create(model="acme/bot", prompt="x")
    assert asked.tenant != site.engine.requests[-1].tenant, "KV and service are the caller's own"
    with site.http("globex") as other:
        assert other.get(BOT).status_code == other.delete(BOT).status_code == 404
        since = {"start_time": int(time.time()) - 3600, "bucket_width": "1h", "group_by[]": "model"}
        buckets = told(other.get("/v1/organization/usage/completions", params=since))["data"]
        assert "acme/bot@2" in {result["model"] for bucket in buckets for result in bucket["results"]}
    told(client.delete(f"{BOT}/grants/globex"))
    with pytest.raises(openai.NotFoundError):
        theirs.completions.create(model="acme/bot", prompt="x")
