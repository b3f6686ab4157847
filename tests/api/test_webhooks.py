"""Webhooks over HTTP: from an upload to a signed message, and the rights that each call needs."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue

import pytest
import standardwebhooks
from peft_uploads import form, make_adapter
from site_fixture import Site

from loramux.accounts.tenants.authority import TENANT_SCOPES


class Receiver:
    """A webhook of a customer's, on a port of this machine."""

    def __init__(self) -> None:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.messages.put((dict(self.headers), body))
                self.send_response(receiver.status)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.status = 204
        self.messages: Queue[tuple[dict[str, str], bytes]] = Queue()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/hook"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def next(self, secret: str) -> dict:
        """The next message, whose signature holds."""
        headers, body = self.messages.get(timeout=120)
        return standardwebhooks.Webhook(secret).verify(body, {name.lower(): value for name, value in headers.items()})

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


def test_webhook_delivers_signed_event_of_an_upload(
    site: Site, base_dir: Path, tmp_path: Path, receiver: Receiver
) -> None:
    with site.http("all-scopes") as http:
        made = http.post("/v1/webhooks", json={"url": receiver.url, "events": ["adapter.revision.ready"]})
        assert made.status_code == 201
        hook = made.json()
        assert hook["secret"].startswith("whsec_")
        listed = http.get("/v1/webhooks").json()["data"]
        assert {name: value for name, value in hook.items() if name != "secret"} in listed
        uploaded = http.post("/v1/adapters", **form(make_adapter(base_dir, tmp_path, seed=7), "hooked")).json()
        told = receiver.next(hook["secret"])
        assert told["type"] == "adapter.revision.ready"
        assert told["data"] == {
            "adapter": "acme/hooked",
            "revision": 1,
            "model": "acme/hooked@1",
            "digest": uploaded["digest"],
        }
        assert http.delete("/v1/adapters/hooked").status_code == 200
        events = http.get("/v1/events", params={"adapter": "hooked"}).json()["data"]
        assert [event["type"] for event in events] == ["adapter.revision.retired", "adapter.revision.ready"]
        assert events[1]["data"] == told["data"]
        older = http.get("/v1/events", params={"adapter": "hooked", "before": events[0]["id"]}).json()["data"]
        assert older == events[1:]
        assert http.delete(f"/v1/webhooks/{hook['id']}").json()["deleted"]
        assert receiver.messages.empty()
    with site.http("globex") as http:
        assert http.get("/v1/events", params={"adapter": "acme/hooked"}).json()["data"] == []


def test_webhook_test_and_deliveries_report_results(site: Site, receiver: Receiver) -> None:
    with site.http("all-scopes") as http:
        hook = http.post("/v1/webhooks", json={"url": receiver.url}).json()
        answer = http.post(f"/v1/webhooks/{hook['id']}/test").json()
        assert (answer["delivered"], answer["status"]) == (True, 204)
        assert receiver.next(hook["secret"])["type"] == "webhook.test"
        receiver.status = 500
        answer = http.post(f"/v1/webhooks/{hook['id']}/test").json()
        assert (answer["delivered"], answer["error"]) == (False, "answered 500")
        assert http.get(f"/v1/webhooks/{hook['id']}/deliveries").json()["data"] == []
        off = http.patch(f"/v1/webhooks/{hook['id']}", json={"enabled": False}).json()
        assert (off["enabled"], off["disabled_because"]) == (False, "its owner has switched it off")
        assert http.patch(f"/v1/webhooks/{hook['id']}", json={"enabled": True}).json()["enabled"]
        http.delete(f"/v1/webhooks/{hook['id']}")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"url": "nonsense"}, "url"),
        ({"url": "ftp://x.example"}, "url"),
        ({"url": "https://x.example", "events": ["all"]}, "events"),
        ({}, "url"),
    ],
)
def test_webhook_refusal_names_the_field(site: Site, body: dict, param: str) -> None:
    with site.http("all-scopes") as http:
        answer = http.post("/v1/webhooks", json=body)
        assert answer.status_code == 400, json.dumps(answer.json())
        assert answer.json()["error"]["param"] == param


def test_webhook_tells_of_releases_and_restored_revisions(
    site: Site, base_dir: Path, tmp_path: Path, receiver: Receiver
) -> None:
    with site.http("all-scopes") as http:
        hook = http.post("/v1/webhooks", json={"url": receiver.url}).json()
        for seed in (8, 9):
            folder = make_adapter(base_dir, tmp_path / str(seed), seed=seed)
            assert http.post("/v1/adapters", **form(folder, "told")).status_code == 201
            assert receiver.next(hook["secret"])["type"] == "adapter.revision.ready"
        alias = "/v1/adapters/told/aliases/default"

        def told_of(kind: str) -> dict:
            told = receiver.next(hook["secret"])
            assert told["type"] == kind
            return told["data"]

        whole, shared = [{"revision": 2, "weight": 1}], [{"revision": 1, "weight": 9}, {"revision": 2, "weight": 1}]
        assert http.put(alias, json={"targets": shared}).status_code == 200
        move = {"name": "default", "before": {"2": 100}, "after": {"1": 9, "2": 1}}
        expected = {"adapter": "acme/told", "revision": 2, "model": "acme/told@2", "alias": move}
        assert told_of("adapter.canary.started") == expected
        assert http.put(alias, json={"targets": shared}).status_code == 200, "unchanged: nothing is told"
        assert http.put(alias, json={"targets": whole}).status_code == 200
        assert told_of("adapter.alias.promoted")["alias"]["after"] == {"2": 1}
        assert http.post(f"{alias}/rollback").status_code == 200
        assert told_of("adapter.alias.rolled_back")["alias"]["after"] == {"1": 9, "2": 1}
        assert http.delete("/v1/adapters/told").status_code == 200
        assert {told_of("adapter.revision.retired")["revision"] for _ in range(2)} == {1, 2}
        assert http.post("/v1/adapters/told/undelete").status_code == 200
        assert {told_of("adapter.revision.restored")["revision"] for _ in range(2)} == {1, 2}
        assert http.delete(f"/v1/webhooks/{hook['id']}").json()["deleted"]
        assert receiver.messages.empty()
        http.delete("/v1/adapters/told", params={"undo_s": 0})


def test_history_grants_and_audit_log_name_the_key_of_a_change(site: Site, base_dir: Path, tmp_path: Path) -> None:
    with site.http(site.enrol(TENANT_SCOPES)) as http:
        key = http.post("/v1/keys", json={"name": "release robot"}).json()
        robot = {"Authorization": f"Bearer {key['key']}"}
        made = http.post("/v1/adapters", **form(make_adapter(base_dir, tmp_path, seed=11), "named"), headers=robot)
        assert made.status_code == 201
        (version,) = http.get("/v1/adapters/named/aliases/default/history").json()["data"]
        assert (version["changed_by"], version["changed_by_name"]) == (key["id"], "release robot")
        grant = http.put("/v1/adapters/named/grants/globex", headers=robot).json()
        assert (grant["granted_by"], grant["granted_by_name"]) == (key["id"], "release robot")
        assert http.get("/v1/adapters/named/grants").json()["data"] == [grant]
        assert http.put("/v1/adapters/named/grants/globex").json() == grant, "the grant is the robot's already"
        assert http.delete("/v1/adapters/named/grants/globex").json() == grant
        entries = http.get("/v1/audit", params={"limit": 20}).json()["data"]
        by_robot = [entry for entry in entries if entry["actor"] == key["id"]]
        assert by_robot
        assert {entry["actor_name"] for entry in by_robot} == {"release robot"}
