"""From where a server can fetch an adapter by itself; its operator lists the places."""

from __future__ import annotations

import re

import msgspec

_hub = re.compile(r"(?P<hub>[a-z0-9][a-z0-9-]*):(?P<repo>[^@:/]+/[^@]+)@(?P<commit>[0-9a-f]{40})")


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """A folder of an object store: `s3://bucket/path/`."""

    url: str


class Hub(msgspec.Struct, frozen=True, kw_only=True):
    """A repository of a model hub, at one commit."""

    hub: str
    """As the server's settings name it."""
    repo: str
    """`owner/name`."""
    commit: str
    """All its 40 hexadecimal digits: a branch would be another adapter tomorrow."""


def read_source(text: str) -> Bucket | Hub | None:
    """`s3://bucket/path/`, or `hub:owner/name@commit`; None where it is neither."""
    if "://" in text:
        return Bucket(url=text)
    found = _hub.fullmatch(text)
    return None if found is None else Hub(**found.groupdict())
