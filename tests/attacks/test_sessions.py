"""The same attacks in pieces, and those that only pieces allow: other bytes than were announced, or half-way."""

from __future__ import annotations

import random
from collections.abc import Iterator

import httpx
import pytest
from attacked_server import Harness, announced, ended, in_pieces, opened, put
from attacks import ATTACKS, Attack
from peft_uploads import WEIGHTS

IN_PIECES = {"a renamed torch.save", "a key twice", "a truncated file", "NaN", "rank 10^6", "the width of another base"}


@pytest.fixture
def client(harness: Harness) -> Iterator[httpx.Client]:
    with harness.nothing_added(), harness.server.http(harness.key) as client:
        yield client
        for upload in client.get("/v1/uploads", params={"limit": 100}).json()["data"]:
            assert client.delete(f"/v1/uploads/{upload['id']}").status_code == 200
    assert harness.rows("uploads", "upload_files", "upload_pieces") == [0, 0, 0]


@pytest.mark.parametrize(
    "attack", [attack for attack in ATTACKS if attack.name in IN_PIECES], ids=lambda attack: attack.name
)
def test_an_attack_in_pieces_is_rejected_with_a_report(harness: Harness, client: httpx.Client, attack: Attack) -> None:
    upload = ended(client, in_pieces(client, attack.change(harness.sound)))
    assert (upload["state"], upload["revision"], upload["digest"]) == ("rejected", None, None)
    assert upload["error"]["code"] == attack.code
    report = upload["report"]
    assert report["refusal"]["code"] == attack.code
    assert [check["outcome"] for check in report["checks"]][-1] == "failed"
    assert report["usage"]["peak_bytes"] < 200 << 20


def test_one_that_was_resumed_with_other_bytes_is_rejected(harness: Harness, client: httpx.Client) -> None:
    sound, other = harness.sound, random.Random(0).randbytes(len(harness.sound[WEIGHTS]))
    id = opened(client, announced(sound)).json()["id"]
    half = len(other) // 2
    for name, data in sound.items():
        put(client, id, name, data if name != WEIGHTS else data[:half])
    assert put(client, id, WEIGHTS, other[half:], half).status_code == 200
    upload = ended(client, id)
    assert (upload["state"], upload["error"]["code"], upload["error"]["param"]) == (
        "rejected",
        "hash_mismatch",
        WEIGHTS,
    )


def test_one_whose_hash_was_another_is_rejected(harness: Harness, client: httpx.Client) -> None:
    files = announced(harness.sound)
    files[WEIGHTS]["sha256"] = "0" * 64
    id = opened(client, files).json()["id"]
    for name, data in harness.sound.items():
        put(client, id, name, data)
    assert ended(client, id)["error"]["code"] == "hash_mismatch"


def test_bytes_sent_again_or_beyond_what_was_announced_are_not_taken(harness: Harness, client: httpx.Client) -> None:
    id = opened(client, announced(harness.sound)).json()["id"]
    weights = harness.sound[WEIGHTS]
    assert put(client, id, WEIGHTS, weights[:100]).status_code == 200
    again = put(client, id, WEIGHTS, weights[50:150], 50)
    assert (again.status_code, again.json()["error"]["code"], again.headers["upload-offset"]) == (
        409,
        "wrong_offset",
        "100",
    )
    beyond = put(client, id, WEIGHTS, weights[100:] + b"x", 100)
    assert (beyond.status_code, beyond.json()["error"]["code"]) == (400, "invalid_upload")


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "adapter_model.bin", "adapter_config.json\0", ""])
def test_files_of_other_names_are_not_announced(harness: Harness, client: httpx.Client, name: str) -> None:
    before = client.get("/v1/uploads").json()["data"]
    answer = opened(client, announced(harness.sound) | {name: {"size": 1, "sha256": "0" * 64}})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_upload")
    assert client.get("/v1/uploads").json()["data"] == before


def test_a_file_of_another_name_is_not_sent(harness: Harness, client: httpx.Client) -> None:
    id = opened(client, announced(harness.sound)).json()["id"]
    for name in ("adapter_model.bin", "..%2F..%2Fx", "..%2Fadapter_config.json"):
        assert put(client, id, name, b"x").status_code in (400, 404)


def test_sizes_that_no_adapter_has_are_not_announced(harness: Harness, client: httpx.Client) -> None:
    for size in (1 << 62, 0, -1):
        files = announced(harness.sound)
        files[WEIGHTS]["size"] = size
        assert opened(client, files).status_code == 400
