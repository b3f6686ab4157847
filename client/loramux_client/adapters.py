"""Flows of /v1/adapters. A name is `adapter`, or `tenant/adapter` for an adapter that another tenant has granted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar
from uuid import uuid4

from loramux_client.flow import Call, Flow, R, Resource, item_path, method, read, read_list
from loramux_client.objects import (
    Adapter,
    Alias,
    AliasVersion,
    Deleted,
    Event,
    Grant,
    Listing,
    LoggedRequest,
    Policy,
    Revision,
    RevisionReport,
    Shadow,
    TrainingAdapter,
)

T = TypeVar("T")
DEFAULT = "default"


def list_adapters() -> Flow[list[Adapter]]:
    """Return your adapters at their current revisions, by name."""
    return read_list("/v1/adapters", Listing[Adapter])


def list_training_adapters() -> Flow[list[TrainingAdapter]]:
    """Return the live versions of your training adapters, the latest push first."""
    return read_list("/v1/training_adapters", Listing[TrainingAdapter])


def get(name: str) -> Call[Adapter]:
    """Return one adapter."""
    return read(_path(name), Adapter)


def revisions(name: str) -> Flow[list[Revision]]:
    """Return the adapter's revisions, including deleted revisions that can be restored."""
    return read_list(_path(name, "/revisions"), Listing[Revision])


def revision(name: str, number: int) -> Call[Revision]:
    """Return a revision of the adapter."""
    return read(_path(name, f"/revisions/{number}"), Revision)


def aliases(name: str) -> Flow[list[Alias]]:
    """Return the adapter's aliases with their targets."""
    return read_list(_path(name, "/aliases"), Listing[Alias])


def history(name: str, alias: str = DEFAULT) -> Flow[list[AliasVersion]]:
    """Return the history of an alias, newest first."""
    return read_list(_path(name, item_path("/aliases", alias) + "/history"), Listing[AliasVersion])


def point(name: str, targets: Mapping[int, int], alias: str = DEFAULT, *, if_match: str | None = None) -> Call[Adapter]:
    """Set an alias to revisions with weights: `{3: 95, 4: 5}` sends 5 of 100 requests to revision 4."""
    body = {"targets": [{"revision": number, "weight": weight} for number, weight in targets.items()]}
    return _change("PUT", name, item_path("/aliases", alias), Adapter, body, if_match)


def canary(name: str, revision: int, percent: int, alias: str = DEFAULT) -> Flow[Adapter]:
    """Send `percent` (1 to 99) of an alias's requests to `revision`, and the rest to the current main target.

    Raises Conflict if the adapter changes during the call, ValueError if the alias has no other revision.
    """
    if not 1 <= percent <= 99:
        raise ValueError(f"percent must be 1 to 99, got {percent}; promote() sends all requests")
    adapter = yield from get(name)
    current = next((one for one in adapter.aliases if one.name == alias), None)
    others = [target for target in current.targets if target.revision != revision] if current else []
    if not others:
        raise ValueError(f"the alias {alias} of {name} points at no other revision; use promote()")
    main = max(others, key=lambda target: (target.weight, target.revision))
    targets = {main.revision: 100 - percent, revision: percent}
    return (yield from point(name, targets, alias, if_match=adapter.etag))


def promote(name: str, revision: int, alias: str = DEFAULT, *, if_match: str | None = None) -> Call[Adapter]:
    """Set an alias to one revision, with all of its requests."""
    return _change("POST", name, "/promote", Adapter, {"revision": revision, "alias": alias}, if_match)


def rollback(
    name: str, alias: str = DEFAULT, *, version: int | None = None, if_match: str | None = None
) -> Call[Adapter]:
    """Set an alias to its previous targets, or to the targets of a `version` in its history."""
    call = _change("POST", name, item_path("/aliases", alias) + "/rollback", Adapter, None, if_match)
    return replace(call, params={"version": version})


def remove_alias(name: str, alias: str, *, if_match: str | None = None) -> Call[Adapter]:
    """Delete an alias other than `default`."""
    return _change("DELETE", name, item_path("/aliases", alias), Adapter, None, if_match)


def pin(name: str, revision: int) -> Call[Revision]:
    """Load a revision into the engine's memory and keep it there."""
    return _change("PUT", name, f"/pins/{revision}", Revision)


def unpin(name: str, revision: int) -> Call[Revision]:
    """Allow the engine to evict the revision again."""
    return _change("DELETE", name, f"/pins/{revision}", Revision)


def grants(name: str) -> Flow[list[Grant]]:
    """Return the tenants that may call the adapter."""
    return read_list(_path(name, "/grants"), Listing[Grant])


def grant(name: str, tenant: str) -> Call[Grant]:
    """Let another tenant call the adapter. That tenant pays for its requests, and has no access to the files."""
    return _change("PUT", name, item_path("/grants", tenant), Grant)


def revoke(name: str, tenant: str) -> Call[Grant]:
    """End another tenant's grant."""
    return _change("DELETE", name, item_path("/grants", tenant), Grant)


def delete(name: str, *, if_match: str | None = None) -> Call[Deleted]:
    """Delete an adapter. Running requests finish; `undelete` restores it for a limited time."""
    return _change("DELETE", name, "", Deleted, None, if_match)


def delete_revision(name: str, number: int, *, if_match: str | None = None) -> Call[Revision]:
    """Delete one revision that no alias targets."""
    return _change("DELETE", name, f"/revisions/{number}", Revision, None, if_match)


def undelete(name: str, revision: int | None = None) -> Call[Adapter]:
    """Restore a deleted adapter with its revisions and aliases, or one deleted revision."""
    return replace(_change("POST", name, "/undelete", Adapter), params={"revision": revision})


def expire(name: str, seconds: int | None, *, if_match: str | None = None) -> Call[Adapter]:
    """Set the adapter to expire after a number of seconds, and then be deleted; None cancels the expiry."""
    return _change("PATCH", name, "", Adapter, {"ttl_s": seconds}, if_match)


def events(name: str | None = None, *, limit: int = 100, before: str | None = None) -> Flow[list[Event]]:
    """Return events of one adapter or of all, newest first. `before` is the id of the last event on the previous
    page.
    """
    return read_list("/v1/events", Listing[Event], adapter=name, limit=limit, before=before)


def requests(
    name: str, *, limit: int = 100, before: str | None = None, background: bool = True
) -> Flow[list[LoggedRequest]]:
    """Return your latest requests to an adapter, newest first, with the revision that answered each.

    `background` also includes lines of batches, evaluations and shadows.
    """
    return read_list(
        "/v1/requests", Listing[LoggedRequest], adapter=name, limit=limit, before=before, background=background
    )


def metrics(name: str, window: str = "24h") -> Flow[list[RevisionReport]]:
    """Return measures of each revision in a window (1h, 24h, 7d or 30d), from your own requests, newest first."""
    return read_list(_path(name, "/metrics"), Listing[RevisionReport], window=window)


def policy(name: str, alias: str = DEFAULT, *, revision: int | None = None) -> Call[Policy]:
    """Return the release policy of an alias. With `revision`, the answer has its checks of that revision."""
    return read(_path(name, _policy_path(alias)), Policy, revision=revision)


def set_policy(
    name: str, demands: Mapping[str, Any], alias: str = DEFAULT, *, if_match: str | None = None
) -> Call[Policy]:
    """Set the release policy of an alias, for example `{"min_requests": 500, "max_error_rate": 0.01}`. Releases that do
    not pass the policy are refused.
    """
    return _change("PUT", name, _policy_path(alias), Policy, {"policy": dict(demands)}, if_match)


def remove_policy(name: str, alias: str = DEFAULT, *, if_match: str | None = None) -> Call[Policy]:
    """Remove the release policy of an alias."""
    return _change("DELETE", name, _policy_path(alias), Policy, None, if_match)


def shadow(name: str) -> Call[Shadow]:
    """Return the adapter's newest shadow and its results."""
    return read(_path(name, "/shadow"), Shadow)


def shadows(name: str) -> Flow[list[Shadow]]:
    """Return the adapter's shadows, newest first."""
    return read_list(_path(name, "/shadow/history"), Listing[Shadow])


def start_shadow(
    name: str,
    revision: int,
    share: float,
    *,
    max_tokens_per_day: int = 1_000_000,
    keep_outputs: bool = False,
    if_match: str | None = None,
) -> Call[Shadow]:
    """Repeat a share of the adapter's requests on a revision, invisibly for callers, and compare the answers."""
    body = {
        "revision": revision,
        "share": share,
        "max_tokens_per_day": max_tokens_per_day,
        "keep_outputs": keep_outputs,
    }
    return _change("POST", name, "/shadow", Shadow, body, if_match)


def stop_shadow(name: str, *, if_match: str | None = None) -> Call[Shadow]:
    """End the adapter's shadow, and return its results."""
    return _change("DELETE", name, "/shadow", Shadow, None, if_match)


class Adapters(Resource[R]):
    """Calls of adapters: `client.adapters`."""

    list = method(list_adapters)
    training = method(list_training_adapters)
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
    metrics = method(metrics)
    policy = method(policy)
    set_policy = method(set_policy)
    remove_policy = method(remove_policy)
    shadow = method(shadow)
    shadows = method(shadows)
    start_shadow = method(start_shadow)
    stop_shadow = method(stop_shadow)


def _change(
    method: str, name: str, rest: str, answer: type[T], body: Any = None, if_match: str | None = None
) -> Call[T]:
    """Return a call with a new Idempotency-Key, so that a retry has no second effect."""
    headers = {"Idempotency-Key": uuid4().hex} | ({"If-Match": if_match} if if_match else {})
    return Call(method=method, path=_path(name, rest), answer=answer, body=body, headers=headers, repeatable=True)


def _policy_path(alias: str) -> str:
    return item_path("/aliases", alias) + "/policy"


def _path(name: str, rest: str = "") -> str:
    return item_path("/v1/adapters", name) + rest
