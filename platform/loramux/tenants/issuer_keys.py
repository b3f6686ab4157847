"""An OIDC issuer's public keys: found by discovery, kept for a while, asked for again with restraint."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
from joserfc.errors import JoseError
from joserfc.jwk import KeySet

DISCOVERY = "/.well-known/openid-configuration"
MAX_DOCUMENT_BYTES = 256 << 10
MAX_KEYS = 64
FRESH_SECONDS = 3600.0
STALE_SECONDS = 86_400.0
"""For so long the keys are believed while the issuer does not answer."""
RETRY_SECONDS = 10.0
"""Between two questions to the issuer, whatever tokens with unknown keys come."""


class IssuerUnreachable(Exception):
    """The issuer's keys cannot be had."""


class IssuerKeys:
    """One issuer's. Concurrent callers share one question."""

    def __init__(self, issuer: str, http: httpx.AsyncClient) -> None:
        self._issuer = issuer
        self._http = http
        self._keys: KeySet | None = None
        self._fetched_at = 0.0
        self._asked_at = float("-inf")
        self._lock = asyncio.Lock()

    async def current(self) -> KeySet:
        """The keys, an hour old at most; a day while the issuer is silent. Raises IssuerUnreachable."""
        if self._keys is None or time.monotonic() - self._fetched_at > FRESH_SECONDS:
            return await self.refreshed()
        return self._keys

    async def refreshed(self) -> KeySet:
        """The keys, asked for anew unless that was done moments ago. Raises IssuerUnreachable."""
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

    def _demand_usable(self, error: Exception) -> None:
        if self._keys is None or time.monotonic() - self._fetched_at > STALE_SECONDS:
            self._keys = None
            raise IssuerUnreachable(f"{self._issuer} gives no keys ({type(error).__name__})") from error

    async def _fetch(self) -> KeySet:
        described = await self._document(self._issuer.rstrip("/") + DISCOVERY)
        if described["issuer"] != self._issuer:
            raise ValueError("the discovery document is another issuer's")
        url = str(described["jwks_uri"])
        if not url.startswith("https://") and self._issuer.startswith("https://"):
            raise ValueError("jwks_uri is not https")
        found = await self._document(url)
        keys = found["keys"]
        if not isinstance(keys, list) or len(keys) > MAX_KEYS or not all(isinstance(key, dict) for key in keys):
            raise ValueError(f"no list of at most {MAX_KEYS} keys")
        public = [key for key in keys if key.get("kty") != "oct" and key.get("use", "sig") == "sig"]
        return KeySet.import_key_set({"keys": public})

    async def _document(self, url: str) -> dict[str, Any]:
        async with self._http.stream("GET", url) as response:
            response.raise_for_status()
            body = bytearray()
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > MAX_DOCUMENT_BYTES:
                    raise ValueError(f"{url} is longer than {MAX_DOCUMENT_BYTES} bytes")
        document = httpx.Response(200, content=bytes(body)).json()
        if not isinstance(document, dict):
            raise TypeError(f"{url} is no JSON object")
        return document
