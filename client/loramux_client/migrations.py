"""Flows of /admin/migrations, for operators, and of /v1/migrations: adapters that move between base models."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from loramux_client.flow import Call, Flow, R, Resource, Wait, method
from loramux_client.objects import BaseMigration, BaseMigrationItem, Listing, MigrationReport, Moved, MovedPage

POLL_SECONDS = 1.0
PAGE = 500


def begin(
    source: str, target: str, *, tenant: str | None = None, adapter: str | None = None, evaluate: bool = True
) -> Call[BaseMigration]:
    """Check the adapters of one base model on another one, in the background."""
    body = {"source": source, "target": target, "tenant": tenant, "adapter": adapter, "evaluate": evaluate}
    return Call(method="POST", path="/admin/migrations", answer=BaseMigration, body=body)


def get(id: str) -> Call[BaseMigration]:
    """Return a migration with its counts."""
    return Call(method="GET", path=_path(id), answer=BaseMigration, repeatable=True)


def list_migrations(*, limit: int = 100) -> Flow[list[BaseMigration]]:
    """Return the migrations, newest first."""
    path, params = "/admin/migrations", {"limit": limit}
    call = Call(method="GET", path=path, answer=Listing[BaseMigration], params=params, repeatable=True)
    return (yield from call).data


def items(id: str, outcome: str | None = None) -> Flow[list[BaseMigrationItem]]:
    """Return every adapter of a migration with what was found, or those of one outcome."""
    found: list[BaseMigrationItem] = []
    while True:
        after = found[-1].position if found else None
        params = {"outcome": outcome, "after": after, "limit": PAGE}
        path = f"{_path(id)}/items"
        call = Call(method="GET", path=path, answer=Listing[BaseMigrationItem], params=params, repeatable=True)
        page = (yield from call).data
        found += page
        if len(page) < PAGE:
            return found


def wait(id: str) -> Flow[BaseMigration]:
    """Wait for the end of a migration, and return it."""
    while True:
        found = yield from get(id)
        if found.status != "running":
            return found
        yield Wait(POLL_SECONDS)


def cancel(id: str) -> Call[BaseMigration]:
    """End a migration under way; what is decided stays so."""
    return Call(method="POST", path=f"{_path(id)}/cancel", answer=BaseMigration)


def promote(id: str, *, weight: int = 100, tenant: str | None = None, adapter: str | None = None) -> Flow[list[Moved]]:
    """Give the new revisions of adapters that fit `weight` percent of their aliases."""
    return (yield from _move(id, "promote", {"weight": weight, "tenant": tenant, "adapter": adapter}))


def roll_back(id: str, *, tenant: str | None = None, adapter: str | None = None) -> Flow[list[Moved]]:
    """Point aliases at what they pointed at before the new revisions."""
    return (yield from _move(id, "rollback", {"tenant": tenant, "adapter": adapter}))


def reports(*, limit: int = 100) -> Flow[list[MigrationReport]]:
    """Return what migrations found about your own adapters, newest migration first."""
    path, params = "/v1/migrations", {"limit": limit}
    call = Call(method="GET", path=path, answer=Listing[MigrationReport], params=params, repeatable=True)
    return (yield from call).data


def _move(id: str, verb: str, body: dict[str, Any]) -> Flow[list[Moved]]:
    moved: list[Moved] = []
    after: int | None = -1
    while after is not None:
        call = Call(method="POST", path=f"{_path(id)}/{verb}", answer=MovedPage, body=body | {"after": after})
        page = yield from call
        moved += page.data
        after = page.next
    return moved


def _path(id: str) -> str:
    return f"/admin/migrations/{quote(id, safe='')}"


class Migrations(Resource[R]):
    """`client.migrations`."""

    begin = method(begin)
    get = method(get)
    list = method(list_migrations)
    items = method(items)
    wait = method(wait)
    cancel = method(cancel)
    promote = method(promote)
    roll_back = method(roll_back)
    reports = method(reports)
