"""Every route, with every kind of another tenant's identifier in every place for a text: the answer is that for an
identifier that does not exist.

The routes are those of the OpenAPI document (`probes`), so a new route is tested without a change here.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from attacks import Files
from listening import until_true
from probes import Probe, Routes
from server_process import Child, Place, served

from loramux.accounts.tenants.authority import TENANT_SCOPES

SCOPES = sorted(TENANT_SCOPES | {"push"})
SETTINGS = "[privacy]\nresponse_seconds = 86_400\n[training]\nlocal_trainer = false\n[adapters]\nmax_aliases = 1000\n"
LINE = {"custom_id": "hush-line", "method": "POST", "url": "/v1/completions"}
QUESTION = [{"role": "user", "content": "hush"}]
GENERATED = re.compile(
    r"\b[a-z]+[-_][0-9a-f]{16,}\b|\b[0-9a-f]{32,64}\b|\d{4}-\d\d-\d\dT[\d:.]+Z?|\b1[78]\d{8,14}\b|sk-lm-[\w-]+"
)
"""Ids, digests, times and secrets that the server makes."""
QUOTED = re.compile(r"'([^']+)'")
COMPARED = ("content-type", "retry-after", "x-should-retry", "location", "allow", "x-loramux-ignored-fields")
OTHERS = str.maketrans("0123456789abcdefghijklmnopqrstuvwxyz", "3456789012bcdefahijklmnopqrstuvwxyzg")
"""Another character of the same kind for each: digit, hexadecimal letter, other letter."""
SOME = 2
"""Identifiers that are tried in a place which, by its name, refers to nothing."""


@dataclass(frozen=True)
class Tenants:
    server: Child
    victim: httpx.Client
    attacker: httpx.Client
    identifiers: tuple[str, ...]
    """Identifiers of the victim, of every kind."""


@pytest.fixture(scope="module")
def tenants(base_dir: Path, sound: Files, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenants]:
    place = Place(tmp_path_factory.mktemp("isolation"), base_dir).prepare()
    place.config.write_text(place.config.read_text() + SETTINGS)
    keys = {}
    for name in ("acme", "globex"):
        place.loramux("tenant", "create", name)
        scopes = itertools.chain.from_iterable(("--scope", scope) for scope in SCOPES)
        keys[name] = place.loramux("key", "create", "--tenant", name, *scopes)["key"]
    with served(place) as server, server.http(keys["acme"]) as victim, server.http(keys["globex"]) as attacker:
        for moment in ("before", "after"):  # so that another tenant's cursor would show something
            upload(attacker, sound, f"own-{moment}")
            file = {"file": ("own.jsonl", json.dumps(LINE))}
            sent(attacker, "POST", "/v1/files", data={"purpose": "batch"}, files=file)
            if moment == "before":
                identifiers = left_by(victim, sound)
        upload(attacker, sound, "own")
        attacker.put("/v1/adapters/own/aliases/stable", json={"targets": [{"revision": 1, "weight": 1}]})
        yield Tenants(server, victim, attacker, identifiers)


def upload(client: httpx.Client, sound: Files, name: str) -> dict[str, Any]:
    parts = [(file, (file, content)) for file, content in sound.items()]
    return sent(client, "POST", "/v1/adapters", data={"name": name}, files=parts)


def sent(client: httpx.Client, method: str, path: str, **how: Any) -> dict[str, Any]:
    answer: dict[str, Any] = client.request(method, path, **how).raise_for_status().json()
    return answer


def left_by(client: httpx.Client, sound: Files) -> tuple[str, ...]:
    """Make one thing of every kind; return their identifiers."""
    adapter = upload(client, sound, "hush-tone")
    upload(client, sound, "hush-gone")
    client.delete("/v1/adapters/hush-gone").raise_for_status()
    targets = {"targets": [{"revision": 1, "weight": 1}]}
    sent(client, "PUT", "/v1/adapters/hush-tone/aliases/hush-alias", json=targets)
    model = "acme/hush-tone"

    def file(purpose: str, *lines: dict[str, Any]) -> str:
        content = "\n".join(json.dumps(line) for line in lines)
        made = sent(client, "POST", "/v1/files", data={"purpose": purpose}, files={"file": ("hush.jsonl", content)})
        return str(made["id"])

    def made(path: str, **body: Any) -> str:
        return str(sent(client, "POST", path, json=body)["id"])

    batch_file = file("batch", LINE | {"body": {"model": model, "prompt": "hush", "max_tokens": 1}})
    examples = [{"messages": [*QUESTION, {"role": "assistant", "content": str(number)}]} for number in range(10)]
    training_file = file("fine-tune", *examples)
    batch = made("/v1/batches", endpoint="/v1/completions", completion_window="24h", input_file_id=batch_file)
    params = {"model": model, "max_tokens": 1, "messages": QUESTION}
    messages = made("/v1/messages/batches", requests=[{"custom_id": "hush", "params": params}])
    announced = {name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in sound.items()}
    identifiers = (
        model,
        "hush-tone",
        f"{model}@1",
        f"{model}:hush-alias",
        "acme/hush-gone",
        "acme",
        "hush-alias",
        str(adapter["id"]),
        batch_file,
        batch,
        messages,
        made("/v1/responses", model=model, input="hush", max_output_tokens=1, store=True),
        made("/v1/chat/completions", **params),
        made("/v1/uploads", adapter="hush-upload", files=announced),
        made("/v1/keys", name="hush-key"),
        made("/v1/projects", name="hush-project"),
        "hush-project",
        made("/v1/members", issuer="https://id.example", subject="hush", role="viewer"),
        made("/v1/webhooks", url="https://1.1.1.1/hush"),
        made("/v1/fine_tuning/jobs", model="tiny", training_file=training_file, suffix="hush-tuned"),
        str(sent(client, "GET", "/v1/events")["data"][0]["id"]),
    )
    until_true(lambda: sent(client, "GET", f"/v1/batches/{batch}")["status"] == "completed")
    until_true(lambda: sent(client, "GET", f"/v1/messages/batches/{messages}")["processing_status"] == "ended")
    output = str(sent(client, "GET", f"/v1/batches/{batch}")["output_file_id"])
    return (*identifiers, output)


def absent(identifier: str) -> str:
    """Return an identifier of the same form that no tenant has. Only its end differs: messages show some beginnings."""
    return identifier[:-2] + identifier[-2:].translate(OTHERS)


def outcome(answer: httpx.Response, identifier: str) -> tuple[object, ...]:
    """Return what a client learns from the answer, apart from the identifier and from what is new in each answer."""
    headers = [blank(answer.headers.get(name, ""), identifier) for name in COMPARED]
    if answer.is_success:  # texts of models differ with the prompt; the shape does not
        content = answer.json() if "json" in answer.headers["content-type"] else None
        return answer.status_code, headers, shape(content)
    return answer.status_code, headers, blank(answer.text, identifier)


def blank(text: str, identifier: str) -> str:
    """Return the text without the identifier, without quoted parts of it, and without what the server generates."""
    for form in (identifier, quote(identifier, safe="")):
        text = text.replace(form, "IDENTIFIER")
    text = QUOTED.sub(lambda quoted: "PART" if quoted[1] in identifier else quoted[0], text)
    return GENERATED.sub("GENERATED", text)


def shape(value: Any) -> object:
    match value:
        case dict():
            return {key: shape(one) for key, one in value.items()}
        case list():
            return [shape(one) for one in value[:1]]
    return type(value).__name__


def differs(client: httpx.Client, probe: Probe, identifier: str) -> str | None:
    """Return both answers if they differ. A limit that the first request reaches is no difference: the second pair of
    requests, in the other order, gets the same answers."""
    other, found = absent(identifier), []
    for pair in ((identifier, other), (other, identifier)):
        answers = {name: probe.send(client, name) for name in pair}
        first, second = (outcome(answers[name], name) for name in (identifier, other))
        if first == second:
            return None
        found.append(f"{identifier}: {first}\n{other}: {second}")
    return f"{probe}\n{found[0]}"


def seen_by(client: httpx.Client) -> dict[str, Any]:
    """Return what the tenant has, as its own lists show it, without figures that its own reading changes."""
    lists = ("adapters", "deleted_adapters", "files", "batches", "uploads", "keys", "projects", "members", "limits")
    lists += ("webhooks", "events", "models", "evaluations", "fine_tuning/jobs", "messages/batches", "audit")
    seen = {name: sent(client, "GET", f"/v1/{name}") for name in lists}
    for key in seen["keys"]["data"]:
        del key["last_used_at"]
    for webhook in seen["webhooks"]["data"]:
        del webhook["failing_since"]
    for path in ("aliases", "revisions", "grants", "aliases/hush-alias/history"):
        seen[path] = sent(client, "GET", f"/v1/adapters/hush-tone/{path}")
    return seen


def test_lists_of_a_tenant_show_nothing_of_another(tenants: Tenants) -> None:
    document = httpx.get(f"{tenants.server.url}/schema/openapi.json", timeout=120).json()
    lists = [path for path, methods in document["paths"].items() if "get" in methods and "{" not in path]
    assert len(lists) > 30
    for path in lists:
        shown = tenants.attacker.get(path, params={"start_time": 1_700_000_000} if "organization" in path else {}).text
        assert not [one for one in tenants.identifiers if len(one) > 20 and one in shown], path


@pytest.mark.parametrize("kind", ["path", "query", pytest.param("body", marks=pytest.mark.slow)])
def test_identifiers_of_another_tenant_are_answered_as_absent_ones(tenants: Tenants, kind: str) -> None:
    before = seen_by(tenants.victim)
    routes = Routes(httpx.get(f"{tenants.server.url}/schema/openapi.json", timeout=120).json())
    probes = [probe for probe in routes.probes() if probe.place.startswith(kind)]
    assert len(probes) > 20
    turns = itertools.cycle(tenants.identifiers)
    found = []
    for probe in probes:
        tried = tenants.identifiers if probe.is_reference else tuple(itertools.islice(turns, SOME))
        found += [difference for one in tried if (difference := differs(tenants.attacker, probe, one)) is not None]
    assert not found, "\n\n".join(found[:20])
    assert seen_by(tenants.victim) == before
