"""/v1/adapters, as flows. A name is `adapter`, or `tenant/adapter` for one that another tenant has granted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar
from urllib.parse import quote
from uuid import uuid4

from loramux.client.answers import (
    Adapter,
    Alias,
    AliasVersion,
    Event,
    Gone,
    Grant,
    Listing,
    LoggedRequest,
    Revision,
)
from loramux.client.flow import Call, Flow
from loramux.client.running import R, Resource, method

T = TypeVar("T")
DEFAULT = "default"


def all_adapters() -> Flow[list[Adapter]]:
    """Your adapters at their current revisions, by name."""
    return (yield from Call(method="GET", path="/v1/adapters", answer=Listing[Adapter], repeatable=True)).data


def get(name: str) -> Call[Adapter]:
    """One adapter."""
    return _read(name, "", Adapter)


def revisions(name: str) -> Flow[list[Revision]]:
    """Its revisions, deleted ones too while that can be undone."""
    return (yield from _read(name, "/revisions", Listing[Revision])).data


def revision(name: str, number: int) -> Call[Revision]:
    """One of its revisions."""
    return _read(name, f"/revisions/{number}", Revision)


def aliases(name: str) -> Flow[list[Alias]]:
    """What its aliases point at."""
    return (yield from _read(name, "/aliases", Listing[Alias])).data


def history(name: str, alias: str = DEFAULT) -> Flow[list[AliasVersion]]:
    """What an alias has pointed at, newest first."""
    return (yield from _read(name, f"/aliases/{quote(alias, safe='')}/history", Listing[AliasVersion])).data


def point(name: str, targets: Mapping[int, int], alias: str = DEFAULT, *, if_match: str | None = None) -> Call[Adapter]:
    """Let an alias point at revisions, by their weights: `{3: 95, 4: 5}` sends 5 of 100 requests to revision 4."""
    body = {"targets": [{"revision": number, "weight": weight} for number, weight in targets.items()]}
    return _change("PUT", name, f"/aliases/{quote(alias, safe='')}", Adapter, body, if_match)


def canary(name: str, revision: int, percent: int, alias: str = DEFAULT) -> Flow[Adapter]:
    """Send `percent` (1 to 99) of an alias's requests to `revision`, the others where most of them go now.

    Raises Conflict where the adapter is changed meanwhile, ValueError where the alias has no other revision.
    """
    if not 1 <= percent <= 99:
        raise ValueError(f"percent is 1 to 99, and promote() sends all of them; got {percent}")
    adapter = yield from get(name)
    now = next((one for one in adapter.aliases if one.name == alias), None)
    others = [target for target in now.targets if target.revision != revision] if now else []
    if not others:
        raise ValueError(f"the alias {alias} of {name} points at no other revision; use promote()")
    main = max(others, key=lambda target: (target.weight, target.revision))
    targets = {main.revision: 100 - percent, revision: percent}
    return (yield from point(name, targets, alias, if_match=adapter.etag))


def promote(name: str, revision: int, alias: str = DEFAULT, *, if_match: str | None = None) -> Call[Adapter]:
    """Let an alias point at one revision, with all of its requests."""
    return _change("POST", name, "/promote", Adapter, {"revision": revision, "alias": alias}, if_match)


def rollback(
    name: str, alias: str = DEFAULT, *, version: int | None = None, if_match: str | None = None
) -> Call[Adapter]:
    """Let an alias point at what it pointed at before, or at one `version` of its history."""
    call = _change("POST", name, f"/aliases/{quote(alias, safe='')}/rollback", Adapter, None, if_match)
    return replace(call, params={"version": version})


def remove_alias(name: str, alias: str, *, if_match: str | None = None) -> Call[Adapter]:
    """Forget an alias; not `default`."""
    return _change("DELETE", name, f"/aliases/{quote(alias, safe='')}", Adapter, None, if_match)


def pin(name: str, revision: int) -> Call[Revision]:
    """Load a revision into the pool and keep it there."""
    return _change("PUT", name, f"/pins/{revision}", Revision)


def unpin(name: str, revision: int) -> Call[Revision]:
    """Let it go again when the room is needed."""
    return _change("DELETE", name, f"/pins/{revision}", Revision)


def grants(name: str) -> Flow[list[Grant]]:
    """The tenants that may call it."""
    return (yield from _read(name, "/grants", Listing[Grant])).data


def grant(name: str, tenant: str) -> Call[Grant]:
    """Let another tenant call it, at that tenant's cost; it sees no files."""
    return _change("PUT", name, f"/grants/{quote(tenant, safe='')}", Grant)


def revoke(name: str, tenant: str) -> Call[Grant]:
    """End a grant."""
    return _change("DELETE", name, f"/grants/{quote(tenant, safe='')}", Grant)


def delete(name: str, *, if_match: str | None = None) -> Call[Gone]:
    """Admit nobody to it any more; requests that run finish. It can be undone for a while."""
    return _change("DELETE", name, "", Gone, None, if_match)


def delete_revision(name: str, number: int, *, if_match: str | None = None) -> Call[Revision]:
    """The same for one revision that no alias points at."""
    return _change("DELETE", name, f"/revisions/{number}", Revision, None, if_match)


def undelete(name: str, revision: int | None = None) -> Call[Adapter]:
    """Undo a deletion: of the adapter with all that went with it, or of one revision of an adapter that is there."""
    return replace(_change("POST", name, "/undelete", Adapter), params={"revision": revision})


def expire(name: str, seconds: int | None, *, if_match: str | None = None) -> Call[Adapter]:
    """Let it delete itself in so many seconds; None: never."""
    return _change("PATCH", name, "", Adapter, {"ttl_s": seconds}, if_match)


def events(name: str | None = None, *, limit: int = 100, before: str | None = None) -> Flow[list[Event]]:
    """What happened to one adapter, or to all, newest first; `before`: the id of the last page's last event."""
    params = {"adapter": name, "limit": limit, "before": before}
    call = Call(method="GET", path="/v1/events", answer=Listing[Event], params=params, repeatable=True)
    return (yield from call).data


def requests(name: str, *, limit: int = 100, before: str | None = None) -> Flow[list[LoggedRequest]]:
    """What you asked of an adapter last, newest first: which revision answered, and how it ended."""
    params = {"adapter": name, "limit": limit, "before": before}
    call = Call(method="GET", path="/v1/requests", answer=Listing[LoggedRequest], params=params, repeatable=True)
    return (yield from call).data


class Adapters(Resource[R]):
    """`client.adapters`."""

    all = method(all_adapters)
    get = method(get)
    revisions = method(revisions)
    revision = method(revision)
    aliases = method(aliases)
    history = method(history)
    point = method(point)
    canary = method(canary)
    promote = method(promote)
    rollback = method(rollback)
    remove_alias = method(remove_alias)
    pin = method(pin)
    unpin = method(unpin)
    grants = method(grants)
    grant = method(grant)
    revoke = method(revoke)
    delete = method(delete)
    delete_revision = method(delete_revision)
    undelete = method(undelete)
    expire = method(expire)
    events = method(events)
    requests = method(requests)


def _read(name: str, rest: str, answer: type[T]) -> Call[T]:
    return Call(method="GET", path=_path(name) + rest, answer=answer, repeatable=True)


def _change(
    method: str, name: str, rest: str, answer: type[T], body: Any = None, if_match: str | None = None
) -> Call[T]:
    """Under a key of its own, so that sending it again changes nothing more."""
    headers = {"Idempotency-Key": uuid4().hex} | ({"If-Match": if_match} if if_match else {})
    return Call(method=method, path=_path(name) + rest, answer=answer, body=body, headers=headers, repeatable=True)


def _path(name: str) -> str:
    return f"/v1/adapters/{quote(name, safe='')}"
