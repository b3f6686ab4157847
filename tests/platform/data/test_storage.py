"""Contents, in a folder and in a real S3 bucket: named by their digest, whole or absent, without leftovers of any
process."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from obstore.exceptions import GenericError, PermissionDeniedError
from s3_server import S3

from loramux.data.storage.blobs import (
    CONFIG_FILE,
    FILES,
    WEIGHTS_FILE,
    BlobCorrupt,
    BlobMissing,
    BlobStore,
    content_digest,
    open_blobs,
)
from loramux.data.storage.errors import (
    StorageAbsent,
    StorageDenied,
    StorageFaults,
    StorageFull,
    StorageSlow,
    StorageUnavailable,
)
from loramux.data.storage.objects import Staging

Open = Callable[[str], BlobStore]


@pytest.fixture(params=["folder", "s3"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, str]]:
    """A store of the test's own, and its options."""
    if request.param == "folder":
        return str(tmp_path / "blobs"), {}
    s3: S3 = request.getfixturevalue("s3")
    return f"{s3.url}/some/prefix/{tmp_path.name}", s3.options


@pytest.fixture
def opened(where: tuple[str, dict[str, str]], tmp_path: Path) -> Iterator[Open]:
    """Open the store as a process of the machine with that cache does."""
    made: list[BlobStore] = []

    def open_as(cache: str = "cache") -> BlobStore:
        made.append(open_blobs(where[0], str(tmp_path / cache), where[1]))
        return made[-1]

    yield open_as
    for store in made:
        with suppress(OSError):  # closed by the test
            store.close()


@pytest.fixture
def store(opened: Open) -> BlobStore:
    return opened("cache")


def files(folder: Path, config: bytes = b"{}", weights: bytes = b"weights") -> tuple[Path, Path]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_bytes(config)
    (folder / WEIGHTS_FILE).write_bytes(weights)
    return folder / CONFIG_FILE, folder / WEIGHTS_FILE


def put(store: BlobStore, source: Path, weights: bytes = b"weights", *, adopt: bool = True) -> str:
    with store.staging() as folder:
        for file in files(source, weights=weights):
            shutil.copyfile(file, folder / file.name)
        digest = store.seal(folder)
        store.publish(folder, digest)
        if adopt:
            store.adopt(folder, digest)
    return digest


def place(digest: str) -> str:
    return f"sha256/{digest[7:9]}/{digest[9:]}"


def overwrite(file: Path, data: bytes) -> None:
    file.chmod(0o644)
    file.write_bytes(data)


def left_in(machine: Path) -> list[Path]:
    return list(machine.glob("*/incoming/*/*"))


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


@pytest.mark.parametrize("adopt", [True, False])
def test_put_then_read(store: BlobStore, tmp_path: Path, adopt: bool) -> None:
    digest = put(store, tmp_path / "source", adopt=adopt)
    for name, content in ((CONFIG_FILE, b"{}"), (WEIGHTS_FILE, b"weights")):
        assert (store.directory(digest) / name).read_bytes() == content
        assert b"".join(store.objects.read(f"{place(digest)}/{name}")) == content
    assert store.digests() == [digest]
    assert store.is_stored(digest)
    assert left_in(tmp_path) == []
    assert (tmp_path / "source" / WEIGHTS_FILE).exists(), "a file from elsewhere is copied"


def test_a_large_file_goes_and_comes_in_parts(store: BlobStore, opened: Open, tmp_path: Path) -> None:
    weights = bytes(range(256)) * (80 << 10)
    assert len(weights) > 2 * (8 << 20)
    digest = put(store, tmp_path / "source", weights)
    assert (opened("elsewhere").directory(digest) / WEIGHTS_FILE).read_bytes() == weights


def test_the_same_content_is_stored_once(store: BlobStore, tmp_path: Path) -> None:
    assert put(store, tmp_path / "one") == put(store, tmp_path / "two")
    assert len(store.digests()) == len(store.cached()) == 1
    assert left_in(tmp_path) == []


def test_what_is_absent_is_missing(store: BlobStore) -> None:
    with pytest.raises(BlobMissing, match="not stored"):
        store.directory("sha256:" + "0" * 64)


def test_a_digest_is_no_path(store: BlobStore) -> None:
    with pytest.raises(AssertionError):
        store.directory("sha256:../../../../etc" + "0" * 46)


def test_what_is_damaged_in_the_store_is_not_served_and_the_same_upload_repairs_it(
    store: BlobStore, opened: Open, tmp_path: Path
) -> None:
    digest = put(store, tmp_path / "source")
    store.objects.put(f"{place(digest)}/{WEIGHTS_FILE}", b"damaged")
    elsewhere = opened("elsewhere")
    with pytest.raises(BlobCorrupt, match="upload the adapter again"):
        elsewhere.directory(digest)
    assert elsewhere.cached() == []
    assert put(elsewhere, tmp_path / "source") == digest
    assert (opened("third").directory(digest) / WEIGHTS_FILE).read_bytes() == b"weights"


@pytest.mark.parametrize("verified_before", [False, True])
def test_what_is_damaged_in_the_cache_is_not_served(
    store: BlobStore, opened: Open, tmp_path: Path, verified_before: bool
) -> None:
    digest = put(store, tmp_path / "source")
    reader = store if verified_before else opened("cache")
    overwrite(tmp_path / "cache" / place(digest) / WEIGHTS_FILE, b"damaged")
    assert reader.known_directory(digest) is None
    if "blobs" in {path.name for path in tmp_path.iterdir()}:  # a folder's cache is links: both are damaged
        with pytest.raises(BlobCorrupt):
            reader.directory(digest)
    else:
        assert (reader.directory(digest) / WEIGHTS_FILE).read_bytes() == b"weights"


@pytest.mark.parametrize("lost", FILES)
def test_half_a_content_is_no_content_and_the_same_upload_repairs_it(
    store: BlobStore, opened: Open, tmp_path: Path, lost: str
) -> None:
    digest = put(store, tmp_path / "source", adopt=False)
    store.objects.delete([f"{place(digest)}/{lost}"])
    assert not store.is_stored(digest)
    assert store.digests() == [digest], "a sweep must see it"
    with pytest.raises(BlobMissing):
        store.directory(digest)
    put(store, tmp_path / "source")
    assert store.is_stored(digest)
    assert opened("elsewhere").directory(digest)


def test_files_are_read_once_by_each_process_to_verify_them(store: BlobStore, opened: Open, tmp_path: Path) -> None:
    digest = put(store, tmp_path / "source")
    assert store.known_directory(digest) is not None, "it has just read them to name them"
    other = opened("cache")
    assert other.known_directory(digest) is None
    assert other.directory(digest) == other.known_directory(digest) == store.known_directory(digest)


def test_removing(store: BlobStore, tmp_path: Path) -> None:
    digest, other = put(store, tmp_path / "a"), put(store, tmp_path / "b", weights=b"other")
    store.remove(digest)
    store.remove(digest)
    assert store.digests() == [other]
    assert store.known_directory(digest) is None
    assert [cached.digest for cached in store.cached()] == [other]
    assert left_in(tmp_path) == []


def test_what_is_evicted_is_fetched_again(store: BlobStore, tmp_path: Path) -> None:
    digest = put(store, tmp_path / "source")
    store.evict(digest)
    assert store.cached() == []
    assert store.known_directory(digest) is None
    assert (store.directory(digest) / WEIGHTS_FILE).read_bytes() == b"weights"


def test_the_cache_knows_what_was_used_last(store: BlobStore, tmp_path: Path) -> None:
    first, second = put(store, tmp_path / "a"), put(store, tmp_path / "b", weights=b"other")
    hour_ago = time.time() - 3600
    for digest in (first, second):
        os.utime(tmp_path / "cache" / place(digest), (hour_ago, hour_ago))
    store.known_directory(first)
    assert [(cached.digest, cached.size) for cached in store.cached()] == [(second, 7), (first, 9)]


def test_a_block_that_raises_leaves_nothing_staged(store: BlobStore, tmp_path: Path) -> None:
    def receive() -> None:
        with store.staging() as folder:
            files(folder)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        receive()
    assert left_in(tmp_path) == []


def test_objects_of_other_names_are_not_contents(store: BlobStore) -> None:
    store.objects.put("sha256/ab/not-a-digest/x", b"x")
    store.objects.put("uploads/x", b"x")
    assert store.digests() == []


def test_objects_that_are_not_a_content(store: BlobStore) -> None:
    objects = store.objects
    for number in range(3):
        objects.put(f"uploads/one/{number}", str(number).encode())
    objects.put("uploads/other", b"x")
    assert b"".join(objects.read("uploads/one/2")) == b"2"
    objects.delete(["uploads/one/0", "uploads/one/absent", "uploads/one/1"])
    assert objects.names("uploads/one") == ["uploads/one/2"]
    objects.delete_under("uploads/one")
    objects.delete_under("uploads/one")
    assert objects.names("uploads") == ["uploads/other"]


def test_a_store_that_does_not_answer_says_so(tmp_path: Path) -> None:
    options = {"endpoint": "http://127.0.0.1:9", "region": "x", "access_key_id": "k", "secret_access_key": "s"}
    with pytest.raises(StorageUnavailable):
        open_blobs("s3://bucket", str(tmp_path / "c"), options | {"no_such_option": "x"})


@pytest.mark.parametrize("where", ["ftp://bucket", "s4://bucket/x"])
def test_address_of_no_store_names_the_addresses_that_are_known(where: str, tmp_path: Path) -> None:
    with pytest.raises(StorageUnavailable) as refused:
        open_blobs(where, str(tmp_path / "c"), {})
    assert str(refused.value) == (
        f"{where} is not an address of a store; write a folder, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or "
        "az://CONTAINER/PREFIX"
    )


def test_the_living_keep_their_area(store: BlobStore, opened: Open, tmp_path: Path) -> None:
    other = opened("cache")
    with other.staging() as folder:
        files(folder)
        assert store.sweep_incoming() == 0
        assert (folder / WEIGHTS_FILE).exists()
    other.close()
    assert store.sweep_incoming() == 0
    assert len(list((tmp_path / "cache" / "incoming").iterdir())) == 1


KILLED = """
import os, signal, sys
from loramux.data.storage.blobs import open_blobs, WEIGHTS_FILE
store = open_blobs(sys.argv[1], sys.argv[2], {})
os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
with store.staging() as folder:
    (folder / WEIGHTS_FILE).write_bytes(b"half")
    store.objects.put("x", b"half")
"""


def test_the_killed_are_swept(tmp_path: Path) -> None:
    """In a folder, where they leave an area in the cache and one in the store."""
    where, cache = str(tmp_path / "blobs"), str(tmp_path / "cache")
    killed = subprocess.run([sys.executable, "-c", KILLED, where, cache], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(left_in(tmp_path)) == 2
    store = open_blobs(where, cache, {})
    assert "x" not in store.objects.names("")
    assert store.sweep_incoming() == 2
    assert store.sweep_incoming() == 0
    assert left_in(tmp_path) == []
    store.close()


def test_contents_outlive_their_store(opened: Open, tmp_path: Path) -> None:
    first = opened("cache")
    digest = put(first, tmp_path / "source")
    first.close()
    assert opened("cache").directory(digest)


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, StorageFull),
        (errno.EDQUOT, StorageFull),
        (errno.EACCES, StorageDenied),
        (errno.EROFS, StorageDenied),
        (errno.ESTALE, StorageAbsent),
        (errno.ETIMEDOUT, StorageSlow),
        (errno.EIO, StorageUnavailable),
        (errno.EMFILE, StorageUnavailable),
    ],
    ids=lambda value: errno.errorcode[value] if isinstance(value, int) else value.__name__,
)
def test_fault_of_a_disk_has_its_cause_is_logged_with_errno_and_counted(
    tmp_path: Path, number: int, kind: type[StorageUnavailable], caplog: pytest.LogCaptureFixture
) -> None:
    faults = StorageFaults()
    staging = Staging(tmp_path / "staging", faults)
    with pytest.raises(StorageUnavailable, match=os.strerror(number)) as raised, staging.folder() as folder:
        raise OSError(number, os.strerror(number))
    assert type(raised.value) is kind
    assert not folder.exists()
    assert faults.counts == {kind.cause: 1}
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"cause {kind.cause}, errno {errno.errorcode[number]}" in line
    assert os.strerror(number) not in (raised.value.public_message or "")
    with pytest.raises(FileNotFoundError), staging.folder():
        raise FileNotFoundError(errno.ENOENT, "no such content")
    staging.close()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (PermissionDeniedError("403"), StorageDenied),
        (GenericError("Generic S3 error: <Code>AccessDenied</Code>"), StorageDenied),
        (GenericError("Generic S3 error: <Code>XMinioStorageFull</Code>"), StorageFull),
        (GenericError("Generic S3 error: Server returned 507 Insufficient Storage"), StorageFull),
        (GenericError("error writing: No space left on device (os error 28)"), StorageFull),
        (GenericError("Generic S3 error: <Code>NoSuchBucket</Code>"), StorageAbsent),
        (GenericError("HTTP error: operation timed out"), StorageSlow),
        (GenericError("HTTP error: <Code>SlowDown</Code>"), StorageSlow),
        (GenericError("HTTP error: connection refused"), StorageUnavailable),
    ],
    ids=str,
)
def test_fault_of_an_object_store_has_its_cause(error: Exception, kind: type[StorageUnavailable]) -> None:
    faults = StorageFaults()
    with pytest.raises(StorageUnavailable) as raised, faults.of_store():
        raise error
    assert type(raised.value) is kind
    assert faults.counts == {kind.cause: 1}


def test_bucket_that_does_not_exist_is_absent_and_no_missing_content(s3: S3, tmp_path: Path) -> None:
    store = open_blobs("s3://nowhere-at-all", str(tmp_path / "cache"), s3.options)
    with pytest.raises(StorageAbsent):
        store.objects.put("x", b"data")
    assert store.faults.counts == {"absent": 1}


def test_wrong_credentials_are_denied(s3: S3, tmp_path: Path) -> None:
    store = open_blobs(s3.url, str(tmp_path / "cache"), s3.options | {"secret_access_key": "wrong"})
    with pytest.raises(StorageDenied):
        store.objects.put("x", b"data")


def test_disk_that_has_gone_is_absent_and_nothing_is_written_below_it(tmp_path: Path) -> None:
    store = open_blobs(str(tmp_path / "blobs"), str(tmp_path / "cache"), {})
    (tmp_path / "blobs").rename(tmp_path / "unmounted")
    (tmp_path / "blobs").mkdir()
    with pytest.raises(StorageAbsent):
        store.objects.put("x", b"data")
    assert list((tmp_path / "blobs").iterdir()) == []
