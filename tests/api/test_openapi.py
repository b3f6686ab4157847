"""The API's description: what tools read in it holds, and clients are generated from it."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
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
def test_streams_are_described_beside_whole_answers(document: dict[str, Any], path: str) -> None:
    content = document["paths"][path]["post"]["responses"]["200"]["content"]
    assert set(content) == {"application/json", "text/event-stream"}


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/generate"])
def test_refusals_in_another_servers_shape_are_described(document: dict[str, Any], path: str) -> None:
    refusal = document["paths"][path]["post"]["responses"]["404"]["content"]["application/json"]["schema"]
    assert len(refusal["oneOf"]) == 2


def test_costs_and_audit_are_described_as_they_are_sent(document: dict[str, Any]) -> None:
    costs = document["paths"]["/v1/organization/costs"]["get"]["responses"]["200"]["content"]["application/json"]
    assert "CostResult" in json.dumps(costs)
    assert document["components"]["schemas"]["AuditObject"]["properties"]["before"] == {}


@pytest.mark.slow
def test_generator_makes_a_client_without_warnings(document: dict[str, Any], tmp_path: Path) -> None:
    program = shutil.which("openapi-python-client")
    if program is None:
        pytest.skip("openapi-python-client is not installed: pip install openapi-python-client")
    (tmp_path / "openapi.json").write_text(json.dumps(document))
    made = subprocess.run(
        [program, "generate", "--path", "openapi.json", "--meta", "none"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "WARNING" not in made.stdout + made.stderr


@pytest.mark.slow
def test_responses_match_the_description(site: Site) -> None:
    """With generated requests: bodies, content types and statuses are those of the document, and nothing is a 500."""
    program = shutil.which("schemathesis")
    if program is None:
        pytest.skip("schemathesis is not installed: pip install schemathesis")
    checks = "response_schema_conformance,content_type_conformance,status_code_conformance,not_a_server_error"
    key = ("--header", f"Authorization: Bearer {site.keys['all-scopes']}")
    how = ("--checks", checks, "--phases", "fuzzing", "--max-examples", "4", "--workers", "1", "--seed", "1")
    without = ("--exclude-path-regex", "(drain|restart|log-level)")
    command = [program, "run", f"{site.url}/schema/openapi.json", *key, *how, *without]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-6000:]
