"""Every attack is refused by its own code, leaves no file and no row, and disturbs no other tenant."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from attacked_server import Harness
from attacks import ATTACKS, Attack
from peft_uploads import CONFIG, WEIGHTS

TOKENS = 200
GROWTH = 200 << 20
SOME = ATTACKS[::3]


@pytest.fixture
def untouched(harness: Harness) -> Iterator[None]:
    with harness.nothing_added():
        yield
    assert not Path("/tmp/loramux-was-here").exists()


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_an_attack_is_refused_by_its_code_and_leaves_nothing(harness: Harness, untouched: None, attack: Attack) -> None:
    answer = harness.upload(attack.change(harness.sound))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["code"] == attack.code, error
    assert error["message"].endswith((".", "?"))
    assert len(error["message"]) < 1000


FORMS: dict[str, tuple[list[tuple[str, bytes]], str]] = {
    "a pickle beside the configuration": ([("adapter_model.bin", b"\x80\x04.")], "invalid_form"),
    "a file named like a path": ([("../../../etc/cron.d/x", b"x")], "invalid_form"),
    "a file named like an absolute path": ([("/etc/passwd", b"x")], "invalid_form"),
    "a file of no known meaning": ([("run.sh", b"rm -r /")], "invalid_form"),
    "a file twice": ([(CONFIG, b"{}")], "invalid_form"),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_form_with_what_does_not_belong_is_refused(harness: Harness, untouched: None, name: str) -> None:
    extra, code = FORMS[name]
    parts = [(file, (file, content)) for file, content in [*harness.sound.items(), *extra]]
    answer = harness.send({"data": {"name": "evil"}, "files": parts})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)


def test_code_next_to_an_adapter_is_not_stored(harness: Harness) -> None:
    code = ("modeling_llama.py", b"import os  # nothing may keep this")
    parts = [(file, (file, content)) for file, content in [*harness.sound.items(), code]]
    assert harness.send({"data": {"name": "with-code"}, "files": parts}).status_code == 201
    harness.soon_removed(code[1])


def test_a_configuration_that_is_too_large_is_not_received(harness: Harness, untouched: None) -> None:
    answer = harness.upload(harness.sound | {CONFIG: b" " * ((1 << 20) + 1)})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "too_large")


def test_attacker_that_disconnects_leaves_nothing(harness: Harness, untouched: None) -> None:
    def content() -> Iterator[bytes]:
        head = f'--b\r\nContent-Disposition: form-data; name="{WEIGHTS}"; filename="{WEIGHTS}"\r\n\r\n'
        yield head.encode() + b"x" * 100_000
        raise ConnectionError

    with harness.server.http(harness.key) as http, pytest.raises(ConnectionError):
        http.post("/v1/adapters", content=content(), headers={"content-type": "multipart/form-data; boundary=b"})


def test_other_tenants_are_not_disturbed(harness: Harness, untouched: None) -> None:
    """Streams of an adapter and of the base say what they say when it is quiet, while attacks go on."""
    quiet = {model: stream(harness, model) for model in ("tiny", "acme/sound")}
    assert all(len(tokens) == TOKENS for tokens in quiet.values())
    before = harness.resident_bytes()
    over = threading.Event()

    def watch(model: str) -> list[list[int]]:
        seen = [stream(harness, model)]
        while not over.is_set():
            seen.append(stream(harness, model))
        return seen

    with ThreadPoolExecutor(6) as threads:
        watching = {model: threads.submit(watch, model) for model in quiet}
        codes = list(threads.map(lambda attack: code_of(harness, attack), SOME))
        over.set()
        seen = {model: future.result() for model, future in watching.items()}
    assert codes == [attack.code for attack in SOME]
    for model, answers in seen.items():
        assert all(tokens == quiet[model] for tokens in answers)
    assert harness.resident_bytes() - before < GROWTH


def code_of(harness: Harness, attack: Attack) -> str:
    return str(harness.upload(attack.change(harness.sound)).json()["error"]["code"])


def stream(harness: Harness, model: str) -> list[int]:
    client: openai.OpenAI = harness.server.openai(harness.key)
    extra: dict[str, Any] = {"return_token_ids": True, "ignore_eos": True}
    with client.completions.create(
        model=model, prompt="The harbour", max_tokens=TOKENS, temperature=0, stream=True, extra_body=extra
    ) as chunks:
        return [token for chunk in chunks for choice in chunk.choices for token in choice.token_ids or []]  # type: ignore[attr-defined]
