"""Adapters' files on an engine's machine: found by their content, fetched and verified if they are missing."""

from __future__ import annotations

import queue
from pathlib import Path

import pytest

from loramux.data.storage.blobs import CONFIG_FILE, WEIGHTS_FILE, BlobStore, open_blobs
from loramux.engine.messages import AdapterRef, EngineFault
from loramux.fleet import serving
from loramux.fleet.serving import FetchedAdapters


def stored(blobs: BlobStore, content: str) -> str:
    """Store a content; return its digest."""
    with blobs.staging() as folder:
        (folder / CONFIG_FILE).write_text(content)
        (folder / WEIGHTS_FILE).write_text(content)
        digest = blobs.seal(folder)
        blobs.publish(folder, digest)
    return digest


def fetched(files: FetchedAdapters, ref: AdapterRef) -> AdapterRef | EngineFault:
    came: queue.SimpleQueue[AdapterRef | EngineFault] = queue.SimpleQueue()
    files.fetch(ref, came.put)
    return came.get(timeout=60)


def test_adapter_of_another_machine_is_fetched_once_and_found_then(tmp_path: Path) -> None:
    front = open_blobs(str(tmp_path / "store"), str(tmp_path / "front"), {})
    digest = stored(front, "content")
    ref = AdapterRef("tenant/key", str(front.directory(digest)))
    engine = open_blobs(str(tmp_path / "store"), str(tmp_path / "engine"), {})
    files = FetchedAdapters(engine, 1 << 30)
    assert files.find(ref) == ref, "both see the front's folder"
    front.evict(digest)
    assert files.find(ref) is None
    here = fetched(files, ref)
    assert here == AdapterRef("tenant/key", str(engine.directory(digest)))
    assert files.find(ref) == here


def test_adapter_that_cannot_be_fetched_fails_only_its_request(tmp_path: Path) -> None:
    files = FetchedAdapters(open_blobs(str(tmp_path / "store"), str(tmp_path / "engine"), {}), 1 << 30)
    for path in ("/nowhere", f"/nowhere/sha256/{'0' * 2}/{'0' * 62}"):
        fault = fetched(files, AdapterRef("tenant/key", path))
        assert isinstance(fault, EngineFault)
        assert fault.code == "adapter_failed"


def test_full_cache_gives_up_what_was_not_requested_lately(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "IDLE_SECONDS", 0.0)
    engine = open_blobs(str(tmp_path / "store"), str(tmp_path / "engine"), {})
    digests = [stored(engine, content) for content in ("a" * 600, "b" * 600)]
    files = FetchedAdapters(engine, 1500)
    for digest in digests:
        fetched(files, AdapterRef("tenant/key", f"/far/sha256/{digest[7:9]}/{digest[9:]}"))
    assert [content.digest for content in engine.cached()] == [digests[1]]
