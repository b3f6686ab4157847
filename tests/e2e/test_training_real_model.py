"""A real model learns the guide's tickets: from the files to a served revision that is better, and equal to PEFT."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import openai
import pytest
from peft_oracle import PeftOracle, stored_adapter
from server_process import Place, served

pytestmark = [pytest.mark.server, pytest.mark.slow]
GUIDES = Path(__file__).parents[2] / "docs/guides"
TRAINING, VALIDATION = GUIDES / "tickets.jsonl", GUIDES / "tickets-validation.jsonl"
SECONDS = 1800.0
NEW_TOKENS = 12


def test_real_model_learns_to_sort_tickets_better_than_its_base_and_equals_peft(
    smollm2_dir: Path, tmp_path: Path
) -> None:
    place = Place(tmp_path, smollm2_dir)
    place.config.write_text(
        f'[model]\npath = "{smollm2_dir}"\nserved_model_name = "smollm2"\ndtype = "float32"\n'
        "[engine]\npool_bytes = 1_073_741_824\n[training]\nshare = 1\n"
    )
    place.loramux("migrate")
    key, began = place.key_of("acme"), time.monotonic()
    with served(place) as server, server.http(key) as http:
        client = server.openai(key)
        training, validation = (
            client.files.create(file=(file.name, file.read_bytes()), purpose="fine-tune").id
            for file in (TRAINING, VALIDATION)
        )
        hyperparameters = {"n_epochs": 2, "learning_rate_multiplier": 5.0}
        method: Any = {"type": "supervised", "supervised": {"hyperparameters": hyperparameters}}
        files = {"training_file": training, "validation_file": validation}
        job = client.fine_tuning.jobs.create(model="smollm2", suffix="tickets", method=method, **files)
        while job.status not in ("succeeded", "failed", "cancelled"):
            assert time.monotonic() - began < SECONDS, job
            time.sleep(1)
            job = client.fine_tuning.jobs.retrieve(job.id)
        assert job.status == "succeeded", job.error
        trained = time.monotonic() - began
        assert job.fine_tuned_model == "acme/tickets@1"
        asked = {"adapter": "tickets", "revision": 1, "against": "base", "file_id": validation}
        made = http.post("/v1/evaluations", json=asked | {"grader": {"type": "label"}}).raise_for_status().json()
        while (found := http.get(f"/v1/evaluations/{made['id']}").json())["status"] == "running":
            assert time.monotonic() - began < SECONDS, found
            time.sleep(1)
        assert found["status"] == "completed", found
        result = found["result"]
        digest = http.get("/v1/adapters/tickets/revisions/1").raise_for_status().json()["digest"]
        tokens = assert_answers_are_pefts(place, client, digest)
    candidate, base, difference = (result[name] for name in ("candidate", "against", "difference"))
    print(
        f"{job.trained_tokens} tokens trained, {trained:.0f} s from the files to the revision; "
        f"score {candidate['score']['mean']:.3f} against {base['score']['mean']:.3f} of the base on "
        f"{result['questions']} tickets, difference {difference['mean']:.3f} "
        f"[{difference['low']:.3f}, {difference['high']:.3f}]; {tokens} tokens equal to PEFT's"
    )
    assert difference["low"] > 0.2
    assert candidate["score"]["mean"] >= 0.8


def assert_answers_are_pefts(place: Place, client: openai.OpenAI, digest: str) -> int:
    """Compare the revision's greedy answers with PEFT's token by token; return the number of tokens."""
    oracle = PeftOracle(place.base, stored_adapter(place.folder, digest))
    prompts = [json.loads(line)["messages"][:-1] for line in VALIDATION.read_text().splitlines()]
    prompts += [[{"role": "user", "content": text}] for text in ("Where is my parcel?", "Name a colour.", "2 + 2 = ?")]
    compared = 0
    for messages in prompts:
        choice = client.chat.completions.create(
            model="acme/tickets@1",
            messages=messages,
            temperature=0,
            max_tokens=NEW_TOKENS,
            extra_body={"return_token_ids": True},
        ).choices[0]
        assert choice.model_extra is not None
        token_ids = choice.model_extra["token_ids"]
        best, margin = oracle.greedy(messages, token_ids)
        assert best == token_ids, (messages[-1], margin)
        compared += len(token_ids)
    return compared
