"""Invalid credentials at a constant cost: no statement in the database, bounded memory, no lock-out of valid keys.

A secret of this release ends with a tag under the pepper, so an invented one is refused by arithmetic. A secret of an
older release has no tag: those that exist are known by a prefix of their MACs, which is read incrementally, at most
once a second. A revoked key is remembered as such, for revocation is final. What passes all three is looked up.

Failures are counted by client address. An address with too many gets 429 instead of 401, but only for credentials that
are invalid: a valid key from the same address (an office, a proxy) is never affected.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections import OrderedDict

from loramux.records import Database
from loramux.records.keys import CredentialRepository
from loramux.tenants.errors import InvalidKey, TooManyFailures
from loramux.tenants.secrets import has_tag, is_secret, mac
from loramux.units import MINUTE, SECOND

MAX_REVOKED = 10_000
"""Revoked keys that are remembered; the least recently shown are forgotten first."""
MAX_ADDRESSES = 10_000
"""Addresses whose failures are counted; those that failed least recently are forgotten first."""
MAX_FAILURES = 300
"""Failures that an address may have in a row; one is forgiven every second."""
PREFIX_BYTES = 8
REFRESH = SECOND
OVERLAP = MINUTE
"""Clocks of servers differ, and a transaction commits after its rows' times: so much is read again each time."""

logger = logging.getLogger(__name__)


class FailedAttempts:
    """Failed authentications by client address."""

    def __init__(self) -> None:
        self._free_at: OrderedDict[str, int] = OrderedDict()
        """The instant at which all of an address's failures are forgiven, in microseconds."""

    def fail(self, address: str, now: int, why: InvalidKey) -> InvalidKey | TooManyFailures:
        """Count a failure; return the error to raise: `why`, or TooManyFailures."""
        network = _network(address)
        free_at = max(now, self._free_at.pop(network, now)) + SECOND
        exceeded = free_at - now > MAX_FAILURES * SECOND
        if exceeded and free_at - now <= (MAX_FAILURES + 1) * SECOND:
            logger.warning("%s has sent %d invalid credentials in a row", network, MAX_FAILURES)
        self._free_at[network] = min(free_at, now + (MAX_FAILURES + 10) * SECOND)
        while len(self._free_at) > MAX_ADDRESSES:
            self._free_at.popitem(last=False)
        if not exceeded:
            return why
        return TooManyFailures(
            f"{why.message}. Your address has sent many invalid credentials: check the key before you retry.",
            why.field,
        )


class KnownKeys:
    """Decides whether a secret can belong to a key, without the database wherever that is possible."""

    def __init__(self, database: Database, pepper: bytes) -> None:
        self._database = database
        self._pepper = pepper
        self._revoked: OrderedDict[bytes, None] = OrderedDict()
        self._untagged: set[bytes] = set()
        """MAC prefixes of all keys, for secrets without a tag."""
        self._read_up_to = 0
        self._read_at: int | None = None
        self._lock = asyncio.Lock()

    async def possible_mac(self, secret: str) -> bytes | None:
        """Return the MAC to look up; None where no valid key has this secret."""
        if not is_secret(secret):
            return None
        tagged, digest = has_tag(self._pepper, secret), mac(self._pepper, secret)
        if tagged is False:
            return None
        if digest in self._revoked:
            self._revoked.move_to_end(digest)
            return None
        if tagged is None and digest[:PREFIX_BYTES] not in self._untagged:
            await self._read_new()
            return digest if digest[:PREFIX_BYTES] in self._untagged else None
        return digest

    def remember_revoked(self, digest: bytes) -> None:
        """Remember that no valid key has this MAC, nor ever will."""
        self._revoked[digest] = None
        while len(self._revoked) > MAX_REVOKED:
            self._revoked.popitem(last=False)

    async def _read_new(self) -> None:
        async with self._lock:
            now = self._database.now()
            if self._read_at is not None and 0 <= now - self._read_at < REFRESH:
                return
            async with self._database.read() as session:
                macs = await CredentialRepository(session).macs_since(self._read_up_to)
            self._untagged |= {one[:PREFIX_BYTES] for one in macs}
            self._read_at, self._read_up_to = now, max(0, now - OVERLAP)


def _network(address: str) -> str:
    """Return the address, or the /64 network of an IPv6 one: a client has as many of those as it likes."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address[:64]
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((parsed, 64), strict=False))
    return str(parsed)
