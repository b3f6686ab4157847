"""Flows of /v1/evaluations: two revisions of an adapter on one set of questions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from loramux_client import files
from loramux_client.batches import MAX_POLL_SECONDS, POLL_SECONDS
from loramux_client.flow import Call, Flow, R, Resource, Wait, method
from loramux_client.objects import Evaluation, Page


def create(
    adapter: str,
    revision: int,
    against: int,
    file_id: str,
    grader: Mapping[str, Any],
    *,
    judge_api_key: str | None = None,
) -> Call[Evaluation]:
    """Evaluate a revision against another one, on a file that was sent with the purpose `evals`."""
    body = {"adapter": adapter, "revision": revision, "against": against, "file_id": file_id, "grader": dict(grader)}
    key = {} if judge_api_key is None else {"judge_api_key": judge_api_key}
    return Call(method="POST", path="/v1/evaluations", answer=Evaluation, body=body | key)


def run(
    adapter: str,
    revision: int,
    against: int,
    questions: str | Path,
    grader: Mapping[str, Any],
    *,
    judge_api_key: str | None = None,
) -> Flow[Evaluation]:
    """Send a set of questions, and evaluate a revision on it against another one."""
    file = yield from files.create(questions, "evals")
    return (yield from create(adapter, revision, against, file.id, grader, judge_api_key=judge_api_key))


def list_evaluations(
    adapter: str | None = None, revision: int | None = None, *, limit: int = 20, after: str | None = None
) -> Flow[list[Evaluation]]:
    """Return your project's evaluations, newest first; of one adapter, or of one of its revisions as the candidate."""
    params = {"adapter": adapter, "revision": revision, "limit": limit, "after": after}
    call = Call(method="GET", path="/v1/evaluations", answer=Page[Evaluation], params=params, repeatable=True)
    return (yield from call).data


def get(id: str) -> Call[Evaluation]:
    """Return one evaluation, with its result once it is completed."""
    return Call(method="GET", path=f"/v1/evaluations/{quote(id, safe='')}", answer=Evaluation, repeatable=True)


def wait(id: str) -> Flow[Evaluation]:
    """Wait for the end of an evaluation and return it: `completed` with a result, or `failed` with an error."""
    pause = POLL_SECONDS
    while True:
        found = yield from get(id)
        if found.status != "running":
            return found
        yield Wait(pause)
        pause = min(2 * pause, MAX_POLL_SECONDS)


class Evaluations(Resource[R]):
    """`client.evaluations`."""

    create = method(create)
    run = method(run)
    list = method(list_evaluations)
    get = method(get)
    wait = method(wait)
