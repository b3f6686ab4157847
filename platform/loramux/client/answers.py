"""What the server answers. Times in Unix seconds; fields that a newer server adds are passed over."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

T = TypeVar("T")


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Anything that the server answers."""


class Listing(Answer, Generic[T], frozen=True, kw_only=True):
    """A whole list."""

    data: list[T]


class Target(Answer, frozen=True, kw_only=True):
    """A revision, and its share of an alias: `weight` of the sum over the alias's targets."""

    revision: int
    weight: int = 100


class Alias(Answer, frozen=True, kw_only=True):
    """A movable name for revisions."""

    name: str
    targets: list[Target]
    version: int = 0
    """The latest of its history."""
    updated_at: int | None = None


class AliasVersion(Answer, frozen=True, kw_only=True):
    """What an alias pointed at, from one change to the next."""

    version: int
    targets: list[Target]
    restores: int | None = None
    """The version that a rollback went back to."""
    changed_by: str | None = None
    changed_at: int | None = None


class Adapter(Answer, frozen=True, kw_only=True):
    """An adapter at its current revision."""

    id: str
    name: str
    """`tenant/adapter`: what goes into a request's `model`."""
    revision: int
    digest: str
    state: str
    rank: int
    size_bytes: int
    created_at: int
    aliases: list[Alias] = []
    etag: str | None = None
    """Give it as `if_match` to change the adapter only as it is now."""
    expires_at: int | None = None


class Pin(Answer, frozen=True, kw_only=True):
    """Since when a revision is kept in the pool."""

    since: int | None = None
    pinned_by: str | None = None
    used_at: int | None = None


class Revision(Answer, frozen=True, kw_only=True):
    """One of an adapter's revisions: immutable weights."""

    id: str
    name: str
    """`tenant/adapter@3`."""
    revision: int
    digest: str
    state: str
    rank: int
    size_bytes: int
    created_at: int
    deleted_at: int | None = None
    undo_until: int | None = None
    """Until then a deletion can be undone."""
    expires_at: int | None = None
    aliases: list[str] = []
    pin: Pin | None = None


class Grant(Answer, frozen=True, kw_only=True):
    """A tenant that may call somebody else's adapter."""

    tenant: str
    granted_by: str | None = None
    granted_at: int | None = None


class Failure(Answer, frozen=True, kw_only=True):
    """An event's reason."""

    code: str
    message: str
    param: str | None = None


class EventData(Answer, frozen=True, kw_only=True):
    """What happened, and to which adapter."""

    adapter: str
    revision: int | None = None
    model: str | None = None
    digest: str | None = None
    upload: str | None = None
    error: Failure | None = None


class Event(Answer, frozen=True, kw_only=True):
    """Something that happened to an adapter."""

    id: str
    type: str
    created_at: int
    data: EventData


class LoggedRequest(Answer, frozen=True, kw_only=True):
    """A request that an adapter answered."""

    id: str
    model: str
    """The revision that answered."""
    digest: str
    api_key_id: str
    status: str
    """open, settled or interrupted."""
    prompt_tokens: int
    created_at: int
    settled_at: int | None = None


class Webhook(Answer, frozen=True, kw_only=True):
    """An address that is told what happens; `secret` only from the call that made it."""

    id: str
    url: str
    events: list[str]
    enabled: bool
    created_at: int
    disabled_because: str | None = None
    failing_since: int | None = None
    secret: str | None = None


class WebhookTest(Answer, frozen=True, kw_only=True):
    """How telling a webhook that it can be told went."""

    delivered: bool
    status: int | None = None
    error: str | None = None
    milliseconds: int


class Delivery(Answer, frozen=True, kw_only=True):
    """What became of telling a webhook of an event."""

    event: Event
    state: str
    attempts: int
    status: int | None = None
    error: str | None = None
    next_attempt_at: int | None = None


class UsageResult(Answer, frozen=True, kw_only=True):
    """A sum; what it is not grouped by is None."""

    input_tokens: int
    output_tokens: int
    input_cached_tokens: int = 0
    num_model_requests: int
    model: str | None = None
    api_key_id: str | None = None
    project_id: str | None = None


class UsageBucket(Answer, frozen=True, kw_only=True):
    """What was used in a span of time."""

    start_time: int
    end_time: int
    results: list[UsageResult]


class UsagePage(Answer, frozen=True, kw_only=True):
    """Some of the buckets."""

    data: list[UsageBucket]
    next_page: str | None = None


class Gone(Answer, frozen=True, kw_only=True):
    """What is no more."""

    deleted: bool = True
