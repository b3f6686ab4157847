"""Contents on disk: named by what they are, whole or absent, and nobody's leftovers stay."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from loramux.storage import CONFIG_FILE, WEIGHTS_FILE, BlobCorrupt, BlobMissing, BlobStore, content_digest


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BlobStore]:
    store = BlobStore(tmp_path / "blobs")
    yield store
    store.close()


def files(folder: Path, config: bytes = b"{}", weights: bytes = b"weights") -> tuple[Path, Path]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_bytes(config)
    (folder / WEIGHTS_FILE).write_bytes(weights)
    return folder / CONFIG_FILE, folder / WEIGHTS_FILE


def put(store: BlobStore, source: Path, weights: bytes = b"weights") -> str:
    with store.staging() as folder:
        store.stage(folder, *files(source, weights=weights))
        digest = store.seal(folder)
        store.publish(folder, digest)
    return digest


def left_in(store: BlobStore, tmp_path: Path) -> list[Path]:
    return [path for area in (tmp_path / "blobs" / "incoming").iterdir() for path in area.iterdir()]


def test_a_shell_computes_the_same_digest(store: BlobStore, tmp_path: Path) -> None:
    digest = put(store, tmp_path / "source")
    shell = f"sha256sum {CONFIG_FILE} {WEIGHTS_FILE} | sha256sum"
    output = subprocess.run(shell, shell=True, cwd=tmp_path / "source", capture_output=True, text=True, check=True)
    assert digest == "sha256:" + output.stdout.split()[0]


@pytest.mark.parametrize("other", [(b"{ }", b"weights"), (b"{}", b"weightz"), (b"{}w", b"eights")])
def test_other_files_have_another_digest(tmp_path: Path, other: tuple[bytes, bytes]) -> None:
    files(tmp_path / "a")
    files(tmp_path / "b", *other)
    assert content_digest(tmp_path / "a") != content_digest(tmp_path / "b")


def test_put_then_read(store: BlobStore, tmp_path: Path) -> None:
    digest = put(store, tmp_path / "source")
    folder = store.directory(digest)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        CONFIG_FILE: b"{}",
        WEIGHTS_FILE: b"weights",
    }
    assert store.digests() == [digest]
    assert left_in(store, tmp_path) == []
    assert (tmp_path / "source" / WEIGHTS_FILE).exists(), "a file from elsewhere is copied"


def test_a_staged_file_is_moved(store: BlobStore) -> None:
    with store.staging() as received, store.staging() as folder:
        config, weights = files(received)
        inode = weights.stat().st_ino
        store.stage(folder, config, weights)
        assert (folder / WEIGHTS_FILE).stat().st_ino == inode
        assert not weights.exists()


def test_the_same_content_is_stored_once(store: BlobStore, tmp_path: Path) -> None:
    assert put(store, tmp_path / "one") == put(store, tmp_path / "two")
    assert len(store.digests()) == 1
    assert left_in(store, tmp_path) == []


def test_what_is_absent_is_missing(store: BlobStore) -> None:
    with pytest.raises(BlobMissing, match="not stored"):
        store.directory("sha256:" + "0" * 64)


def test_a_digest_is_no_path(store: BlobStore) -> None:
    with pytest.raises(AssertionError):
        store.directory("sha256:../../../../etc" + "0" * 46)


@pytest.mark.parametrize("verified_before", [False, True])
def test_a_damaged_file_is_not_served_and_the_same_upload_repairs_it(
    store: BlobStore, tmp_path: Path, verified_before: bool
) -> None:
    digest = put(store, tmp_path / "source")
    if verified_before:
        store.directory(digest)
        assert store.known_directory(digest) is not None
    weights = tmp_path / "blobs" / "sha256" / digest[7:9] / digest[9:] / WEIGHTS_FILE
    weights.chmod(0o644)
    weights.write_bytes(b"damaged")
    assert store.known_directory(digest) is None
    with pytest.raises(BlobCorrupt, match="upload the adapter again"):
        store.directory(digest)
    assert put(store, tmp_path / "source") == digest
    assert (store.directory(digest) / WEIGHTS_FILE).read_bytes() == b"weights"


def test_a_lost_file_is_missing_and_the_same_upload_repairs_it(store: BlobStore, tmp_path: Path) -> None:
    digest = put(store, tmp_path / "source")
    (store.directory(digest) / CONFIG_FILE).unlink()
    with pytest.raises(BlobMissing):
        store.directory(digest)
    put(store, tmp_path / "source")
    assert store.directory(digest)


def test_files_are_read_once_by_each_process_to_verify_them(store: BlobStore, tmp_path: Path) -> None:
    digest = put(store, tmp_path / "source")
    assert store.known_directory(digest) is not None, "it has just read them to name them"
    other = BlobStore(tmp_path / "blobs")
    assert other.known_directory(digest) is None
    assert other.directory(digest) == other.known_directory(digest) == store.known_directory(digest)
    other.close()


def test_removing(store: BlobStore, tmp_path: Path) -> None:
    digest, other = put(store, tmp_path / "a"), put(store, tmp_path / "b", weights=b"other")
    store.directory(digest)
    store.remove(digest)
    store.remove(digest)
    assert store.digests() == [other]
    assert store.known_directory(digest) is None
    assert left_in(store, tmp_path) == []


def test_a_block_that_raises_leaves_nothing_staged(store: BlobStore, tmp_path: Path) -> None:
    def receive() -> None:
        with store.staging() as folder:
            files(folder)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        receive()
    assert left_in(store, tmp_path) == []


def test_folders_of_other_names_are_not_contents(store: BlobStore, tmp_path: Path) -> None:
    (tmp_path / "blobs" / "sha256" / "ab" / "not-a-digest").mkdir(parents=True)
    assert store.digests() == []


def test_the_living_keep_their_area(store: BlobStore, tmp_path: Path) -> None:
    other = BlobStore(tmp_path / "blobs")
    with other.staging() as folder:
        files(folder)
        assert store.sweep_incoming() == 0
        assert (folder / WEIGHTS_FILE).exists()
    other.close()
    assert store.sweep_incoming() == 0
    assert len(list((tmp_path / "blobs" / "incoming").iterdir())) == 1


KILLED = """
import os, signal, sys
from pathlib import Path
from loramux.storage import BlobStore, WEIGHTS_FILE
with BlobStore(Path(sys.argv[1])).staging() as folder:
    (folder / WEIGHTS_FILE).write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_killed_are_swept(store: BlobStore, tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, tmp_path / "blobs"], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(list((tmp_path / "blobs" / "incoming").iterdir())) == 2
    assert store.sweep_incoming() == 1
    assert store.sweep_incoming() == 0
    assert len(list((tmp_path / "blobs" / "incoming").iterdir())) == 1


def test_contents_outlive_their_store(tmp_path: Path) -> None:
    first = BlobStore(tmp_path / "blobs")
    digest = put(first, tmp_path / "source")
    first.close()
    second = BlobStore(tmp_path / "blobs")
    assert second.directory(digest)
    second.close()
