"""Flows for operators: /admin/bases, /admin/engines and /admin/migrations; and of /v1/migrations.

A base model is added or retired, its engines are drained or restarted, and a migration moves adapters from one base
model to another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from loramux_client.flow import Call, Flow, R, Resource, Wait, method
from loramux_client.objects import (
    Base,
    BaseMigration,
    BaseMigrationItem,
    Engine,
    Listing,
    MigrationReport,
    Moved,
    MovedPage,
)

POLL_SECONDS = 1.0


def list_bases() -> Flow[list[Base]]:
    """Return the base models, with their state on the server that answers."""
    return (yield from Call(method="GET", path="/admin/bases", answer=Listing[Base], repeatable=True)).data


def get_base(name: str) -> Flow[Base]:
    """Return one base model. Raises KeyError where there is none of that name."""
    found = yield from list_bases()
    try:
        return next(base for base in found if base.name == name)
    except StopIteration:
        raise KeyError(name) from None


def add_base(name: str, path: str, **settings: Any) -> Call[Base]:
    """Add a base model, or serve a retired one again; `settings` as in one table of `[[bases]]`."""
    body: Mapping[str, Any] = {"name": name, "path": path} | settings
    return Call(method="POST", path="/admin/bases", answer=Base, body=dict(body))


def retire_base(name: str, *, successor: str | None = None, force: bool = False) -> Call[Base]:
    """Take no more uploads and requests for a base model, and stop its engines once no request runs."""
    body = {"name": name, "successor": successor, "force": force}
    return Call(method="POST", path="/admin/bases/retire", answer=Base, body=body)


def wait_for_base(name: str) -> Flow[Base]:
    """Wait until a base model is neither being loaded nor drained, and return it."""
    while True:
        found = yield from get_base(name)
        if found.state not in ("loading", "draining"):
            return found
        yield Wait(POLL_SECONDS)


class Bases(Resource[R]):
    """`client.bases`."""

    list = method(list_bases)
    get = method(get_base)
    add = method(add_base)
    retire = method(retire_base)
    wait = method(wait_for_base)


def list_engines() -> Flow[list[Engine]]:
    """Return the engines of every base, with their state."""
    return (yield from Call(method="GET", path="/admin/engines", answer=Listing[Engine], repeatable=True)).data


def drain_engine(engine: str, seconds: float = 30.0) -> Flow[Engine]:
    """Take an engine out of service, and return once it is stopped; what runs after `seconds` goes on elsewhere."""
    yield from _order("drain", engine, seconds)
    return (yield from _once(engine, "lost", 0))


def restart_engine(engine: str, seconds: float = 30.0) -> Flow[Engine]:
    """Drain an engine and start it again, and return once it serves or has failed to start."""
    before = yield from _order("restart", engine, seconds)
    return (yield from _once(engine, "", before.starts))


def _order(verb: str, engine: str, seconds: float) -> Call[Engine]:
    body = {"engine": engine, "seconds": seconds}
    return Call(method="POST", path=f"/admin/engines/{verb}", answer=Engine, body=body)


def _once(name: str, state: str, starts: int) -> Flow[Engine]:
    """Poll until the engine is in `state`, or has been started again and is no longer loading its model."""
    while True:
        found = yield from list_engines()
        engine = next(one for one in found if one.engine == name)
        is_over = engine.state == state if state else engine.starts > starts and engine.state != "starting"
        if is_over:
            return engine
        yield Wait(POLL_SECONDS)


class Engines(Resource[R]):
    """`client.engines`."""

    list = method(list_engines)
    drain = method(drain_engine)
    restart = method(restart_engine)


PAGE = 500


def begin_migration(
    source: str, target: str, *, tenant: str | None = None, adapter: str | None = None, evaluate: bool = True
) -> Call[BaseMigration]:
    """Check the adapters of one base model on another one, in the background."""
    body = {"source": source, "target": target, "tenant": tenant, "adapter": adapter, "evaluate": evaluate}
    return Call(method="POST", path="/admin/migrations", answer=BaseMigration, body=body)


def get_migration(id: str) -> Call[BaseMigration]:
    """Return a migration with its counts."""
    return Call(method="GET", path=_migration_path(id), answer=BaseMigration, repeatable=True)


def list_migrations(*, limit: int = 100) -> Flow[list[BaseMigration]]:
    """Return the migrations, newest first."""
    path, params = "/admin/migrations", {"limit": limit}
    call = Call(method="GET", path=path, answer=Listing[BaseMigration], params=params, repeatable=True)
    return (yield from call).data


def migration_items(id: str, outcome: str | None = None) -> Flow[list[BaseMigrationItem]]:
    """Return every adapter of a migration with what was found, or those of one outcome."""
    found: list[BaseMigrationItem] = []
    while True:
        after = found[-1].position if found else None
        params = {"outcome": outcome, "after": after, "limit": PAGE}
        path = f"{_migration_path(id)}/items"
        call = Call(method="GET", path=path, answer=Listing[BaseMigrationItem], params=params, repeatable=True)
        page = (yield from call).data
        found += page
        if len(page) < PAGE:
            return found


def wait_for_migration(id: str) -> Flow[BaseMigration]:
    """Wait for the end of a migration, and return it."""
    while True:
        found = yield from get_migration(id)
        if found.status != "running":
            return found
        yield Wait(POLL_SECONDS)


def cancel_migration(id: str) -> Call[BaseMigration]:
    """End a migration under way; what is decided stays so."""
    return Call(method="POST", path=f"{_migration_path(id)}/cancel", answer=BaseMigration)


def promote_migrated(
    id: str, *, weight: int = 100, tenant: str | None = None, adapter: str | None = None
) -> Flow[list[Moved]]:
    """Give the new revisions of adapters that fit `weight` percent of their aliases."""
    return (yield from _move(id, "promote", {"weight": weight, "tenant": tenant, "adapter": adapter}))


def roll_back_migrated(id: str, *, tenant: str | None = None, adapter: str | None = None) -> Flow[list[Moved]]:
    """Point aliases at what they pointed at before the new revisions."""
    return (yield from _move(id, "rollback", {"tenant": tenant, "adapter": adapter}))


def migration_reports(*, limit: int = 100) -> Flow[list[MigrationReport]]:
    """Return what migrations found about your own adapters, newest migration first."""
    path, params = "/v1/migrations", {"limit": limit}
    call = Call(method="GET", path=path, answer=Listing[MigrationReport], params=params, repeatable=True)
    return (yield from call).data


def _move(id: str, verb: str, body: dict[str, Any]) -> Flow[list[Moved]]:
    moved: list[Moved] = []
    after: int | None = -1
    while after is not None:
        call = Call(method="POST", path=f"{_migration_path(id)}/{verb}", answer=MovedPage, body=body | {"after": after})
        page = yield from call
        moved += page.data
        after = page.next
    return moved


def _migration_path(id: str) -> str:
    return f"/admin/migrations/{quote(id, safe='')}"


class Migrations(Resource[R]):
    """`client.migrations`."""

    begin = method(begin_migration)
    get = method(get_migration)
    list = method(list_migrations)
    items = method(migration_items)
    wait = method(wait_for_migration)
    cancel = method(cancel_migration)
    promote = method(promote_migrated)
    roll_back = method(roll_back_migrated)
    reports = method(migration_reports)
