"""Tokens of the OIDC issuers that the settings name: members' bearer tokens, and ID tokens of sign-ins."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Sequence
from typing import Any

import httpx
import msgspec
from joserfc import jwt
from joserfc.errors import InvalidKeyIdError, JoseError
from joserfc.jwk import KeySet

from loramux.settings import IssuerSettings
from loramux.tenants.errors import InvalidKey

MAX_TOKEN_LENGTH = 16_384
LEEWAY_SECONDS = 60
FIELD = "authorization"

DISCOVERY = "/.well-known/openid-configuration"
MAX_DOCUMENT_BYTES = 256 << 10
MAX_KEYS = 64
FRESH_SECONDS = 3600.0
STALE_SECONDS = 86_400.0
"""The time for which known keys stay valid while the issuer does not answer."""
RETRY_SECONDS = 10.0
"""The least time between two requests to the issuer, however many tokens with unknown keys arrive."""


class Person(msgspec.Struct, frozen=True):
    """The person that a token identifies."""

    issuer: str
    subject: str
    is_operator: bool
    """The issuer's claim has one of the values that the settings name."""


class TokenVerifier:
    """Checks signature, issuer, audience and times of tokens."""

    def __init__(self, issuers: Sequence[IssuerSettings]) -> None:
        self._http = httpx.AsyncClient(timeout=5, follow_redirects=False, trust_env=False)
        self._issuers = {one.issuer: (one, IssuerKeys(one.issuer, self._http)) for one in issuers}

    async def aclose(self) -> None:
        """Close the connections to the issuers."""
        await self._http.aclose()

    async def verify(self, token: str) -> Person:
        """Return the person that the token identifies. Raises InvalidKey, which says what is wrong with it."""
        known = self._issuers.get(_claimed_issuer(token))
        if known is None:
            raise InvalidKey("the token is of no issuer that this server trusts", FIELD)
        return await _person(token, *known, known[0].audience)

    async def verify_id_token(self, issuer: str, token: str, client: str, nonce: str) -> Person:
        """Return the person that signed in at the issuer for `client`, with `nonce`. Raises InvalidKey."""
        return await _person(token, *self._issuers[issuer], client, nonce)

    async def endpoints(self, issuer: str) -> dict[str, str]:
        """Return the issuer's addresses by their names in its discovery document. Raises IssuerUnreachable."""
        return await self._issuers[issuer][1].endpoints()


def looks_like_token(secret: str) -> bool:
    """Return whether the secret has the form of a JWT: keys have no dots."""
    return secret.count(".") == 2 and len(secret) <= MAX_TOKEN_LENGTH and secret.isascii()


async def _person(
    token: str, issuer: IssuerSettings, keys: IssuerKeys, audience: str, nonce: str | None = None
) -> Person:
    try:
        claims = await _verified_claims(token, issuer, keys, audience, nonce)
    except (JoseError, ValueError, RecursionError) as error:  # any sender can write a deeply nested header
        raise InvalidKey(f"the token is not valid: {str(error)[:200]}", FIELD) from None
    except IssuerUnreachable as error:
        raise InvalidKey(f"the token cannot be checked now: {error}; try again", FIELD) from None
    return Person(issuer.issuer, _identity(claims, issuer.identity_claim), _is_operator(claims, issuer))


async def _verified_claims(
    token: str, issuer: IssuerSettings, keys: IssuerKeys, audience: str, nonce: str | None
) -> dict[str, object]:
    """Return the claims behind a valid signature; an unknown key is fetched once."""
    try:
        decoded = jwt.decode(token, await keys.current(), algorithms=issuer.algorithms)
    except InvalidKeyIdError:
        decoded = jwt.decode(token, await keys.refreshed(), algorithms=issuer.algorithms)
    jwt.JWTClaimsRegistry(
        leeway=LEEWAY_SECONDS,
        iss={"essential": True, "value": issuer.issuer},
        aud={"essential": True, "value": audience},
        exp={"essential": True},
    ).validate(decoded.claims)
    if nonce is not None and decoded.claims.get("nonce") != nonce:
        raise ValueError("the token answers another sign-in (nonce)")
    if nonce is not None and decoded.claims.get("azp", audience) != audience:
        raise ValueError("the token was given to another client (azp)")
    return decoded.claims


def _claimed_issuer(token: str) -> str:
    """Return the unverified issuer, which selects the keys to verify the token with."""
    payload = token.split(".")[1]
    try:
        claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    except (ValueError, RecursionError):
        return ""
    issuer = claims.get("iss") if isinstance(claims, dict) else None
    return issuer if isinstance(issuer, str) else ""


def _is_operator(claims: dict[str, object], issuer: IssuerSettings) -> bool:
    claimed = claims.get(issuer.operator_claim)
    values = claimed if isinstance(claimed, list) else [claimed]
    return any(value in issuer.operators for value in values if isinstance(value, str))


def _identity(claims: dict[str, object], claim: str) -> str:
    identity = claims.get(claim)
    if not isinstance(identity, str) or not identity:
        raise InvalidKey(f"the token has no claim '{claim}', which says who you are", FIELD)
    if claim == "email" and claims.get("email_verified") is not True:
        raise InvalidKey("the token's e-mail address is not verified", FIELD)
    return identity


class IssuerUnreachable(Exception):
    """The issuer's keys cannot be fetched."""


class IssuerKeys:
    """One issuer's public keys. Concurrent callers share one fetch."""

    def __init__(self, issuer: str, http: httpx.AsyncClient) -> None:
        self._issuer = issuer
        self._http = http
        self._keys: KeySet | None = None
        self._endpoints: dict[str, str] = {}
        self._fetched_at = 0.0
        self._asked_at = float("-inf")
        self._lock = asyncio.Lock()

    async def current(self) -> KeySet:
        """Return the keys, an hour old at most; a day while the issuer does not answer. Raises IssuerUnreachable."""
        if self._keys is None or time.monotonic() - self._fetched_at > FRESH_SECONDS:
            return await self.refreshed()
        return self._keys

    async def refreshed(self) -> KeySet:
        """Fetch the keys again unless that was done moments ago. Raises IssuerUnreachable."""
        async with self._lock:
            if time.monotonic() - self._asked_at >= RETRY_SECONDS:
                self._asked_at = time.monotonic()
                try:
                    self._keys = await self._fetch()
                    self._fetched_at = time.monotonic()
                except (httpx.HTTPError, httpx.InvalidURL, JoseError, ValueError, KeyError, TypeError) as error:
                    self._demand_usable(error)
            if self._keys is None:
                raise IssuerUnreachable(f"{self._issuer} did not answer a moment ago")
            return self._keys

    async def endpoints(self) -> dict[str, str]:
        """Return the addresses of the discovery document, as old as the keys. Raises IssuerUnreachable."""
        await self.current()
        return self._endpoints

    def _demand_usable(self, error: Exception) -> None:
        if self._keys is None or time.monotonic() - self._fetched_at > STALE_SECONDS:
            self._keys = None
            raise IssuerUnreachable(f"{self._issuer} gives no keys ({type(error).__name__})") from error

    async def _fetch(self) -> KeySet:
        described = await self._document(self._issuer.rstrip("/") + DISCOVERY)
        if described["issuer"] != self._issuer:
            raise ValueError("the discovery document is another issuer's")
        addresses = {name: str(url) for name, url in described.items() if name.endswith(("_endpoint", "_uri"))}
        if self._issuer.startswith("https://"):
            addresses = {name: url for name, url in addresses.items() if url.startswith("https://")}
        found = await self._document(addresses["jwks_uri"])
        keys = found["keys"]
        if not isinstance(keys, list) or len(keys) > MAX_KEYS or not all(isinstance(key, dict) for key in keys):
            raise ValueError(f"no list of at most {MAX_KEYS} keys")
        public = [key for key in keys if key.get("kty") != "oct" and key.get("use", "sig") == "sig"]
        imported = KeySet.import_key_set({"keys": public})
        self._endpoints = addresses
        return imported

    async def _document(self, url: str) -> dict[str, Any]:
        async with self._http.stream("GET", url) as response:
            response.raise_for_status()
            return await json_object(response)


async def json_object(response: httpx.Response) -> dict[str, Any]:
    """Read an issuer's answer, of limited length. Raises ValueError, TypeError."""
    body = bytearray()
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) > MAX_DOCUMENT_BYTES:
            raise ValueError(f"{response.url} is longer than {MAX_DOCUMENT_BYTES} bytes")
    document = json.loads(bytes(body))
    if not isinstance(document, dict):
        raise TypeError(f"{response.url} is no JSON object")
    return document
