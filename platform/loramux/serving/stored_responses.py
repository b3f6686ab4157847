"""Responses that later requests refer to. Stored responses are encrypted, belong to one tenant and project, and have an
expiry and bounds.

The API defines the content: two JSON texts, whose fields this module does not know. A later request renders `items`
before its own input; `content` is the rest of the response. Data that was encrypted with another pepper counts as
deleted.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from loramux.common.encryption import Encryption
from loramux.common.identity import Principal
from loramux.common.jobs import TenantSlots
from loramux.common.settings.server import PrivacySettings
from loramux.common.units import SECOND
from loramux.data.entities import StoredResponse
from loramux.data.records.base import Viewpoint
from loramux.data.records.database import Database
from loramux.data.records.errors import RecordsError
from loramux.data.records.responses import ResponseRepository, remove_expired_responses
from loramux.data.records.tenants import TenantRepository, lock_tenant
from loramux.serving.checks import ensure_storage_allowed
from loramux.serving.errors import InvalidRequest, PreviousResponseNotFound, ResponseNotFound

MAX_BYTES = 16 << 20
"""Maximum bytes of one stored response."""
MAX_TURNS = 4096
"""Maximum length of a chain of responses that continue each other."""
READS, READS_PER_TENANT = 32, 4
"""Maximum number of histories that are read at a time, because a short request may refer to megabytes."""
SWEEP = 1000
"""Responses that are deleted in one transaction."""

logger = logging.getLogger(__name__)


class ResponseText(NamedTuple):
    """A stored response, decrypted: two JSON texts."""

    items: bytes
    content: bytes


class ResponseStore:
    """Stored responses of every tenant; each caller sees the responses of its project."""

    def __init__(self, database: Database, pepper: bytes, settings: PrivacySettings) -> None:
        self.reads = TenantSlots(READS, READS_PER_TENANT)
        """Held while a history is read and decoded."""
        self._database = database
        self._settings = settings
        self._encryption = Encryption(pepper, b"stored responses")

    @property
    def is_on(self) -> bool:
        """Does this server store responses?"""
        return self._settings.response_seconds > 0

    def stores(self, principal: Principal, asked: bool | None) -> bool:
        """Return whether a response is stored, by the request's field or, without it, by the default. Raises
        NotAllowed.
        """
        if asked:
            ensure_storage_allowed(principal, "store")
        return self.is_on and asked is not False and not principal.zero_retention

    async def add(
        self, principal: Principal, id: str, previous_id: str | None, response: ResponseText, *, created: int
    ) -> bool:
        """Store a response, created at `created` Unix seconds; return whether it is stored.

        A response is not stored if it is too large, if the tenant got zero retention in the meantime, or if the
        database does not accept it. The caller gets its answer in all cases.
        """
        if len(response.items) + len(response.content) > MAX_BYTES:
            return False
        items = self._encryption.encrypt(response.items, _owner(principal, id, "items"))
        content = self._encryption.encrypt(response.content, _owner(principal, id, "content"))
        row = StoredResponse(
            id=id,
            project_id=principal.project,
            owner=principal.owner,
            previous_id=previous_id,
            items=items,
            items_size=len(items),
            content=content,
            size=len(items) + len(content),
            created_at=created * SECOND,
            expires_at=self._database.now() + self._settings.response_seconds * SECOND,
        )
        most, most_bytes = self._settings.responses_per_tenant, self._settings.response_bytes_per_tenant
        try:
            async with self._database.begin() as session:
                await lock_tenant(
                    session, principal.tenant
                )  # zero retention begins either before this lock or after the commit
                if await TenantRepository(session).has_zero_retention(principal.tenant):
                    return False
                await ResponseRepository(session, principal.tenant).add(row, most, most_bytes)
        except RecordsError as error:
            logger.warning("the response %s is not stored: %s", id, error)
            return False
        return True

    async def get(self, principal: Principal, id: str) -> ResponseText:
        """Return a response. Raises ResponseNotFound."""
        async with self._database.read() as session:
            responses = ResponseRepository(session, principal.tenant)
            found = await responses.get(id, Viewpoint.of(principal), self._database.now())
        if found is None:
            raise ResponseNotFound(id)
        items = self._encryption.decrypt(found.items, _owner(principal, id, "items"))
        content = self._encryption.decrypt(found.content, _owner(principal, id, "content"))
        if items is None or content is None:
            raise ResponseNotFound(id)
        return ResponseText(items, content)

    async def delete(self, principal: Principal, id: str) -> None:
        """Delete a response. Raises ResponseNotFound."""
        async with self._database.begin() as session:
            responses = ResponseRepository(session, principal.tenant)
            if not await responses.remove(id, Viewpoint.of(principal), self._database.now()):
                raise ResponseNotFound(id)

    async def history(self, principal: Principal, id: str, most_bytes: int) -> list[bytes]:
        """Return the items of a response and of the responses that it continues, oldest first.

        Raises PreviousResponseNotFound if one of these responses was deleted, and InvalidRequest if the items exceed
        `most_bytes`.
        """
        seen, now = Viewpoint.of(principal), self._database.now()
        async with self._database.read() as session:
            responses = ResponseRepository(session, principal.tenant)
            links = await responses.chain(id, seen, now, MAX_TURNS)
            if not links:
                raise PreviousResponseNotFound(id)
            if links[-1].previous_id is not None:
                if len(links) == MAX_TURNS:
                    raise _too_long(f"more than {MAX_TURNS} responses")
                raise PreviousResponseNotFound(links[-1].previous_id)
            _bound((link.items_size for link in links), most_bytes)
            found = await responses.items([link.id for link in links], seen, now)
        items = [self._decrypted(principal, link.id, found) for link in reversed(links)]
        missing = next((link.id for link, one in zip(reversed(links), items, strict=True) if one is None), None)
        if missing is not None:
            raise PreviousResponseNotFound(missing)
        return [one for one in items if one is not None]

    async def items(self, principal: Principal, ids: Collection[str], most_bytes: int) -> dict[str, bytes]:
        """Return the stored items among `ids`. Raises InvalidRequest beyond `most_bytes`."""
        seen, now = Viewpoint.of(principal), self._database.now()
        async with self._database.read() as session:
            responses = ResponseRepository(session, principal.tenant)
            _bound((await responses.sizes(ids, seen, now)).values(), most_bytes)
            found = await responses.items(ids, seen, now)
        decrypted = {id: self._decrypted(principal, id, found) for id in found}
        return {id: items for id, items in decrypted.items() if items is not None}

    async def forget_expired(self) -> None:
        """Delete expired responses."""
        while True:
            async with self._database.begin() as session:
                if await remove_expired_responses(session, self._database.now(), SWEEP) < SWEEP:
                    return

    def _decrypted(self, principal: Principal, id: str, found: Mapping[str, bytes]) -> bytes | None:
        return self._encryption.decrypt(found[id], _owner(principal, id, "items"))


def _owner(principal: Principal, id: str, part: str) -> str:
    return f"{principal.tenant}/{id}/{part}"


def _bound(sizes: Iterable[int], most_bytes: int) -> None:
    if (total := sum(sizes)) > most_bytes:
        raise _too_long(f"{total} bytes; the most is {most_bytes}")


def _too_long(size: str) -> InvalidRequest:
    return InvalidRequest(
        f"The stored responses that this request refers to have {size}. Begin a new conversation, with a summary for "
        "instance.",
        field="previous_response_id",
        code="context_length_exceeded",
    )
