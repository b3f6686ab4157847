"""Flows of /admin/bases, /admin/engines and /admin/migrations, which operators call, and of /v1/migrations.

A base model is added or retired, its engines are drained or restarted, and a migration moves adapters from one base
model to another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loramux_client.flow import Call, Flow, R, Resource, item_path, method, poll, read, read_list
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
PAGE = 500
"""Items of a migration that are read per request."""


def list_bases() -> Flow[list[Base]]:
    """Return the base models, with their state on the server that answers."""
    return read_list("/admin/bases", Listing[Base])


def get_base(name: str) -> Flow[Base]:
    """Return one base model. Raises KeyError if no base model has that name."""
    found = yield from list_bases()
    try:
        return next(base for base in found if base.name == name)
    except StopIteration:
        raise KeyError(name) from None


def add_base(name: str, path: str, **settings: Any) -> Call[Base]:
    """Add a base model, or serve a retired one again. `settings` has the fields of one table of `[[bases]]`."""
    body: Mapping[str, Any] = {"name": name, "path": path} | settings
    return Call(method="POST", path="/admin/bases", answer=Base, body=dict(body))


def retire_base(name: str, *, successor: str | None = None, force: bool = False) -> Call[Base]:
    """Refuse new uploads and requests for a base model, and stop its engines when no request runs."""
    body = {"name": name, "successor": successor, "force": force}
    return Call(method="POST", path="/admin/bases/retire", answer=Base, body=body)


def wait_for_base(name: str) -> Flow[Base]:
    """Wait until a base model is neither being loaded nor drained, and return it."""
    return poll(lambda: get_base(name), lambda base: base.state not in ("loading", "draining"), POLL_SECONDS)


class Bases(Resource[R]):
    """Calls of base models: `client.bases`."""

    list = method(list_bases)
    get = method(get_base)
    add = method(add_base)
    retire = method(retire_base)
    wait = method(wait_for_base)


def list_engines() -> Flow[list[Engine]]:
    """Return the engines of every base, with their state."""
    return read_list("/admin/engines", Listing[Engine])


def drain_engine(engine: str, seconds: float = 30.0) -> Flow[Engine]:
    """Take an engine out of service, and return when it is stopped. Requests that still run after `seconds` move to
    other engines.
    """
    yield from _order("drain", engine, seconds)
    return (yield from poll(lambda: _get_engine(engine), lambda one: one.state == "lost", POLL_SECONDS))


def restart_engine(engine: str, seconds: float = 30.0) -> Flow[Engine]:
    """Drain an engine and start it again. The call returns when the engine serves or has failed to start."""
    before = yield from _order("restart", engine, seconds)

    def has_started(one: Engine) -> bool:
        return one.starts > before.starts and one.state != "starting"

    return (yield from poll(lambda: _get_engine(engine), has_started, POLL_SECONDS))


def _order(verb: str, engine: str, seconds: float) -> Call[Engine]:
    body = {"engine": engine, "seconds": seconds}
    return Call(method="POST", path=f"/admin/engines/{verb}", answer=Engine, body=body)


def _get_engine(name: str) -> Flow[Engine]:
    engines = yield from list_engines()
    return next(engine for engine in engines if engine.engine == name)


class Engines(Resource[R]):
    """Calls of engines: `client.engines`."""

    list = method(list_engines)
    drain = method(drain_engine)
    restart = method(restart_engine)


def begin_migration(
    source: str, target: str, *, tenant: str | None = None, adapter: str | None = None, evaluate: bool = True
) -> Call[BaseMigration]:
    """Check the adapters of one base model on another base model, in the background."""
    body = {"source": source, "target": target, "tenant": tenant, "adapter": adapter, "evaluate": evaluate}
    return Call(method="POST", path="/admin/migrations", answer=BaseMigration, body=body)


def get_migration(id: str) -> Call[BaseMigration]:
    """Return a migration with its counts."""
    return read(_migration_path(id), BaseMigration)


def list_migrations(*, limit: int = 100) -> Flow[list[BaseMigration]]:
    """Return the migrations, newest first."""
    return read_list("/admin/migrations", Listing[BaseMigration], limit=limit)


def migration_items(id: str, outcome: str | None = None) -> Flow[list[BaseMigrationItem]]:
    """Return every adapter of a migration with its result, or only adapters with one outcome."""
    found: list[BaseMigrationItem] = []
    while True:
        after = found[-1].position if found else None
        params = {"outcome": outcome, "after": after, "limit": PAGE}
        page = yield from read_list(f"{_migration_path(id)}/items", Listing[BaseMigrationItem], **params)
        found += page
        if len(page) < PAGE:
            return found


def wait_for_migration(id: str) -> Flow[BaseMigration]:
    """Wait for the end of a migration, and return it."""
    return poll(lambda: get_migration(id), lambda found: found.status != "running", POLL_SECONDS)


def cancel_migration(id: str) -> Call[BaseMigration]:
    """End a running migration; its decisions so far remain."""
    return Call(method="POST", path=f"{_migration_path(id)}/cancel", answer=BaseMigration)


def promote_migrated(
    id: str, *, weight: int = 100, tenant: str | None = None, adapter: str | None = None
) -> Flow[list[Moved]]:
    """Give the new revisions of the adapters that fit `weight` percent of the traffic of their aliases."""
    return (yield from _move(id, "promote", {"weight": weight, "tenant": tenant, "adapter": adapter}))


def roll_back_migrated(id: str, *, tenant: str | None = None, adapter: str | None = None) -> Flow[list[Moved]]:
    """Restore the targets that aliases had before the new revisions."""
    return (yield from _move(id, "rollback", {"tenant": tenant, "adapter": adapter}))


def migration_reports(*, limit: int = 100) -> Flow[list[MigrationReport]]:
    """Return the results of migrations for your own adapters, newest migration first."""
    return read_list("/v1/migrations", Listing[MigrationReport], limit=limit)


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
    return item_path("/admin/migrations", id)


class Migrations(Resource[R]):
    """Calls of migrations: `client.migrations`."""

    begin = method(begin_migration)
    get = method(get_migration)
    list = method(list_migrations)
    items = method(migration_items)
    wait = method(wait_for_migration)
    cancel = method(cancel_migration)
    promote = method(promote_migrated)
    roll_back = method(roll_back_migrated)
    reports = method(migration_reports)
