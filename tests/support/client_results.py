"""Results of real clients: what each did with a server, and the bodies that it sent, as files of the repository.

docs/compatibility.md has a table of the results (`python tools/reference.py docs`). The bodies are sent again by
tests/api/test_recorded_clients.py, without the clients. Texts in them are cut: what counts is their form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from client_site import ROUTES, Sent

FOLDER = Path(__file__).parents[1] / "api" / "real_clients"
RESULTS, BODIES = FOLDER / "results.json", FOLDER / "bodies"
Results = dict[str, dict[str, str]]
MAX_TEXT, MAX_TOOLS, MAX_BODIES = 40, 4, 10
"""Characters of a text, tools of a body, and bodies of a client, that are kept."""
KEPT_WHOLE = (
    "type",
    "role",
    "name",
    "pattern",
    "$ref",
    "$schema",
    "format",
    "id",
    "call_id",
    "tool_call_id",
    "tool_use_id",
)
KEPT_HEADERS = ("anthropic-beta", "anthropic-version", "openai-beta")
_uuid = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


def take(steps: dict[str, Callable[[], str | None]]) -> dict[str, str]:
    """Take each step, and return what became of it."""
    results = {}
    for name, step in steps.items():
        try:
            results[name] = f"ok, {note}" if (note := step()) else "ok"
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"[:1200]
    return results


def record(client: str, version: str, results: Results, sent: Iterable[Sent]) -> None:
    """Write the results of a client and the forms of its bodies, and expect that every step is taken."""
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    known[client] = {"version": version, "apis": results}
    RESULTS.write_text(json.dumps(dict(sorted(known.items())), indent=1, ensure_ascii=False) + "\n")
    BODIES.mkdir(exist_ok=True)
    name = re.sub(r"\W+", "-", client.lower()).strip("-")
    (BODIES / f"{name}.json").write_text(json.dumps(list(forms(sent)), indent=1, ensure_ascii=False) + "\n")
    failed = {f"{api}: {step}": said for api, of in results.items() for step, said in of.items() if said[:2] != "ok"}
    assert failed == {}


def forms(sent: Iterable[Sent]) -> Iterable[dict[str, Any]]:
    """Yield the answered bodies, one of each form, with their texts cut."""
    seen: set[str] = set()
    for one in sent:
        path = one.path.partition("?")[0]
        if path not in ROUTES or one.status != 200 or len(seen) == MAX_BODIES:
            continue
        body = cut(one.json)
        form = json.dumps([one.path, outline(body)], sort_keys=True)
        if form not in seen:
            seen.add(form)
            headers = {name: one.headers[name] for name in KEPT_HEADERS if name in one.headers}
            yield {"path": one.path, "headers": headers, "body": body}


def cut(value: Any, name: str = "") -> Any:
    """A part of a body without long texts, ids of sessions and names of folders."""
    match value:
        case dict():
            return {key: cut(part, key) for key, part in value.items()}
        case list() if name == "tools":
            return [cut(part, "tool") for part in varied(value)[:MAX_TOOLS]]
        case list():
            return [cut(part, name) for part in value]
        case str() if name == "arguments":
            return value if len(value) < 200 and "/" not in value else "{}"
        case str():
            text = _uuid.sub("0", value)
            is_short = len(text) <= MAX_TEXT and "/" not in text and name != "description"
            is_kept = name in KEPT_WHOLE or is_short
            return text if is_kept else f"{len(text)} characters"
    return value


def varied(tools: list[Any]) -> list[Any]:
    """Tools, those of rare types first."""
    kinds = [json.dumps([tool.get("type"), sorted(tool)]) for tool in tools]
    return [tool for _, tool in sorted(zip(map(kinds.count, kinds), tools, strict=True), key=lambda pair: pair[0])]


def outline(value: Any) -> Any:
    """The form of a body: its fields, types, and roles."""
    match value:
        case dict():
            return {key: part if key in ("type", "role") else outline(part) for key, part in value.items()}
        case list():
            return sorted({json.dumps(outline(part), sort_keys=True) for part in value})
    return type(value).__name__
