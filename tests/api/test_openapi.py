"""The API's description: what tools read in it holds, and clients are generated from it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from peft_uploads import form, make_adapter
from site_fixture import Site

METHODS = {"get", "put", "post", "delete", "patch"}


@pytest.fixture(scope="module")
def document(site: Site) -> dict[str, Any]:
    return httpx.get(f"{site.url}/schema/openapi.json", timeout=120).json()


def operations(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, item in document["paths"].items():
        for method in METHODS & item.keys():
            yield f"{method.upper()} {path}", item[method]


def test_parameters_of_paths_are_never_null(document: dict[str, Any]) -> None:
    """A generator leaves out an operation whose path might lack a part."""
    parameters = [(name, one) for name, of in operations(document) for one in of.get("parameters", [])]
    wrong = [name for name, one in parameters if one["in"] == "path" and "null" in json.dumps(one["schema"])]
    assert wrong == []


def test_schemas_have_names_of_their_own(document: dict[str, Any]) -> None:
    titles = Counter(schema.get("title") for schema in document["components"]["schemas"].values())
    assert [title for title, count in titles.items() if title and count > 1 and "[" not in title] == []


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate", "/"])
def test_streams_are_described_next_to_whole_answers(document: dict[str, Any], path: str) -> None:
    content = document["paths"][path]["post"]["responses"]["200"]["content"]
    assert set(content) == {"application/json", "text/event-stream"}


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/generate"])
def test_refusals_in_another_servers_shape_are_described(document: dict[str, Any], path: str) -> None:
    refusal = document["paths"][path]["post"]["responses"]["404"]["content"]["application/json"]["schema"]
    assert len(refusal["oneOf"]) == 2


def test_refusals_are_described_in_our_own_shape(document: dict[str, Any]) -> None:
    """The framework describes its own refusal, with which no route answers, if a route names none."""
    answers = [(name, answer) for name, of in operations(document) for answer in of["responses"].values()]
    assert [name for name, answer in answers if "status_code" in json.dumps(answer)] == []


def test_costs_and_audit_are_described_as_they_are_sent(document: dict[str, Any]) -> None:
    costs = document["paths"]["/v1/organization/costs"]["get"]["responses"]["200"]["content"]["application/json"]
    assert "CostResult" in json.dumps(costs)
    assert document["components"]["schemas"]["AuditObject"]["properties"]["before"] == {}


def test_document_is_small_enough_to_read(site: Site) -> None:
    """Random examples of answers made it 46 MB large, and no JSON if a part of an answer is sent undecoded."""
    assert len(httpx.get(f"{site.url}/schema/openapi.json", timeout=120).content) < 2 << 20


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a generator and a tester of APIs, installed from the registry."""
    folder = tmp_path_factory.mktemp("tools")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    install = [str(folder / "bin/pip"), "install", "--quiet", "openapi-python-client", "schemathesis"]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"they cannot be installed here: {done.stderr[-500:]}")
    yield folder / "bin"
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
def test_generator_makes_a_client_without_warnings(document: dict[str, Any], programs: Path, tmp_path: Path) -> None:
    (tmp_path / "openapi.json").write_text(json.dumps(document))
    (tmp_path / "config.yaml").write_text("content_type_overrides: {application/x-jsonl: text/plain}")
    generate = [str(programs / "openapi-python-client"), "generate", "--path", "openapi.json", "--meta", "none"]
    generate += ["--config", "config.yaml"]
    # Its last steps format the generated code, with a program that is next to it.
    paths = os.environ | {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    made = subprocess.run(generate, cwd=tmp_path, env=paths, capture_output=True, text=True, check=True)
    said = made.stdout + made.stderr
    assert "WARNING" not in said, said


@pytest.mark.slow
@pytest.mark.parametrize("key", ["acme", "all-scopes"], ids=["tenant", "operator"])
def test_responses_match_the_description(site: Site, programs: Path, key: str, tmp_path: Path) -> None:
    """With generated requests, some for an adapter that is there: answers are those of the document, and no 500."""
    checks = "response_schema_conformance,content_type_conformance,status_code_conformance,not_a_server_error"
    header = ("--header", f"Authorization: Bearer {site.keys[key]}")
    with site.http("all-scopes") as http:
        http.post("/v1/adapters", **form(make_adapter(Path(site.settings.model.path), tmp_path / "a"), "real"))
    known = {"name": "real", "owner": "acme", "revision": 1, "alias": "default", "tenant": "globex", "tier": "standard"}
    (tmp_path / "schemathesis.toml").write_text(
        "[parameters]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in known.items())
    )
    how = ("--checks", checks, "--phases", "fuzzing", "--max-examples", "4", "--workers", "1", "--seed", "1")
    without = ("--exclude-path-regex", "(drain|restart|log-level)")
    program = [str(programs / "schemathesis"), "--config-file", str(tmp_path / "schemathesis.toml")]
    command = [*program, "run", f"{site.url}/schema/openapi.json", *header, *how, *without]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-20_000:]
