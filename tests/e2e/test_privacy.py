"""Nothing of what a request says is found on a server's disk: not in its database, its store or its log."""

from __future__ import annotations

import json
import time
from pathlib import Path

import openai
import pytest
from live_folders import holding
from peft_uploads import form, make_adapter
from server_process import Child, Place, served

PROMPT = "canary-prompt-7f3a"
CONTENT = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8}


def places_of(folder: Path, text: str) -> list[str]:
    """List the files under `folder` that hold the text."""
    return [str(path.relative_to(folder)) for path in holding(folder, text.encode())]


def ask_in_every_way(client: openai.OpenAI, *, is_kept: bool) -> None:
    client.chat.completions.create(model="tiny", user=f"end-user-{is_kept}", **CONTENT)
    client.completions.create(model="tiny", prompt=PROMPT, max_tokens=4)
    client.completions.create(model="tiny", prompt="hi", max_tokens=4, extra_body={"surprise": PROMPT})  # ignored
    list(client.chat.completions.create(model="tiny", stream=True, **CONTENT))
    stream = client.chat.completions.create(model="tiny", stream=True, messages=CONTENT["messages"], max_tokens=2000)
    next(iter(stream))
    stream.close()
    wrong = (
        {"model": "absent", **CONTENT},
        {"model": "tiny", **CONTENT, "n": 1000},
        {"model": "tiny", "messages": [{"role": "user", "content": PROMPT * 10_000}]},
    )
    for asked in wrong:
        with pytest.raises(openai.APIStatusError):
            client.chat.completions.create(**asked)
    key = {"Idempotency-Key": f"key-{is_kept}"}
    if is_kept:
        client.chat.completions.create(model="tiny", extra_headers=key, **CONTENT)
        return
    with pytest.raises(openai.PermissionDeniedError) as refused:
        client.chat.completions.create(model="tiny", extra_headers=key, **CONTENT)
    assert refused.value.code == "zero_retention"
    with pytest.raises(openai.PermissionDeniedError):
        client.files.create(file=("in.jsonl", PROMPT.encode()), purpose="batch")
    with pytest.raises(openai.PermissionDeniedError):
        client.batches.create(input_file_id="file-1", endpoint="/v1/completions", completion_window="24h")


def shadow(server: Child, key: str, base_dir: Path, folder: Path, *, keep_outputs: bool) -> None:
    """Ask an adapter of the key's tenant whose requests are repeated on another revision, and wait for that."""
    with server.http(key) as session:
        for seed in (51, 52):
            made = session.post("/v1/adapters", **form(make_adapter(base_dir, folder / f"{seed}", seed=seed), "voice"))
            assert made.status_code == 201, made.text
        asked = {"revision": 1, "share": 1, "keep_outputs": keep_outputs}
        assert session.post("/v1/adapters/voice/shadow", json=asked).status_code == 201
        server.openai(key).chat.completions.create(model="voice", **CONTENT)
        deadline = time.monotonic() + 60
        while not (found := session.get("/v1/adapters/voice/shadow").json())["requests"]["compared"]:
            assert time.monotonic() < deadline, found
            time.sleep(0.05)


def stored_files(folder: Path) -> list[Path]:
    return list((folder / "var/blobs/files").glob("*"))


def test_shadows_of_a_tenant_with_zero_retention_leave_no_text(base_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "place").mkdir()
    place = Place(tmp_path / "place", base_dir, in_process=True).prepare()
    place.loramux("migrate")
    keys = {name: place.key_of(name) for name in ("acme", "secret")}
    assert place.loramux("tenant", "zero-retention", "secret")["zero_retention"] is True
    with served(place) as server:
        shadow(server, keys["secret"], base_dir, tmp_path / "secret", keep_outputs=False)
        assert (places_of(place.folder, PROMPT), stored_files(place.folder)) == ([], [])
        shadow(server, keys["acme"], base_dir, tmp_path / "acme", keep_outputs=True)
        deadline = time.monotonic() + 60
        while not stored_files(place.folder):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        (kept,) = stored_files(place.folder)
        assert b"candidate_choices" in kept.read_bytes()
    assert not places_of(place.folder, PROMPT)


def test_prompts_and_answers_are_nowhere_on_the_disk(base_dir: Path, tmp_path: Path) -> None:
    place = Place(tmp_path, base_dir, in_process=True).prepare()
    place.loramux("migrate")
    keys = {name: place.key_of(name) for name in ("acme", "secret")}
    assert place.loramux("tenant", "zero-retention", "secret")["zero_retention"] is True
    with served(place) as server:
        ask_in_every_way(server.openai(keys["acme"]), is_kept=True)
        ask_in_every_way(server.openai(keys["secret"]), is_kept=False)
        assert not places_of(tmp_path, PROMPT)
        assert not places_of(tmp_path, "end-user-False")
        assert places_of(tmp_path, "end-user-True"), "the bill names a tenant's users unless nothing of it is stored"
        client = server.openai(keys["acme"])
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4}
        line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": body}
        file = client.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
        assert places_of(tmp_path, PROMPT) == [f"var/blobs/files/{file.id}"]
        asked = {"endpoint": "/v1/completions", "completion_window": "24h"}
        batch = client.batches.create(input_file_id=file.id, **asked)
        deadline = time.monotonic() + 120
        while (batch := client.batches.retrieve(batch.id)).status != "completed":
            assert time.monotonic() < deadline, batch
            time.sleep(0.05)
        assert places_of(tmp_path, PROMPT) == [f"var/blobs/files/{file.id}"]
        assert batch.output_file_id
        for id in (file.id, batch.output_file_id):
            client.files.delete(id)
        assert not places_of(tmp_path, PROMPT)
    assert not places_of(tmp_path, PROMPT)
    assert places_of(tmp_path, file.id), "the search finds nothing at all"
