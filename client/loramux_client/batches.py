"""Flows of /v1/batches: files of requests that run when there is room."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from loramux_client import files
from loramux_client.flow import Call, Flow, R, Resource, Wait, method
from loramux_client.objects import Batch, Page

ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
POLL_SECONDS, MAX_POLL_SECONDS = 0.5, 15.0
"""The first and the longest pause between polls of a batch's state."""
CHAT = "/v1/chat/completions"


def create(
    input_file_id: str, endpoint: str = CHAT, *, window: str = "24h", metadata: Mapping[str, str] | None = None
) -> Call[Batch]:
    """Run the lines of a file, which was sent with the purpose `batch`."""
    body = {"input_file_id": input_file_id, "endpoint": endpoint, "completion_window": window}
    return Call(
        method="POST", path="/v1/batches", answer=Batch, body=body | ({"metadata": dict(metadata)} if metadata else {})
    )


def run(
    path: str | Path, endpoint: str = CHAT, *, window: str = "24h", metadata: Mapping[str, str] | None = None
) -> Flow[Batch]:
    """Send a file and run its lines."""
    file = yield from files.create(path, "batch")
    return (yield from create(file.id, endpoint, window=window, metadata=metadata))


def list_batches(*, limit: int = 20, after: str | None = None) -> Flow[list[Batch]]:
    """Return your project's batches, newest first. `after` is the last id of the previous page."""
    params = {"limit": limit, "after": after}
    return (yield from Call(method="GET", path="/v1/batches", answer=Page[Batch], params=params, repeatable=True)).data


def get(id: str) -> Call[Batch]:
    """Return one batch."""
    return Call(method="GET", path=_path(id), answer=Batch, repeatable=True)


def cancel(id: str) -> Call[Batch]:
    """Begin no further line; answers so far are in the output file."""
    return Call(method="POST", path=f"{_path(id)}/cancel", answer=Batch, repeatable=True)


def wait(id: str) -> Flow[Batch]:
    """Wait for the end of a batch, which its window bounds, and return it."""
    pause = POLL_SECONDS
    while True:
        batch = yield from get(id)
        if batch.status in ENDED:
            return batch
        yield Wait(pause)
        pause = min(2 * pause, MAX_POLL_SECONDS)


class Batches(Resource[R]):
    """`client.batches`."""

    create = method(create)
    run = method(run)
    list = method(list_batches)
    get = method(get)
    cancel = method(cancel)
    wait = method(wait)


def _path(id: str) -> str:
    return f"/v1/batches/{quote(id, safe='')}"
