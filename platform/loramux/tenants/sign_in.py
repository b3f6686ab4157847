"""Sign-in to the console at an OIDC issuer: authorization code with PKCE, which the server redeems itself.

The browser that begins gets a secret in a cookie. State, nonce and PKCE verifier are MACs of that secret under the
pepper, for one issuer. So nothing is stored, any server of a deployment can finish what another began, an answer of
one issuer does not pass as another's, and a callback counts only in the browser that began, within ten minutes.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
import secrets
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote, urlencode, urlsplit

import httpx
import msgspec

from loramux.records import Database, Origin, Principal
from loramux.records.identity import is_name
from loramux.records.keys import CredentialRepository
from loramux.settings import IssuerSettings, SettingsError, SignInSettings
from loramux.tenants.authentication import principal_of_member
from loramux.tenants.errors import (
    IssuerDown,
    NotAMember,
    SeveralTenants,
    SignInDenied,
    SignInExpired,
    SignInRefused,
)
from loramux.tenants.keys import DEFAULT_PROJECT
from loramux.tenants.oidc import IssuerUnreachable, Person, TokenVerifier, json_object
from loramux.units import SECOND

CALLBACK = "/console/oidc/callback"
SIGN_IN_SECONDS = 600
MAX_CODE_LENGTH = 4096
TIMEOUT_SECONDS = 10

logger = logging.getLogger(__name__)


class Provider(msgspec.Struct, frozen=True):
    """An issuer at which people sign in."""

    issuer: str
    label: str


class BegunSignIn(msgspec.Struct, frozen=True):
    """The issuer's page, and the secret that the browser keeps until it is back."""

    location: str
    secret: str


class Callback(msgspec.Struct, frozen=True, kw_only=True):
    """What the issuer's redirect says."""

    state: str
    code: str
    issuer: str | None
    """RFC 9207; issuers may leave it out."""
    error: str | None


class SignIns:
    """Sends browsers to issuers, and receives them."""

    def __init__(
        self, database: Database, pepper: bytes, verifier: TokenVerifier, issuers: Sequence[IssuerSettings], url: str
    ) -> None:
        self._database = database
        self._pepper = pepper
        self._verifier = verifier
        self._http = httpx.AsyncClient(timeout=TIMEOUT_SECONDS, follow_redirects=False, trust_env=False)
        self._clients = {one.issuer: one.sign_in for one in issuers if one.sign_in is not None}
        self._secrets = {issuer: _secret_of(issuer, client) for issuer, client in self._clients.items()}
        self._url = url.rstrip("/")

    async def aclose(self) -> None:
        """Close the connections to token endpoints."""
        await self._http.aclose()

    @property
    def url(self) -> str:
        """The server's address as browsers see it."""
        return self._url

    @property
    def providers(self) -> list[Provider]:
        """The issuers at which people sign in."""
        return [Provider(issuer, one.label or urlsplit(issuer).netloc) for issuer, one in self._clients.items()]

    async def begin(self, issuer: str, tenant: str | None) -> BegunSignIn:
        """Return the issuer's page to go to. Raises SignInRefused.

        `tenant`: the one that a person with several memberships has chosen.
        """
        client = self._clients.get(issuer)
        if client is None or (tenant is not None and not is_name(tenant)):
            raise SignInRefused("this server has no sign-in at that issuer, or no tenant can have that name", "issuer")
        ends = self._database.now() // SECOND + SIGN_IN_SECONDS
        secret = f"{ends}.{secrets.token_urlsafe(24)}.{tenant or ''}"
        page = await self._endpoint(issuer, "authorization_endpoint")
        query = {
            "response_type": "code",
            "client_id": client.client_id,
            "redirect_uri": self._url + CALLBACK,
            "scope": " ".join(dict.fromkeys(("openid", *client.scopes))),
            "state": self._mac("state", issuer, secret),
            "nonce": self._mac("nonce", issuer, secret),
            "code_challenge": _challenge(self._mac("verifier", issuer, secret)),
            "code_challenge_method": "S256",
        }
        return BegunSignIn(f"{page}{'&' if '?' in page else '?'}{urlencode(query)}", secret)

    async def finish(self, secret: str, callback: Callback, origin: Origin) -> tuple[Principal, bool]:
        """Return the member that has signed in, and whether the issuer says operator.

        Raises SignInRefused, InvalidKey and TenantSuspended.
        """
        issuer = self._issuer_of(secret, callback)
        if callback.error is not None or not 0 < len(callback.code) <= MAX_CODE_LENGTH:
            raise SignInDenied("the identity provider did not sign you in")
        token = await self._redeem(issuer, callback.code, self._mac("verifier", issuer, secret))
        nonce, client = self._mac("nonce", issuer, secret), self._clients[issuer].client_id
        person = await self._verifier.verify_id_token(issuer, token, client, nonce)
        tenant = secret.rpartition(".")[2]
        return await self._member(person, tenant, origin), person.is_operator

    def _issuer_of(self, secret: str, callback: Callback) -> str:
        """Return the issuer whose answer this browser awaits. Raises SignInRefused."""
        ends = secret.partition(".")[0]
        if ends.isascii() and ends.isdigit() and int(ends[:15]) > self._database.now() // SECOND:
            for issuer in self._clients:
                is_its = hmac.compare_digest(self._mac("state", issuer, secret).encode(), callback.state.encode())
                if is_its and callback.issuer in (None, issuer):
                    return issuer
        raise SignInExpired("this browser has not begun that sign-in, or too long ago")

    async def _redeem(self, issuer: str, code: str, verifier: str) -> str:
        """Exchange the code for an ID token, server to server. Raises SignInRefused."""
        client, secret = self._clients[issuer], self._secrets[issuer]
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": self._url + CALLBACK,
            "code_verifier": verifier,
            "client_id": client.client_id,
        }
        headers = {"Accept": "application/json"}
        if secret is not None:
            pair = f"{quote(client.client_id, safe='')}:{quote(secret, safe='')}"  # RFC 6749, 2.3.1
            headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
        url = await self._endpoint(issuer, "token_endpoint")
        try:
            async with self._http.stream("POST", url, data=form, headers=headers) as response:
                if response.is_server_error:
                    response.raise_for_status()
                answer = await json_object(response)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, TypeError, RecursionError) as error:
            raise _unreachable(issuer, error) from error
        token = answer.get("id_token")
        if response.status_code != httpx.codes.OK or not isinstance(token, str):
            logger.warning("%s refused a sign-in's code: %d %s", issuer, response.status_code, str(answer)[:300])
            raise SignInRefused("the identity provider did not accept the sign-in's code")
        return token

    async def _member(self, person: Person, tenant: str, origin: Origin) -> Principal:
        """Return the person as a member of the tenant, or of its only one. Raises SignInRefused, TenantSuspended."""
        async with self._database.read() as session:
            found = await CredentialRepository(session).person(person.issuer, person.subject, DEFAULT_PROJECT)
        chosen = [one for one in found if tenant in ("", one[1].name)]
        if not chosen:
            logger.warning("%r of %s signed in, and is no member of any tenant", person.subject[:200], person.issuer)
            raise NotAMember("no tenant here has you as a member")
        if len(chosen) > 1:
            raise SeveralTenants(person.issuer, [one[1].name for one in chosen])
        return principal_of_member(chosen[0], is_operator=person.is_operator, origin=origin)

    async def _endpoint(self, issuer: str, name: str) -> str:
        try:
            return (await self._verifier.endpoints(issuer))[name]
        except (IssuerUnreachable, KeyError) as error:
            raise _unreachable(issuer, error) from error

    def _mac(self, purpose: str, issuer: str, secret: str) -> str:
        digest = hmac.digest(self._pepper, f"sign-in {purpose}\0{issuer}\0{secret}".encode(), hashlib.sha256)
        return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def _challenge(verifier: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(verifier.encode()).digest()).rstrip(b"=").decode()


def _unreachable(issuer: str, error: Exception) -> IssuerDown:
    logger.warning("sign-in at %s: %s: %s", issuer, type(error).__name__, str(error)[:300])
    return IssuerDown("the identity provider does not answer; try again in a moment")


def _secret_of(issuer: str, client: SignInSettings) -> str | None:
    if client.secret_file is None:
        return None
    where = f"issuers.{issuer}.sign_in.secret_file: {client.secret_file}"
    try:
        secret = Path(client.secret_file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{where} cannot be read: {error}") from None
    if not secret:
        raise SettingsError(f"{where} is empty")
    return secret
