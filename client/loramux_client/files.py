"""Flows of /v1/files: inputs of batches and sets of questions, and the files that batches write."""

from __future__ import annotations

from pathlib import Path
from typing import Literal
from urllib.parse import quote
from uuid import uuid4

from loramux_client.flow import Block, Call, Flow, R, Resource, method
from loramux_client.objects import Deleted, File, Page


def create(path: str | Path, purpose: Literal["batch", "evals"] = "batch") -> Flow[File]:
    """Send a file, which is held in memory meanwhile. Raises OSError, InvalidRequest, NotPermitted."""
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
    """Return your project's files, newest first. `after` is the last id of the previous page."""
    params = {"purpose": purpose, "limit": limit, "after": after}
    return (yield from Call(method="GET", path="/v1/files", answer=Page[File], params=params, repeatable=True)).data


def get(id: str) -> Call[File]:
    """Return one file."""
    return Call(method="GET", path=_path(id), answer=File, repeatable=True)


def content(id: str) -> Call[bytes]:
    """Return the bytes of a file."""
    return Call(method="GET", path=f"{_path(id)}/content", answer=bytes, repeatable=True)


def delete(id: str) -> Call[Deleted]:
    """Delete a file and its bytes. Raises Conflict while a batch reads it."""
    return Call(method="DELETE", path=_path(id), answer=Deleted)


class Files(Resource[R]):
    """`client.files`."""

    create = method(create)
    list = method(list_files)
    get = method(get)
    content = method(content)
    delete = method(delete)


def _path(id: str) -> str:
    return f"/v1/files/{quote(id, safe='')}"
