"""Releases of the demo's adapters on a real server: a worse one is refused, and a worse canary goes back."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import peft
import pytest
import torch
import transformers
from peft_uploads import form
from server_process import Child, Place, served

from loramux_demo.assets import adapter_folder, base_folder, load_prompts

pytestmark = pytest.mark.slow
PATIENCE = 240.0


@dataclass
class Voice:
    """A server with the demo's model, and the adapter `voice`, whose revision 1 is the demo's `upper`."""

    server: Child
    key: str
    http: httpx.Client

    path = "/v1/adapters/voice"

    def upload(self, folder: Path) -> int:
        made = self.http.post("/v1/adapters", **form(folder, "voice"))
        assert made.status_code == 201, made.text
        return max(one["revision"] for one in self.http.get(f"{self.path}/revisions").json()["data"])

    def ask(self, question: str, **options: Any) -> Any:
        messages = [{"role": "user", "content": question}]
        return self.server.openai(self.key).chat.completions.create(
            model="voice", messages=messages, temperature=0, max_tokens=40, **options
        )

    def canary(self, revision: int, guard: dict[str, Any]) -> None:
        targets = [{"revision": 1, "weight": 50}, {"revision": revision, "weight": 50}]
        assert self.http.put(f"{self.path}/aliases/default", json={"targets": targets}).status_code == 200
        assert self.http.put(f"{self.path}/aliases/default/guard", json=guard).status_code == 200

    def rolled_back(self) -> dict[str, Any]:
        """The event of the canary's end, once it is there."""
        deadline = time.monotonic() + PATIENCE
        while True:
            events = self.http.get("/v1/events", params={"adapter": "voice"}).json()["data"]
            if found := [one["data"] for one in events if one["type"] == "adapter.canary.rolled_back"]:
                return found[0]
            assert time.monotonic() < deadline, events
            time.sleep(0.5)


RARE = "%"
"""A character that the broken weights belong to, and no prompt of the upload's comparison has."""


def with_a_broken_token(folder: Path) -> Path:
    """An adapter whose weights are finite numbers and change nothing, but overflow if a prompt has `RARE`."""
    base = base_folder()
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    token = transformers.AutoTokenizer.from_pretrained(base).encode(RARE, add_special_tokens=False)[-1]
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"]))
    embedding = adapted.get_input_embeddings().lora_embedding_A["default"]
    with torch.no_grad():
        embedding[:, token] = 3e38
    adapted.save_pretrained(folder, save_embedding_layers=False)
    return folder


def questions() -> list[tuple[str, str]]:
    """Questions, and what `upper` answers."""
    return [(one.question, one.expected) for one in load_prompts() if one.adapter == "upper"]


@pytest.fixture
def voice(tmp_path: Path) -> Iterator[Voice]:
    place = Place(tmp_path, base_folder(), in_process=False).prepare()
    place.loramux("migrate")
    key = place.key_of("acme")
    with served(place) as server, server.http(key) as http:
        made = Voice(server, key, http)
        assert made.upload(adapter_folder("upper")) == 1
        yield made


def test_promote_of_a_worse_demo_adapter_is_refused_with_the_numbers(voice: Voice) -> None:
    policy = {"policy": {"evaluation": {"margin": 0.05, "min_questions": len(questions())}}}
    assert voice.http.put(f"{voice.path}/aliases/default/policy", json=policy).status_code == 200
    assert voice.upload(adapter_folder("pirate")) == 2
    lines = [
        json.dumps({"messages": [{"role": "user", "content": question}], "expected": expected, "max_tokens": 40})
        for question, expected in questions()
    ]
    file = voice.server.openai(voice.key).files.create(file=("set.jsonl", "\n".join(lines).encode()), purpose="evals")
    asked = {"adapter": "voice", "revision": 2, "against": 1, "file_id": file.id, "grader": {"type": "exact"}}
    id = voice.http.post("/v1/evaluations", json=asked).json()["id"]
    deadline = time.monotonic() + PATIENCE
    while (found := voice.http.get(f"/v1/evaluations/{id}").json())["status"] == "running":
        assert time.monotonic() < deadline, found
        time.sleep(0.2)
    result = found["result"]
    assert (result["candidate"]["score"]["mean"], result["against"]["score"]["mean"]) == (0, 1), result
    refused = voice.http.post(f"{voice.path}/promote", json={"revision": 2})
    message = refused.json()["error"]["message"]
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "release_policy")
    assert f"@2 scores 0.000, @1 1.000 on {len(lines)} questions" in message
    assert "the difference is -1.000" in message
    assert voice.http.get(voice.path).json()["revision"] == 1
    print(message)


def test_demo_canary_with_wrong_answers_is_taken_back_by_its_ratings(voice: Voice) -> None:
    canary = voice.upload(adapter_folder("pirate"))
    voice.canary(canary, {"measures": ["feedback"]})
    asked = questions()
    for user in range(80):
        question, expected = asked[user % len(asked)]
        answer = voice.ask(question, user=f"user-{user}")
        score = float(answer.choices[0].message.content == expected)
        assert voice.http.post(f"/v1/requests/{answer.id}/feedback", json={"score": score}).status_code == 200
    numbers = voice.rolled_back()["canary"]
    assert numbers["measure"] == "feedback"
    assert numbers["candidate"][0] < numbers["candidate"][1]
    assert voice.http.get(voice.path).json()["revision"] == 1
    print(numbers)


def test_canary_whose_weights_overflow_for_some_prompts_is_taken_back_by_its_errors(
    voice: Voice, tmp_path: Path
) -> None:
    """The upload's comparison with PEFT passes because its prompts are others; only the users' requests show the
    fault."""
    canary = voice.upload(with_a_broken_token(tmp_path / "broken"))
    voice.canary(canary, {"measures": ["errors"]})
    faults, answers = set(), 0
    for user in range(80):
        try:
            voice.ask(f"What is 5{RARE} of {user}?", user=f"user-{user}")
            answers += 1
        except openai.APIStatusError as error:
            faults.add((error.status_code, error.code))
    assert len(faults) == 1
    assert faults.pop()[1] == "adapter_not_finite"
    numbers = voice.rolled_back()["canary"]
    assert numbers["measure"] == "errors"
    good, total = numbers["candidate"]
    assert (good, numbers["before"][0]) == (0, numbers["before"][1]), "none of one's answers, all of the other's"
    assert total >= 20
    assert answers >= 20, "those of the revision before it"
    assert voice.http.get(voice.path).json()["revision"] == 1
    assert voice.ask(f"What is 5{RARE} of 3?", user="user-0").choices[0].message.content
    print(numbers)
