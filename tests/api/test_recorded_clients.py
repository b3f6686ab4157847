"""Bodies that published clients have sent, again and without the clients: each is answered, whole and streamed.

`test_agents.py` and `test_client_steps.py` write the bodies when they run the clients.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from client_results import BODIES, RESULTS, forms
from client_site import Sent, client_site
from site_fixture import Site

RECORDED = [
    pytest.param(one, id=f"{file.stem}-{number}")
    for file in sorted(BODIES.glob("*.json"))
    for number, one in enumerate(json.loads(file.read_text()))
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with client_site(tmp_path_factory.mktemp("recorded")) as (made, _):
        yield made


@pytest.mark.parametrize("recorded", RECORDED)
def test_recorded_body_of_a_client_is_answered(site: Site, recorded: dict[str, Any]) -> None:
    with site.http(**{name.replace("-", "_"): value for name, value in recorded["headers"].items()}) as http:
        for stream in (False,) if "prompt_logprobs" in recorded["body"] else (False, True):
            body = recorded["body"] | {"stream": stream}
            if not stream:
                body.pop("stream_options", None)
            answer = http.post(recorded["path"], json=body)
            assert answer.status_code == 200, answer.text


def test_every_step_of_a_client_was_taken() -> None:
    found = json.loads(RESULTS.read_text())
    results = [said for client in found.values() for steps in client["apis"].values() for said in steps.values()]
    assert [said for said in results if said.partition(",")[0] != "ok"] == []


def test_recorded_form_has_no_long_text_and_no_path_of_a_folder() -> None:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "x" * 99}, {"role": "user", "content": "see /home/ada/a.py"}],
        "user": "8f14e45f-ceea-467f-9575-6bca6ba3a3d1",
        "tools": [{"type": "function", "function": {"name": f"t{n}"}} for n in range(9)] + [{"type": "web_search"}],
    }
    sent = [Sent("/v1/chat/completions", {"authorization": "secret"}, json.dumps(body).encode(), 200)] * 2
    [one] = forms(sent)
    assert one["headers"] == {}
    assert [turn["content"] for turn in one["body"]["messages"]] == ["99 characters", "18 characters"]
    assert one["body"]["user"] == "0"
    assert [tool["type"] for tool in one["body"]["tools"]] == ["web_search", *["function"] * 3]
