"""/v1/uploads, as flows: files in pieces that go on where they were cut off, and the wait for what the server says."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from loramux.client.answers import Gone, Listing
from loramux.client.errors import Conflict, ConnectionFailed, FilesMissing, UploadRejected, UploadUnfinished
from loramux.client.flow import Call, Do, Flow, Wait
from loramux.client.running import R, Resource, method
from loramux.client.sources import Bucket, Hub
from loramux.client.upload_answers import Received, Upload, UploadFile

FILES = ("adapter_config.json", "adapter_model.safetensors")
PIECE = 8 << 20
"""Bytes in memory, and lost when a connection breaks."""
CUTS = 8
"""How often in a row a file may be cut off without a byte of progress."""
POLL, LONGEST_POLL = 0.2, 3.0
"""Seconds between questions whether the server has finished checking."""
DEADLINE = 900.0


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an upload has come: bytes of one file that were read or sent, or the wait (0 of 0) for the checks."""

    stage: Literal["hashing", "sending", "validating"]
    file: str
    done: int
    total: int


OnProgress = Callable[[Progress], None]


def ignore(_: Progress) -> None:
    """For who does not want to know."""


def push(
    folder: str | Path,
    name: str | None = None,
    *,
    promote: bool = True,
    on_progress: OnProgress = ignore,
    deadline: float = DEADLINE,
) -> Flow[Upload]:
    """Upload the PEFT adapter in `folder` and wait until it is served, under the folder's name or another one.

    An upload of the same files that was cut off is gone on with. `promote`: let the alias `default` point at it.
    Raises FilesMissing, UploadRejected, UploadUnfinished after `deadline` seconds of checks.
    """
    root = Path(folder)
    sizes = yield from described(root, on_progress)
    adapter = name or root.resolve().name
    upload = yield from _unfinished(adapter, sizes, promote)
    if upload is None:
        upload = yield from create(adapter, sizes, promote=promote)
    return (yield from finish(upload, root, on_progress=on_progress, deadline=deadline))


def resume(
    upload_id: str, folder: str | Path, *, on_progress: OnProgress = ignore, deadline: float = DEADLINE
) -> Flow[Upload]:
    """Go on with an upload that was cut off, and wait until it is served. Raises as `push`."""
    upload = yield from get(upload_id)
    return (yield from finish(upload, Path(folder), on_progress=on_progress, deadline=deadline))


def finish(
    upload: Upload, folder: Path, *, on_progress: OnProgress = ignore, deadline: float = DEADLINE
) -> Flow[Upload]:
    """Send what is missing of an upload, have it checked, and wait. Raises as `push`."""
    if upload.state == "uploading":
        for file in upload.files:
            yield from _send(upload.id, file, folder / file.name, on_progress)
        upload = yield from complete(upload.id)
    return (yield from settled(upload, on_progress=on_progress, deadline=deadline))


def described(folder: Path, on_progress: OnProgress = ignore) -> Flow[dict[str, UploadFile]]:
    """The folder's files with their sizes and hashes. Raises FilesMissing."""
    missing = [file for file in FILES if not (folder / file).is_file()]
    if missing:
        raise FilesMissing(f"{folder} has no {' and no '.join(missing)}; save it with model.save_pretrained()")
    described = {}
    for file in FILES:
        described[file] = yield from _hashed(folder / file, on_progress)
    return described


def create(adapter: str, files: dict[str, UploadFile], *, promote: bool = True) -> Call[Upload]:
    """Begin an upload."""
    body = {
        "adapter": adapter,
        "files": {file.name: {"size": file.size, "sha256": file.sha256} for file in files.values()},
        "promote": promote,
    }
    return Call(method="POST", path="/v1/uploads", answer=Upload, body=body)


def fetch(
    adapter: str,
    source: Bucket | Hub,
    *,
    promote: bool = True,
    on_progress: OnProgress = ignore,
    deadline: float = DEADLINE,
) -> Flow[Upload]:
    """Have the server fetch an adapter from where its operator allows, and wait. Raises as `push`."""
    body = {"adapter": adapter, "source": source, "promote": promote}
    upload = yield from Call(method="POST", path="/v1/uploads", answer=Upload, body=body)
    return (yield from settled(upload, on_progress=on_progress, deadline=deadline))


def all_uploads(*, limit: int = 100, before: str | None = None) -> Flow[list[Upload]]:
    """Your uploads, those that have ended too for a while, newest first; `before`: the last page's last id."""
    params = {"limit": limit, "before": before}
    call = Call(method="GET", path="/v1/uploads", answer=Listing[Upload], params=params, repeatable=True)
    return (yield from call).data


def get(upload_id: str) -> Call[Upload]:
    """One upload."""
    return Call(method="GET", path=_path(upload_id), answer=Upload, repeatable=True)


def put_piece(upload_id: str, file: str, offset: int, piece: bytes) -> Call[Received]:
    """Send bytes of a file; they begin at `offset`, which is what the server has received of it."""
    path = f"{_path(upload_id)}/files/{quote(file, safe='')}"
    headers = {"Content-Type": "application/octet-stream"}
    return Call(method="PUT", path=path, answer=Received, params={"offset": offset}, content=piece, headers=headers)


def complete(upload_id: str) -> Call[Upload]:
    """Have the server check what it has received."""
    return Call(method="POST", path=f"{_path(upload_id)}/complete", answer=Upload, repeatable=True)


def cancel(upload_id: str) -> Call[Gone]:
    """Forget an upload and what was received of it."""
    return Call(method="DELETE", path=_path(upload_id), answer=Gone, repeatable=True)


def settled(upload: Upload, *, on_progress: OnProgress = ignore, deadline: float = DEADLINE) -> Flow[Upload]:
    """Wait for the end of the checks. Raises UploadRejected, UploadUnfinished after `deadline` seconds."""
    waited, pause = 0.0, POLL
    while upload.state == "validating":
        if waited >= deadline:
            raise UploadUnfinished(f"the server is still checking {upload.id} after {deadline:g} s", upload)
        on_progress(Progress("validating", "", 0, 0))
        yield Wait(pause)
        waited, pause = waited + pause, min(pause * 1.5, LONGEST_POLL)
        upload = yield from get(upload.id)
    if upload.state == "ready":
        return upload
    if upload.state == "rejected":
        raise UploadRejected(upload)
    raise UploadUnfinished(f"the upload {upload.id} is {upload.state}; push the folder again", upload)


class Uploads(Resource[R]):
    """`client.uploads`."""

    push = method(push)
    resume = method(resume)
    fetch = method(fetch)
    finish = method(finish)
    create = method(create)
    all = method(all_uploads)
    get = method(get)
    put_piece = method(put_piece)
    complete = method(complete)
    cancel = method(cancel)
    settled = method(settled)


def _send(upload_id: str, file: UploadFile, source: Path, on_progress: OnProgress) -> Flow[None]:
    """What is missing of a file, piece by piece; after a cut, from where the server says that it was."""
    received, cuts = file.received, 0
    on_progress(Progress("sending", file.name, received, file.size))
    while received < file.size:
        piece = yield Do(partial(_read, source, received))
        if not piece:
            raise FilesMissing(f"{source} has {received} bytes and had {file.size} when the upload began")
        try:
            now = (yield from put_piece(upload_id, file.name, received, piece)).received
        except (ConnectionFailed, Conflict) as cut:
            cuts += 1
            if cuts > CUTS:
                raise
            yield Wait(min(0.25 * 2.0**cuts, 15.0) if isinstance(cut, ConnectionFailed) else 0.0)
            now = yield from _received(upload_id, file.name, cut)
        if now > received:
            cuts = 0
        received = now
        on_progress(Progress("sending", file.name, received, file.size))


def _received(upload_id: str, file: str, cut: Exception) -> Flow[int]:
    """How much of a file the server has. Raises `cut` where the upload takes nothing any more."""
    upload = yield from get(upload_id)
    found = next((one for one in upload.files if one.name == file), None)
    if found is None or upload.state != "uploading":
        raise cut
    return found.received


def _unfinished(adapter: str, files: dict[str, UploadFile], promote: bool) -> Flow[Upload | None]:
    """An upload of the same files to the same adapter that was cut off."""
    wanted = {(file.name, file.size, file.sha256) for file in files.values()}
    for upload in (yield from all_uploads()):
        same = {(file.name, file.size, file.sha256) for file in upload.files} == wanted
        named = adapter in (upload.adapter, upload.adapter.partition("/")[2])
        if upload.state == "uploading" and upload.promote == promote and same and named:
            return upload
    return None


def _hashed(file: Path, on_progress: OnProgress) -> Flow[UploadFile]:
    size, done, digest = file.stat().st_size, 0, hashlib.sha256()
    on_progress(Progress("hashing", file.name, 0, size))
    while piece := (yield Do(partial(_read, file, done))):
        yield Do(partial(digest.update, piece))
        done += len(piece)
        on_progress(Progress("hashing", file.name, done, size))
    return UploadFile(name=file.name, size=done, sha256=digest.hexdigest(), received=0)


def _read(file: Path, offset: int) -> bytes:
    with file.open("rb") as opened:
        opened.seek(offset)
        return opened.read(PIECE)


def _path(upload_id: str) -> str:
    return f"/v1/uploads/{quote(upload_id, safe='')}"
