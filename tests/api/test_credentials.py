"""Rights that a credential may pass on, and data that it may see, over HTTP."""

from __future__ import annotations

import time

import httpx
import pytest
from msgspec.structs import replace
from site_fixture import PATIENCE, Site

from loramux.accounts.tenants import secrets

TEXT = {"model": "tiny", "prompt": "hi"}


def with_key(site: Site, secret: str) -> httpx.Client:
    return httpx.Client(base_url=site.url, headers={"Authorization": f"Bearer {secret}"}, timeout=PATIENCE)


def made(site: Site, client: httpx.Client, **body: object) -> str:
    answer = client.post("/v1/keys", json=body)
    assert answer.status_code == 201, answer.text
    return answer.json()["key"]


def test_child_key_is_bound_to_its_makers_project_and_expiry(site: Site) -> None:
    with site.http("all-scopes") as owner:
        name = f"team-{time.time_ns()}"
        assert owner.post("/v1/projects", json={"name": name}).status_code == 201
        maker = made(site, owner, scopes=["keys", "inference"], project=name, expires_in=600)
        mine = owner.get("/v1/keys").json()["data"][-1]
    with with_key(site, maker) as client:
        child = client.post("/v1/keys", json={"scopes": ["inference"]}).json()
        assert (child["project_id"], child["expires_at"]) == (mine["project_id"], mine["expires_at"])
        for body in ({"project": "default"}, {"expires_in": 86_400}, {"scopes": ["inference", "audit"]}):
            refused = client.post("/v1/keys", json={"scopes": ["inference"]} | body)
            assert refused.status_code == 403, refused.text
            assert refused.json()["error"]["code"] == "insufficient_permissions"
    with site.http("all-scopes") as owner, with_key(site, child["key"]) as client:
        assert client.post("/v1/completions", json=TEXT).status_code == 200
        assert owner.delete(f"/v1/keys/{mine['id']}").status_code == 200
        assert client.post("/v1/completions", json=TEXT).status_code == 401


def test_key_with_an_allow_list_sees_nothing_beyond_it(site: Site) -> None:
    with site.http("all-scopes") as owner:
        assert owner.post("/v1/completions", json=TEXT).status_code == 200
        owner.post("/v1/webhooks", json={"url": "http://127.0.0.1:9/hook"}).raise_for_status()
        hook = owner.get("/v1/webhooks").json()["data"][-1]["id"]
    start = int(time.time()) - 3600
    with site.http("no-models") as narrow:
        usage = narrow.get("/v1/organization/usage/completions", params={"start_time": start, "group_by": "model"})
        costs = narrow.get("/v1/organization/costs", params={"start_time": start - start % 86_400})
        for page in (usage, costs):
            assert page.status_code == 200, page.text
            assert [result for bucket in page.json()["data"] for result in bucket["results"]] == []
        assert narrow.get("/v1/events").json()["data"] == []
        for path in ("/v1/audit", "/v1/webhooks", "/v1/members", "/v1/budgets", "/v1/organization/invoices/2026-11"):
            assert narrow.get(path).status_code == 403, path
        for path in (f"/v1/webhooks/{hook}/test", "/v1/projects", "/v1/members"):
            assert narrow.post(path, json={}).status_code == 403, path
        assert narrow.get("/admin/tenants").status_code == 403
        assert [key["models"] for key in narrow.get("/v1/keys").json()["data"]] == [["acme/nothing"]]


def results(answer: httpx.Response) -> list[dict[str, object]]:
    assert answer.status_code == 200, answer.text
    return [result for bucket in answer.json()["data"] for result in bucket["results"]]


def test_key_of_a_project_sees_the_usage_of_its_project_alone(site: Site) -> None:
    with site.http("all-scopes") as owner:
        name = f"team-{time.time_ns()}"
        project = owner.post("/v1/projects", json={"name": name}).json()["id"]
        maker = made(site, owner, scopes=["inference", "usage"], project=name)
        assert owner.post("/v1/completions", json=TEXT).status_code == 200
    usage = {"start_time": int(time.time()) - 3600, "group_by": "project_id"}
    costs = usage | {"start_time": int(time.time()) // 86_400 * 86_400}
    with with_key(site, maker) as bound, site.http("all-scopes") as owner:
        assert results(bound.get("/v1/organization/usage/completions", params=usage)) == []
        assert results(bound.get("/v1/organization/costs", params=costs)) == []
        assert bound.post("/v1/completions", json=TEXT).status_code == 200
        [mine] = results(bound.get("/v1/organization/usage/completions", params=usage))
        assert (mine["project_id"], mine["num_model_requests"]) == (project, 1)
        seen = {one["project_id"] for one in results(bound.get("/v1/organization/costs", params=costs))}
        assert seen <= {project}
        of_all = results(owner.get("/v1/organization/usage/completions", params=usage))
        assert len({one["project_id"] for one in of_all}) > 1


def test_key_of_a_project_sees_and_sets_the_limits_of_its_project_alone(site: Site) -> None:
    with site.http("all-scopes") as owner:
        names = [f"{team}-{time.time_ns()}" for team in ("one", "two")]
        mine, theirs = (owner.post("/v1/projects", json={"name": name}).json()["id"] for name in names)
        secret = made(site, owner, scopes=["limits", "keys", "billing"], project=names[0])
        others = [owner.post("/v1/keys", json={"scopes": ["inference"], "project": name}).json() for name in names]
        subjects = [mine, others[0]["id"], theirs, others[1]["id"]]
        for subject in subjects:
            owner.put(f"/v1/limits/{subject}/requests_per_minute", json={"value": 7}).raise_for_status()
    with with_key(site, secret) as bound:
        seen = {one["subject"] for one in bound.get("/v1/limits").json()["data"]}
        assert seen & set(subjects) == set(subjects[:2])
        assert theirs not in {one["subject"] for one in bound.get("/v1/budgets").json()["data"]}
        for subject in subjects[:2]:
            assert bound.put(f"/v1/limits/{subject}/requests_per_minute", json={"value": 8}).status_code == 200
        for subject in [*subjects[2:], "key_of_nobody"]:
            for method, path in (("PUT", "limits/{}/requests_per_minute"), ("PUT", "budgets/{}/day")):
                body = {"value": 8} if "limits" in path else {"amount_nano": 8}
                refused = bound.request(method, f"/v1/{path.format(subject)}", json=body)
                assert (refused.status_code, refused.json()["error"]["code"]) == (404, "not_found")
            assert bound.delete(f"/v1/limits/{subject}/requests_per_minute").status_code == 404
    with site.http("all-scopes") as owner:
        values = {one["subject"]: one["value"] for one in owner.get("/v1/limits").json()["data"]}
        assert [values[subject] for subject in subjects] == [8, 8, 7, 7]


def test_limit_of_a_rotated_key_holds_for_its_successor(site: Site) -> None:
    with site.http("all-scopes") as owner:
        body = owner.post("/v1/keys", json={"scopes": ["inference"]}).json()
        limit = {"value": 0}
        owner.put(f"/v1/limits/{body['id']}/requests_per_minute", json=limit).raise_for_status()
        rotated = owner.post(f"/v1/keys/{body['id']}/rotate", json={"overlap_seconds": 60}).json()
        with with_key(site, rotated["key"]) as client:
            assert client.post("/v1/completions", json=TEXT).status_code == 429
            owner.delete(f"/v1/limits/{rotated['id']}/requests_per_minute").raise_for_status()
            assert client.post("/v1/completions", json=TEXT).status_code == 200


def test_many_invalid_keys_get_429_and_a_valid_key_from_the_same_address_200(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secrets, "MAX_FAILURES", 3)
    with with_key(site, "sk-lm-wrong") as client:
        answers = [client.get("/v1/models") for _ in range(40)]
    assert answers[-1].status_code == 429
    assert answers[-1].json()["error"]["code"] == "too_many_failed_authentications"
    assert int(answers[-1].headers["retry-after"]) > 0
    with site.http() as client:
        assert client.get("/v1/models").status_code == 200


def test_idempotency_key_is_refused_where_answers_are_not_stored(site: Site) -> None:
    platform = site.server.app.state.platform
    settings = platform.settings
    none_stored = replace(settings, privacy=replace(settings.privacy, idempotency_seconds=0))
    object.__setattr__(platform, "settings", none_stored)
    try:
        with site.http(idempotency_key="one") as client:
            refused = client.post("/v1/completions", json=TEXT)
    finally:
        object.__setattr__(platform, "settings", settings)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "idempotency_disabled"
