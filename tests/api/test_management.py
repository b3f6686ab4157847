"""Keys, projects, members and the audit log over HTTP."""

from __future__ import annotations

import re

import httpx
from local_issuer import Issuer
from site_fixture import PATIENCE, Site

from loramux.accounts.tenants.authority import TENANT_SCOPES

TEXT = {"model": "tiny", "prompt": "hi"}


def bearer(site: Site, secret: str) -> httpx.Client:
    return httpx.Client(base_url=site.url, headers={"Authorization": f"Bearer {secret}"}, timeout=PATIENCE)


def test_key_is_created_rotated_and_revoked(site: Site) -> None:
    with site.http("all-scopes") as http:
        made = http.post("/v1/keys", json={"name": "ci", "scopes": ["inference"], "models": ["tiny"]})
        assert made.status_code == 201
        key = made.json()
        assert key["key"].startswith("sk-lm-")
        listed = [one for one in http.get("/v1/keys").json()["data"] if one["id"] == key["id"]]
        assert listed == [{name: value for name, value in key.items() if name != "key"}]
        with bearer(site, key["key"]) as mine:
            assert mine.post("/v1/completions", json=TEXT).status_code == 200
            assert mine.post("/v1/keys", json={}).status_code == 403
        new = http.post(f"/v1/keys/{key['id']}/rotate", json={"overlap_seconds": 60}).json()
        for secret in (key["key"], new["key"]):
            with bearer(site, secret) as mine:
                assert mine.get("/v1/models").status_code == 200
        assert http.delete(f"/v1/keys/{key['id']}").json()["revoked_at"]
        with bearer(site, key["key"]) as mine:
            assert mine.get("/v1/models").status_code == 401


def test_management_refusals_have_their_statuses(site: Site) -> None:
    with site.http("all-scopes") as http:
        assert http.post("/v1/keys", json={"scopes": ["root"]}).json()["error"]["param"] == "scopes"
        assert http.post("/v1/keys", json={"wrong": 1}).json()["error"]["param"] == "wrong"
        assert http.post("/v1/keys", json={"project": "nowhere"}).status_code == 404
        assert http.post("/v1/projects", json={"name": "twice"}).status_code in (201, 409)
        assert http.post("/v1/projects", json={"name": "twice"}).status_code == 409
        assert http.delete("/v1/projects/default").status_code == 409
        assert http.post("/v1/projects", json={"name": "Not A Name"}).status_code == 400


def test_member_manages_within_its_role(site: Site, issuer: Issuer) -> None:
    with bearer(site, issuer.token(sub="the admin")) as admin:
        stranger = {"issuer": issuer.url, "subject": "new one"}
        assert admin.post("/v1/members", json=stranger | {"role": "owner"}).status_code == 403
        made = admin.post("/v1/members", json=stranger | {"role": "viewer"}).json()
        with bearer(site, issuer.token(sub="new one")) as person:
            assert person.get("/v1/models").status_code == 200
            assert person.post("/v1/completions", json=TEXT).status_code == 403
            assert admin.patch(f"/v1/members/{made['id']}", json={"role": "developer"}).json()["role"] == "developer"
            assert person.post("/v1/completions", json=TEXT).status_code == 200
            assert admin.delete(f"/v1/members/{made['id']}").status_code == 200
            assert person.get("/v1/models").status_code == 401


def test_audit_entry_has_the_request_id(site: Site) -> None:
    with site.http(site.enrol(TENANT_SCOPES), x_request_id="find-me") as http:
        made = http.post("/v1/keys", json={}).json()
        entry = http.get("/v1/audit", params={"limit": 1}).json()["data"][0]
    assert (entry["action"], entry["object_id"]) == ("key.create", made["id"])
    assert re.fullmatch(r"req_[0-9a-f]{32}/find-me", entry["request_id"]), "the server's own id, then the client's"
    assert entry["source"] == "127.0.0.1"
    assert entry["actor"].startswith("key_")
    assert made["key"] not in str(entry)
    with site.http("globex") as http:
        assert http.get("/v1/audit").status_code == 403
