"""Flows of /admin/bases, for operators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loramux_client.flow import Call, Flow, R, Resource, Wait, method
from loramux_client.objects import Base, Listing

POLL_SECONDS = 1.0


def list_bases() -> Flow[list[Base]]:
    """Return the base models, with their state on the server that answers."""
    return (yield from Call(method="GET", path="/admin/bases", answer=Listing[Base], repeatable=True)).data


def get(name: str) -> Flow[Base]:
    """Return one base model. Raises KeyError where there is none of that name."""
    found = yield from list_bases()
    try:
        return next(base for base in found if base.name == name)
    except StopIteration:
        raise KeyError(name) from None


def add(name: str, path: str, **settings: Any) -> Call[Base]:
    """Add a base model, or serve a retired one again; `settings` as in one table of `[[bases]]`."""
    body: Mapping[str, Any] = {"name": name, "path": path} | settings
    return Call(method="POST", path="/admin/bases", answer=Base, body=dict(body))


def retire(name: str, *, successor: str | None = None, force: bool = False) -> Call[Base]:
    """Take no more uploads and requests for a base model, and stop its engines once no request runs."""
    body = {"name": name, "successor": successor, "force": force}
    return Call(method="POST", path="/admin/bases/retire", answer=Base, body=body)


def wait(name: str) -> Flow[Base]:
    """Wait until a base model is neither being loaded nor drained, and return it."""
    while True:
        found = yield from get(name)
        if found.state not in ("loading", "draining"):
            return found
        yield Wait(POLL_SECONDS)


class Bases(Resource[R]):
    """`client.bases`."""

    list = method(list_bases)
    get = method(get)
    add = method(add)
    retire = method(retire)
    wait = method(wait)
