"""Flows of /v1/uploads: resumable uploads in parts, imports, and the wait for the server's checks."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec

from loramux_client.errors import Conflict, ConnectionFailed, FilesMissing, UploadRejected, UploadUnfinished
from loramux_client.flow import Block, Call, Flow, R, Resource, Wait, item_path, method, read, read_list
from loramux_client.objects import Deleted, Listing, ReceivedBytes, Upload, UploadFile

FILES = ("adapter_config.json", "adapter_model.safetensors")
BUNDLE_FILES = (
    "chat_template.jinja",
    "tokenizer.json",
    "tokenizer_config.json",
    "added_tokens.json",
    "generation_config.json",
    "config.json",
    "loramux.toml",
    "1_Pooling/config.json",
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
)
"""Files that are also sent if a folder has them. Other files of a trainer's folder have no effect on serving."""
PART_BYTES = 8 << 20
"""Bytes of one request. These bytes are held in memory, and sent again if the connection breaks."""
MAX_FAILURES = 8
"""Number of consecutive failures, without a byte of progress, after which an upload fails."""
MAX_NAMED = 5
"""Maximum number of folders that an error names."""
POLL_SECONDS, MAX_POLL_SECONDS = 0.2, 3.0
"""Shortest and longest pause between polls of the upload's state, in seconds."""
TIMEOUT_SECONDS = 900.0

_OTHER_FORMS = {
    ("adapter_model*-of-*", "adapter_model.*.index.json"): (
        "its weights are sharded: load it with PEFT, and save it with model.save_pretrained() as one file"
    ),
    ("*adapters.safetensors",): (
        "it is mlx-lm's: convert it to PEFT's form (lora_A.weight and lora_B.weight are its lora_a and lora_b "
        "transposed, and lora_alpha is its scale times its rank)"
    ),
    ("adapter_model.bin",): (
        "its weights are a pickle: load it with PEFT, and save it with model.save_pretrained() as safetensors"
    ),
    ("model*.safetensors", "pytorch_model*.bin"): (
        "it is a whole model: push the adapter's folder of before the merge, or serve the model as a base"
    ),
    ("pytorch_model_fsdp*", "global_step*"): (
        "it is the state of a run over several devices: gather the weights, with trainer.save_model()"
    ),
}
"""Advice by the files of other forms than PEFT's two files; the first pattern that matches counts."""

_HUB = re.compile(
    r"(?P<hub>[a-z0-9][a-z0-9-]*):(?P<repo>[^@:/]+/[^@]+)@(?P<commit>[0-9a-f]{40})(?:/(?P<subfolder>.+))?"
)


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """A folder of an object store: `s3://bucket/path/`."""

    url: str


class Hub(msgspec.Struct, frozen=True, kw_only=True):
    """A repository of a model hub, at one commit."""

    hub: str
    """Name of the hub in the server's settings."""
    repo: str
    """Name of the repository, `owner/name`."""
    commit: str
    """Id of the commit, all 40 hexadecimal digits, because a branch or tag can move."""
    subfolder: str | None = None
    """The adapter's folder in the repository; None: its root."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of an upload: the hashed or sent bytes of one file, or the wait for the checks (0 of 0)."""

    stage: Literal["hashing", "sending", "validating"]
    file: str
    done: int
    total: int


OnProgress = Callable[[Progress], None]


def ignore_progress(_: Progress) -> None:
    """Discard the progress."""


def push(
    folder: str | Path,
    name: str | None = None,
    *,
    promote: bool = True,
    base_model: str | None = None,
    on_progress: OnProgress = ignore_progress,
    timeout: float = TIMEOUT_SECONDS,
) -> Flow[Upload]:
    """Upload the PEFT adapter in `folder` and wait until it is ready. The default name is the folder's.

    An unfinished upload of the same files is resumed. `promote` sets the alias `default` to the new revision.
    `base_model` names the adapter's base on a server with several bases. Without it the files decide, if they name a
    base. Raises FilesMissing, UploadRejected, and UploadUnfinished after `timeout` seconds of checks.
    """
    root = Path(folder)
    sizes = yield from describe(root, on_progress)
    adapter = name or root.resolve().name
    upload = yield from _unfinished(adapter, sizes, promote, base_model)
    if upload is None:
        upload = yield from create(adapter, sizes, promote=promote, base_model=base_model)
    return (yield from finish(upload, root, on_progress=on_progress, timeout=timeout))


def resume(
    upload_id: str, folder: str | Path, *, on_progress: OnProgress = ignore_progress, timeout: float = TIMEOUT_SECONDS
) -> Flow[Upload]:
    """Resume an unfinished upload, and wait until it is ready. Raises the errors of `push`."""
    upload = yield from get(upload_id)
    return (yield from finish(upload, Path(folder), on_progress=on_progress, timeout=timeout))


def finish(
    upload: Upload, folder: Path, *, on_progress: OnProgress = ignore_progress, timeout: float = TIMEOUT_SECONDS
) -> Flow[Upload]:
    """Send the missing bytes of an upload, start the checks, and wait. Raises the errors of `push`."""
    if upload.state == "uploading":
        for file in upload.files:
            yield from _send(upload.id, file, folder / file.name, on_progress)
        upload = yield from complete(upload.id)
    return (yield from wait_until_checked(upload, on_progress=on_progress, timeout=timeout))


def describe(folder: Path, on_progress: OnProgress = ignore_progress) -> Flow[dict[str, UploadFile]]:
    """Return the folder's files that are to be sent, with their sizes and hashes. Raises FilesMissing."""
    missing = [file for file in FILES if not (folder / file).is_file()]
    if missing:
        raise FilesMissing(f"{folder} has no {' and no '.join(missing)}; {_way_out(folder)}")
    files = {}
    for file in (*FILES, *(name for name in BUNDLE_FILES if (folder / name).is_file())):
        files[file] = yield from _hashed(folder, file, on_progress)
    return files


def create(
    adapter: str, files: dict[str, UploadFile], *, promote: bool = True, base_model: str | None = None
) -> Call[Upload]:
    """Create an upload."""
    body = {
        "adapter": adapter,
        "files": {file.name: {"size": file.size, "sha256": file.sha256} for file in files.values()},
        "promote": promote,
    } | ({} if base_model is None else {"base_model": base_model})
    return Call(method="POST", path="/v1/uploads", answer=Upload, body=body)


def fetch(
    adapter: str,
    source: Bucket | Hub,
    *,
    promote: bool = True,
    on_progress: OnProgress = ignore_progress,
    timeout: float = TIMEOUT_SECONDS,
) -> Flow[Upload]:
    """Let the server fetch an adapter from an allowed source, and wait. Raises the errors of `push`."""
    body = {"adapter": adapter, "source": source, "promote": promote}
    upload = yield from Call(method="POST", path="/v1/uploads", answer=Upload, body=body)
    return (yield from wait_until_checked(upload, on_progress=on_progress, timeout=timeout))


def list_uploads(*, limit: int = 100, before: str | None = None) -> Flow[list[Upload]]:
    """Return your uploads, newest first. `before` is the id of the last upload on the previous page."""
    return read_list("/v1/uploads", Listing[Upload], limit=limit, before=before)


def get(upload_id: str) -> Call[Upload]:
    """Return one upload."""
    return read(_path(upload_id), Upload)


def put_part(upload_id: str, file: str, offset: int, part: bytes) -> Call[ReceivedBytes]:
    """Send bytes of a file. `offset` must be the number of bytes that the server already has."""
    path = item_path(f"{_path(upload_id)}/files", file)
    headers = {"Content-Type": "application/octet-stream"}
    return Call(method="PUT", path=path, answer=ReceivedBytes, params={"offset": offset}, content=part, headers=headers)


def complete(upload_id: str) -> Call[Upload]:
    """Start the server's checks."""
    return Call(method="POST", path=f"{_path(upload_id)}/complete", answer=Upload, repeatable=True)


def cancel(upload_id: str) -> Call[Deleted]:
    """Delete an upload and its received bytes."""
    return Call(method="DELETE", path=_path(upload_id), answer=Deleted, repeatable=True)


def wait_until_checked(
    upload: Upload, *, on_progress: OnProgress = ignore_progress, timeout: float = TIMEOUT_SECONDS
) -> Flow[Upload]:
    """Wait for the end of the checks. Raises UploadRejected, and UploadUnfinished after `timeout` seconds."""
    waited, pause = 0.0, POLL_SECONDS
    while upload.state == "validating":
        if waited >= timeout:
            raise UploadUnfinished(f"the server is still checking {upload.id} after {timeout:g} s", upload)
        on_progress(Progress("validating", "", 0, 0))
        yield Wait(pause)
        waited, pause = waited + pause, min(pause * 1.5, MAX_POLL_SECONDS)
        upload = yield from get(upload.id)
    if upload.state == "ready":
        return upload
    if upload.state == "rejected":
        raise UploadRejected(upload)
    raise UploadUnfinished(f"the upload {upload.id} is {upload.state}; push the folder again", upload)


def read_source(text: str) -> Bucket | Hub | None:
    """Parse `s3://bucket/path/`, `hub:owner/name@commit` or `hub:owner/name@commit/folder`; return None for any other
    text.
    """
    if "://" in text:
        return Bucket(url=text)
    found = _HUB.fullmatch(text)
    return None if found is None else Hub(**found.groupdict())


class Uploads(Resource[R]):
    """Calls of uploads: `client.uploads`."""

    push = method(push)
    resume = method(resume)
    fetch = method(fetch)
    finish = method(finish)
    create = method(create)
    list = method(list_uploads)
    get = method(get)
    put_part = method(put_part)
    complete = method(complete)
    cancel = method(cancel)
    wait_until_checked = method(wait_until_checked)


def _send(upload_id: str, file: UploadFile, source: Path, on_progress: OnProgress) -> Flow[None]:
    """Send the missing bytes of a file in parts. After a failure, continue at the offset that the server reports."""
    received, failures = file.received, 0
    on_progress(Progress("sending", file.name, received, file.size))
    while received < file.size:
        part = yield Block(partial(_read, source, received))
        if not part:
            raise FilesMissing(f"{source} has {received} bytes; it had {file.size} when the upload began")
        try:
            now = (yield from put_part(upload_id, file.name, received, part)).received
        except (ConnectionFailed, Conflict) as failure:
            failures += 1
            if failures > MAX_FAILURES:
                raise
            yield Wait(min(0.25 * 2.0**failures, 15.0) if isinstance(failure, ConnectionFailed) else 0.0)
            now = yield from _received(upload_id, file.name, failure)
        if now > received:
            failures = 0
        received = now
        on_progress(Progress("sending", file.name, received, file.size))


def _received(upload_id: str, file: str, failure: Exception) -> Flow[int]:
    """Return the number of bytes that the server has. Raises `failure` if the upload accepts no more."""
    upload = yield from get(upload_id)
    found = next((one for one in upload.files if one.name == file), None)
    if found is None or upload.state != "uploading":
        raise failure
    return found.received


def _unfinished(
    adapter: str, files: dict[str, UploadFile], promote: bool, base_model: str | None
) -> Flow[Upload | None]:
    """Return an unfinished upload of the same files to the same adapter, if there is one."""
    wanted = {(file.name, file.size, file.sha256) for file in files.values()}
    for upload in (yield from list_uploads()):
        same = {(file.name, file.size, file.sha256) for file in upload.files} == wanted
        named = adapter in (upload.adapter, upload.adapter.partition("/")[2]) and upload.base_model == base_model
        if upload.state == "uploading" and upload.promote == promote and same and named:
            return upload
    return None


def _way_out(folder: Path) -> str:
    """Return advice for a folder without an adapter's two files; the advice depends on the files in the folder."""
    inner = sorted(file.parent.name for file in folder.glob("*/adapter_config.json"))
    if inner:
        return f"push one of its folders: {', '.join(str(folder / name) for name in inner[:MAX_NAMED])}"
    for patterns, advice in _OTHER_FORMS.items():
        if any(any(folder.glob(pattern)) for pattern in patterns):
            return advice
    return "save it with model.save_pretrained()"


def _hashed(folder: Path, name: str, on_progress: OnProgress) -> Flow[UploadFile]:
    file = folder / name
    size, done, digest = file.stat().st_size, 0, hashlib.sha256()
    on_progress(Progress("hashing", name, 0, size))
    while part := (yield Block(partial(_read, file, done))):
        yield Block(partial(digest.update, part))
        done += len(part)
        on_progress(Progress("hashing", name, done, size))
    return UploadFile(name=name, size=done, sha256=digest.hexdigest(), received=0)


def _read(file: Path, offset: int) -> bytes:
    with file.open("rb") as opened:
        opened.seek(offset)
        return opened.read(PART_BYTES)


def _path(upload_id: str) -> str:
    return item_path("/v1/uploads", upload_id)
