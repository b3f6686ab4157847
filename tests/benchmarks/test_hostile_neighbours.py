"""Hostile requests of every kind on the real server: each is refused or waits, and another tenant is served."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import hostile_images
import hostile_neighbours
import hostile_requests
import pytest
from PIL import Image

from loramux.common.settings.serving import ImageSettings

HELD = {"unread download", "lines that wait", "encoded judge", "silent webhook", "silent connection"}


def test_wide_body_has_its_size_and_its_field() -> None:
    wide = hostile_requests.WideBody("x", "/", 1000, "a.b", value='"z"', is_map=True, around={"c": 1})
    body = wide.encode()
    assert 900 < len(body) < 1100
    assert body.startswith(b'{"c": 1, "a":{"b":{"0000000":"z",')
    assert body.endswith(b"}}}")


def files_of(requests: hostile_images.ImageRequests) -> list[bytes]:
    content = json.loads(next(requests.bodies()))["messages"][0]["content"]
    return [base64.b64decode(part["image_url"]["url"].partition(",")[2]) for part in content]


def test_hostile_images_reach_the_limits_of_the_settings_and_pass_them() -> None:
    bounds = ImageSettings()
    files = {requests.name: files_of(requests) for requests in hostile_images.KINDS}
    sizes = {name: Image.open(io.BytesIO(found[0])).size for name, found in files.items()}
    pixels = {name: width * height for name, (width, height) in sizes.items()}
    assert pixels["largest"] == bounds.max_pixels < pixels["too many pixels"]
    assert 0.97 * bounds.max_bytes < len(files["large files"][0]) < bounds.max_bytes
    assert sum(map(len, files["large files"])) < bounds.max_request_bytes
    assert len(files["many"]) == bounds.max_per_request == len(files["too many"]) - 1
    for name in ("largest", "many", "large files"):
        assert len(set(files[name])) == len(files[name]), "every image is computed"
        Image.open(io.BytesIO(files[name][0])).load()
    with pytest.raises(OSError, match="truncated"):
        Image.open(io.BytesIO(files["cut off"][0])).load()


def test_images_are_not_measured_together_with_requests_for_a_base_of_text() -> None:
    with pytest.raises(ValueError, match="a base of their own"):
        hostile_neighbours.Plan(rounds=1, seconds=1.0, hostile=("pools", "images/largest"))


@pytest.mark.slow
def test_hostile_images_are_answered_or_refused(tmp_path: Path) -> None:
    found = hostile_neighbours.run(tmp_path, hostile_neighbours.Plan(rounds=1, seconds=6.0, hostile=("images",)))
    assert set(found["p99_over_baseline"]) == {"images"}
    ended = {name.removeprefix("images "): set(outcomes) for name, outcomes in found["ended"].items()}
    assert {requests.name for requests in hostile_images.KINDS} < set(ended)
    assert ended["too many"] <= {"too_many_images", "too_many_bodies", "unfinished"}
    assert ended["too many pixels"] | ended["cut off"] <= {"invalid_image", "too_many_bodies", "unfinished"}
    assert "200" in ended["pictures ordinary"]
    assert not [one for outcomes in ended.values() for one in outcomes if one.startswith("5")]


@pytest.mark.slow
def test_hostile_requests_of_every_kind_are_refused_or_wait(tmp_path: Path) -> None:
    found = hostile_neighbours.run(tmp_path, hostile_neighbours.Plan(rounds=1, seconds=4.0))
    assert set(found["p99_over_baseline"]) == {"formats", "bodies", "pools"}
    ended = found["ended"]
    refused = {outcome.rpartition(": ")[::2] for outcome in ended["bodies"] if outcome != "unfinished"}
    assert {name for name, _ in refused} <= {body.name for body in hostile_requests.WIDE_BODIES}
    assert refused
    assert not [one for one in refused if one[1].startswith(("2", "5"))]
    slow = {f"slow body of {path}" for path in hostile_requests.SLOW_BODIES}
    assert {name.removeprefix("pools ") for name in ended if name.startswith("pools")} == HELD | slow
    assert not [name for name, outcomes in ended.items() if any(one.startswith("5") for one in outcomes)]
