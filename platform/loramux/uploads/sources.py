"""Where the server fetches an adapter by itself: what callers write, and what of it the settings allow."""

from __future__ import annotations

import re

import msgspec

from loramux.records import Principal
from loramux.settings import BucketSettings, HubSettings, UploadSettings
from loramux.uploads.errors import InvalidUpload
from loramux.uploads.refusals import UploadRejected

_path = re.compile(r"(?:[A-Za-z0-9_=-][A-Za-z0-9._=-]*/)*")
_repo = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,95}(?:/[A-Za-z0-9_-][A-Za-z0-9._-]{0,95})?")
_commit = re.compile("[0-9a-f]{40}")


class BucketSource(msgspec.Struct, frozen=True, kw_only=True, tag="bucket"):
    """A folder in an object store."""

    url: str
    """s3://bucket/path/"""


class HubSource(msgspec.Struct, frozen=True, kw_only=True, tag="hub"):
    """A repository of a model hub, at one commit."""

    hub: str
    repo: str
    commit: str


Source = BucketSource | HubSource


def check_source(source: Source, principal: Principal, settings: UploadSettings) -> Source:
    """The source as it will be fetched. Raises InvalidUpload where the settings do not allow it."""
    if isinstance(source, BucketSource):
        source = BucketSource(url=source.url.removesuffix("/") + "/")
        if bucket_of(source, principal.tenant_name, settings) is None:
            raise InvalidUpload(
                "adapters are not fetched from there; the operator lists the places (uploads.buckets), and a path "
                "is folders of letters, digits, '.', '_', '=' and '-'",
                "source.url",
            )
        return source
    if hub_of(source, settings) is None:
        known = ", ".join(hub.name for hub in settings.hubs) or "none at present"
        raise InvalidUpload(f"no such hub; the operator has listed: {known} (uploads.hubs)", "source.hub")
    if not _repo.fullmatch(source.repo) or ".." in source.repo:
        raise InvalidUpload("a repository is NAME or OWNER/NAME", "source.repo")
    if not _commit.fullmatch(source.commit):
        raise InvalidUpload(
            "a commit is its 40 hexadecimal digits: branches and tags move, and what is served must not",
            "source.commit",
        )
    return source


def bucket_of(source: BucketSource, tenant_name: str, settings: UploadSettings) -> BucketSettings | None:
    """The listed place in which the folder lies."""
    for bucket in settings.buckets:
        place = bucket.url.replace("{tenant}", tenant_name)
        path = source.url.removeprefix(place)
        if source.url.startswith(place) and _path.fullmatch(path) and ".." not in path:
            return bucket
    return None


def hub_of(source: HubSource, settings: UploadSettings) -> HubSettings | None:
    """The listed hub of that name."""
    return next((hub for hub in settings.hubs if hub.name == source.hub), None)


def not_listed_any_more() -> UploadRejected:
    """The settings have changed since the upload was opened."""
    return UploadRejected("source_not_allowed", "source", "Adapters are not fetched from there any more.")


def encode_source(source: Source) -> str:
    """As the records keep it."""
    return msgspec.json.encode(source).decode()


def decode_source(text: str) -> Source:
    """What `encode_source` wrote."""
    return msgspec.json.decode(text, type=Source)
