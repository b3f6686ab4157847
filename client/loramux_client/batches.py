"""Flows of /v1/files, /v1/batches and /v1/evaluations: files of requests that run when the server has free capacity.

A file is the input of a batch or a set of questions. A batch answers the lines of a file. An evaluation answers a set
of questions with two revisions of an adapter and compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from loramux_client.flow import Block, Call, Flow, R, Resource, item_path, method, poll, read, read_list
from loramux_client.objects import Batch, Deleted, Evaluation, File, Listing

ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
"""Final states of a batch."""
POLL_SECONDS, MAX_POLL_SECONDS = 0.5, 15.0
"""Shortest and longest pause between polls of a batch or an evaluation, in seconds."""
CHAT = "/v1/chat/completions"


def create_file(path: str | Path, purpose: Literal["batch", "evals", "fine-tune", "vision"] = "batch") -> Flow[File]:
    """Send a file, which is held in memory during the call. Raises OSError, InvalidRequest, NotPermitted."""
    source = Path(path)
    data: bytes = yield Block(source.read_bytes)
    boundary = uuid4().hex
    name = source.name.replace("\\", "_").replace('"', "_")
    parts = (
        f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n{purpose}\r\n'
        f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n'
        "Content-Type: application/jsonl\r\n\r\n"
    )
    headers = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
    content = parts.encode() + data + f"\r\n--{boundary}--\r\n".encode()
    return (yield from Call(method="POST", path="/v1/files", answer=File, content=content, headers=headers))


def list_files(purpose: str | None = None, *, limit: int = 100, after: str | None = None) -> Flow[list[File]]:
    """Return your project's files, newest first. `after` is the id of the last file on the previous page."""
    return read_list("/v1/files", Listing[File], purpose=purpose, limit=limit, after=after)


def get_file(id: str) -> Call[File]:
    """Return one file."""
    return read(_file_path(id), File)


def read_file(id: str) -> Call[bytes]:
    """Return the bytes of a file."""
    return read(f"{_file_path(id)}/content", bytes)


def delete_file(id: str) -> Call[Deleted]:
    """Delete a file and its bytes. Raises Conflict while a batch reads the file."""
    return Call(method="DELETE", path=_file_path(id), answer=Deleted)


class Files(Resource[R]):
    """Calls of files: `client.files`."""

    create = method(create_file)
    list = method(list_files)
    get = method(get_file)
    content = method(read_file)
    delete = method(delete_file)


def _file_path(id: str) -> str:
    return item_path("/v1/files", id)


def create_batch(
    input_file_id: str, endpoint: str = CHAT, *, window: str = "24h", metadata: Mapping[str, str] | None = None
) -> Call[Batch]:
    """Run the lines of a file that was sent with the purpose `batch`."""
    body = {"input_file_id": input_file_id, "endpoint": endpoint, "completion_window": window}
    return Call(
        method="POST", path="/v1/batches", answer=Batch, body=body | ({"metadata": dict(metadata)} if metadata else {})
    )


def run_batch(
    path: str | Path, endpoint: str = CHAT, *, window: str = "24h", metadata: Mapping[str, str] | None = None
) -> Flow[Batch]:
    """Send a file and run its lines."""
    file = yield from create_file(path, "batch")
    return (yield from create_batch(file.id, endpoint, window=window, metadata=metadata))


def list_batches(*, limit: int = 20, after: str | None = None) -> Flow[list[Batch]]:
    """Return your project's batches, newest first. `after` is the id of the last batch on the previous page."""
    return read_list("/v1/batches", Listing[Batch], limit=limit, after=after)


def get_batch(id: str) -> Call[Batch]:
    """Return one batch."""
    return read(_batch_path(id), Batch)


def cancel_batch(id: str) -> Call[Batch]:
    """Cancel a batch: no further line begins, and the output file has the answers of all lines that ended."""
    return Call(method="POST", path=f"{_batch_path(id)}/cancel", answer=Batch, repeatable=True)


def wait_for_batch(id: str) -> Flow[Batch]:
    """Wait for the end of a batch, which is within its window, and return the batch."""
    return poll(lambda: get_batch(id), lambda batch: batch.status in ENDED, POLL_SECONDS, MAX_POLL_SECONDS)


class Batches(Resource[R]):
    """Calls of batches: `client.batches`."""

    create = method(create_batch)
    run = method(run_batch)
    list = method(list_batches)
    get = method(get_batch)
    cancel = method(cancel_batch)
    wait = method(wait_for_batch)


def _batch_path(id: str) -> str:
    return item_path("/v1/batches", id)


def create_evaluation(
    adapter: str,
    revision: int,
    against: int | Literal["base"],
    file_id: str,
    grader: Mapping[str, Any],
    *,
    judge_api_key: str | None = None,
) -> Call[Evaluation]:
    """Evaluate a revision against another one or its base, on a file of purpose `evals` or `fine-tune`."""
    body = {"adapter": adapter, "revision": revision, "against": against, "file_id": file_id, "grader": dict(grader)}
    key = {} if judge_api_key is None else {"judge_api_key": judge_api_key}
    return Call(method="POST", path="/v1/evaluations", answer=Evaluation, body=body | key)


def run_evaluation(
    adapter: str,
    revision: int,
    against: int | Literal["base"],
    questions: str | Path,
    grader: Mapping[str, Any],
    *,
    judge_api_key: str | None = None,
    purpose: Literal["evals", "fine-tune"] = "evals",
) -> Flow[Evaluation]:
    """Send a set of questions, and compare a revision with another revision, or with its base, on this set.

    With the purpose `fine-tune`, the set is a training file: the last message of each conversation is expected.
    """
    file = yield from create_file(questions, purpose)
    return (yield from create_evaluation(adapter, revision, against, file.id, grader, judge_api_key=judge_api_key))


def list_evaluations(
    adapter: str | None = None, revision: int | None = None, *, limit: int = 20, after: str | None = None
) -> Flow[list[Evaluation]]:
    """Return your project's evaluations, newest first: all evaluations, the evaluations of one adapter, or those of one
    candidate.
    """
    params = {"adapter": adapter, "revision": revision, "limit": limit, "after": after}
    return read_list("/v1/evaluations", Listing[Evaluation], **params)


def get_evaluation(id: str) -> Call[Evaluation]:
    """Return one evaluation, with its result once it is completed."""
    return read(item_path("/v1/evaluations", id), Evaluation)


def wait_for_evaluation(id: str) -> Flow[Evaluation]:
    """Wait for the end of an evaluation and return it: `completed` with a result, or `failed` with an error."""
    return poll(lambda: get_evaluation(id), lambda found: found.status != "running", POLL_SECONDS, MAX_POLL_SECONDS)


class Evaluations(Resource[R]):
    """Calls of evaluations: `client.evaluations`."""

    create = method(create_evaluation)
    run = method(run_evaluation)
    list = method(list_evaluations)
    get = method(get_evaluation)
    wait = method(wait_for_evaluation)
