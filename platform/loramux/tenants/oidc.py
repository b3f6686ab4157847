"""People's bearer tokens: JWTs of the OIDC issuers that the settings name."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence

import httpx
import msgspec
from joserfc import jwt
from joserfc.errors import InvalidKeyIdError, JoseError

from loramux.settings import IssuerSettings
from loramux.tenants.errors import InvalidKey
from loramux.tenants.issuer_keys import IssuerKeys, IssuerUnreachable

MAX_TOKEN_LENGTH = 16_384
LEEWAY_SECONDS = 60
FIELD = "authorization"


class Person(msgspec.Struct, frozen=True):
    """Whom a token speaks of."""

    issuer: str
    subject: str
    is_operator: bool
    """By the issuer's word, as the settings ask for it."""


class TokenVerifier:
    """Checks signature, issuer, audience and times of tokens."""

    def __init__(self, issuers: Sequence[IssuerSettings]) -> None:
        self._http = httpx.AsyncClient(timeout=5, follow_redirects=False, trust_env=False)
        self._issuers = {one.issuer: (one, IssuerKeys(one.issuer, self._http)) for one in issuers}

    async def aclose(self) -> None:
        """Close the connections to the issuers."""
        await self._http.aclose()

    async def verify(self, token: str) -> Person:
        """Who the token speaks of. Raises InvalidKey, which says what is wrong with it."""
        known = self._issuers.get(_claimed_issuer(token))
        if known is None:
            raise InvalidKey("the token is of no issuer that this server trusts", FIELD)
        issuer, keys = known
        try:
            claims = await _verified_claims(token, issuer, keys)
        except (JoseError, ValueError) as error:
            raise InvalidKey(f"the token is not valid: {str(error)[:200]}", FIELD) from None
        except IssuerUnreachable as error:
            raise InvalidKey(f"the token cannot be checked now: {error}; try again", FIELD) from None
        return Person(issuer.issuer, _identity(claims, issuer.identity_claim), _is_operator(claims, issuer))


def looks_like_token(secret: str) -> bool:
    """Whether it is a JWT by its form: keys have no dots."""
    return secret.count(".") == 2 and len(secret) <= MAX_TOKEN_LENGTH and secret.isascii()


async def _verified_claims(token: str, issuer: IssuerSettings, keys: IssuerKeys) -> dict[str, object]:
    """The claims behind a signature that holds; a key that is not known yet is asked for once."""
    try:
        decoded = jwt.decode(token, await keys.current(), algorithms=issuer.algorithms)
    except InvalidKeyIdError:
        decoded = jwt.decode(token, await keys.refreshed(), algorithms=issuer.algorithms)
    jwt.JWTClaimsRegistry(
        leeway=LEEWAY_SECONDS,
        iss={"essential": True, "value": issuer.issuer},
        aud={"essential": True, "value": issuer.audience},
        exp={"essential": True},
    ).validate(decoded.claims)
    return decoded.claims


def _claimed_issuer(token: str) -> str:
    """Unverified: only to know whose keys to check it with."""
    payload = token.split(".")[1]
    try:
        claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    except ValueError:
        return ""
    issuer = claims.get("iss") if isinstance(claims, dict) else None
    return issuer if isinstance(issuer, str) else ""


def _is_operator(claims: dict[str, object], issuer: IssuerSettings) -> bool:
    told = claims.get(issuer.operator_claim)
    values = told if isinstance(told, list) else [told]
    return any(value in issuer.operators for value in values if isinstance(value, str))


def _identity(claims: dict[str, object], claim: str) -> str:
    identity = claims.get(claim)
    if not isinstance(identity, str) or not identity:
        raise InvalidKey(f"the token has no claim '{claim}', which says who you are", FIELD)
    if claim == "email" and claims.get("email_verified") is not True:
        raise InvalidKey("the token's e-mail address is not verified", FIELD)
    return identity
