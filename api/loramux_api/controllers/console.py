"""/console: the web console's pages, and the sessions of the browsers that are signed in.

`ConsoleFiles` has the built files, compressed by the build or once here. The page's content security policy allows only
its own scripts. A session is opened with an API key, a sign-in link, or a sign-in at an identity provider.
"""

from __future__ import annotations

import gzip
import mimetypes
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlencode

import msgspec
from litestar import Controller, MediaType, Response, delete, get, post
from litestar.datastructures import Cookie, State
from litestar.di import NamedDependency
from litestar.params import FromQuery, JSONBody, QueryParameter

from loramux.accounts.tenants.authentication import Credential
from loramux.accounts.tenants.errors import InvalidKey, SeveralTenants, SignInRefused
from loramux.accounts.tenants.sessions import SIGN_IN_SECONDS, Callback, Session
from loramux.accounts.tenants.tenants import Tenants
from loramux.common.errors import LoramuxError
from loramux.common.identity import Principal
from loramux.common.jobs import ANYONE, run_blocking
from loramux.common.settings.file import Settings
from loramux.common.settings.serving import ImageSettings
from loramux.common.units import SECOND
from loramux.serving.bases import ServedBases
from loramux.serving.errors import InvalidRequest
from loramux.serving.image_decoding import FORMATS
from loramux_api.auth import ensure_same_origin, origin_of, requires, session_of
from loramux_api.bodies import AnyRequest, Body
from loramux_api.headers import SESSION_COOKIE, SIGN_IN_COOKIE, cookie_name, is_local
from loramux_api.openapi import REFUSALS
from loramux_api.parameters import OptionalText, PathName, QueryText
from loramux_api.schemas.bounds import Name, Secret, Url

FOLDER = Path(__file__).parents[1] / "console"
"""Folder of the built console. `make console` writes it in a checkout; a wheel contains it."""
INDEX = "index.html"
NONCE = "NONCE-OF-THIS-ANSWER"
"""Placeholder in the built page that each answer replaces with a new nonce (`console/vite.config.ts`)."""
SMALL = 1024
"""Size below which a file is not worth compressing, in bytes."""
COMPRESSED = (".html", ".js", ".css", ".svg", ".json", ".map")
MISSING = """<!doctype html><html lang="en"><meta charset="utf-8"><title>loramux console</title>
<h1>The console is not built</h1>
<p>The API on this address works. The console's pages are built with Node.js and packages from npm:</p>
<pre>make console</pre>
<p>This command fetches Node.js from PyPI and the packages from registry.npmjs.org, and says what it cannot reach.
Wheels of loramux have the pages in them.</p>
"""


@dataclass(frozen=True)
class ConsoleFile:
    """One file, ready to be sent."""

    content: bytes
    encoded: Mapping[str, bytes]
    """The content in each compressed encoding that it has, the best first."""
    media_type: str
    is_immutable: bool
    """True if the file's name contains a digest of its content."""


class ConsoleFiles:
    """Files below one folder. Each file is read at its first request."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder = folder
        self._names: frozenset[str] | None = None
        self._read: dict[str, ConsoleFile] = {}

    @property
    def is_built(self) -> bool:
        """Return whether there is a console."""
        return INDEX in self.names()

    def names(self) -> frozenset[str]:
        """Return the names of all files. Only these files are ever opened."""
        if not self._names:
            files = self._folder.rglob("*") if self._folder.is_dir() else ()
            self._names = frozenset(file.relative_to(self._folder).as_posix() for file in files if file.is_file())
        return self._names

    def file(self, name: str) -> ConsoleFile | None:
        """Return a file by its name below the folder; None if there is none."""
        if name not in self.names():
            return None
        if name not in self._read:
            self._read[name] = _load(self._folder / name, is_immutable=name.startswith("assets/"))
        return self._read[name]

    def page(self, nonce: str) -> bytes:
        """Return the only page of the console; its styles may carry this nonce."""
        index = self.file(INDEX)
        assert index is not None, "asked before"
        return index.content.replace(NONCE.encode(), nonce.encode())


def new_nonce() -> str:
    """Return a nonce for one answer."""
    return secrets.token_urlsafe(18)


def content_security_policy(nonce: str) -> str:
    """Return the policy of the console's page: own scripts only, no third party, styles with the nonce, no frames."""
    return "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            f"style-src 'self' 'nonce-{nonce}'",
            "img-src 'self' data:",
            "font-src 'self'",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'self'",
            "frame-ancestors 'none'",
        )
    )


def _load(path: Path, *, is_immutable: bool) -> ConsoleFile:
    content = path.read_bytes()
    encoded: dict[str, bytes] = {}
    brotli = path.with_name(path.name + ".br")
    if brotli.is_file():
        encoded["br"] = brotli.read_bytes()
    if path.suffix in COMPRESSED and len(content) >= SMALL:
        encoded["gzip"] = gzip.compress(content, 9, mtime=0)
    return ConsoleFile(
        content=content,
        encoded=encoded,
        media_type=mimetypes.guess_type(path.name)[0] or "application/octet-stream",
        is_immutable=is_immutable,
    )


PAGE_HEADERS = {
    "Cache-Control": "no-cache",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
NO_STORE = {"Cache-Control": "no-store"}


class ConsoleController(Controller):
    """The pages: one HTML document for every address below /console, and the built files."""

    path = "/console"
    include_in_schema = False

    @get(["/", "/{path:path}"], media_type=MediaType.HTML)
    async def page(self, request: AnyRequest, state: State, path: PathName = "/") -> Response[bytes]:
        """Return a built file, or the page that shows the address."""
        files: ConsoleFiles = state.console_files
        if not await run_blocking(ANYONE, lambda: files.is_built):
            headers = PAGE_HEADERS | {"Content-Security-Policy": "default-src 'none'"}
            return Response(MISSING.encode(), status_code=503, headers=headers, media_type=MediaType.HTML)
        file = await run_blocking(ANYONE, files.file, path.strip("/"))
        if file is None or path.strip("/") == "index.html":
            return _document(files)
        headers = PAGE_HEADERS | {"Vary": "Accept-Encoding"}
        if file.is_immutable:
            headers["Cache-Control"] = "public, max-age=31536000, immutable"
        accepted = request.headers.get("accept-encoding", "")
        encoding = next((one for one in file.encoded if one in accepted), None)
        if encoding is not None:
            headers["Content-Encoding"] = encoding
        content = file.content if encoding is None else file.encoded[encoding]
        return Response(content, headers=headers, media_type=file.media_type)


def _document(files: ConsoleFiles) -> Response[bytes]:
    nonce = new_nonce()
    headers = PAGE_HEADERS | {"Content-Security-Policy": content_security_policy(nonce)}
    return Response(files.page(nonce), headers=headers, media_type=MediaType.HTML)


class SignInBody(Body, forbid_unknown_fields=True):
    """Credentials of a sign-in: an API key, or the secret of a sign-in link."""

    key: Secret | None = None
    link: Secret | None = None


class ViewBody(Body, forbid_unknown_fields=True):
    """The tenant that an operator wants to look at."""

    tenant: Name


class BeginBody(Body, forbid_unknown_fields=True):
    """The identity provider to sign in at; members of several tenants also name the tenant."""

    issuer: Url
    tenant: Name | None = None


class ProviderObject(msgspec.Struct, kw_only=True):
    """An identity provider at which members sign in."""

    object: Literal["console.provider"] = "console.provider"
    issuer: str
    label: str


class ProviderList(msgspec.Struct, kw_only=True):
    """All identity providers at which members sign in."""

    object: Literal["list"] = "list"
    data: list[ProviderObject]


class BegunObject(msgspec.Struct, kw_only=True):
    """A sign-in that has begun: the browser must open the identity provider's page."""

    object: Literal["console.sign_in"] = "console.sign_in"
    location: str


class ImageBounds(msgspec.Struct, kw_only=True):
    """Bounds of the images in a request."""

    formats: list[str]
    max_per_request: int
    max_bytes: int
    """The largest file of an image, in bytes."""
    max_request_bytes: int
    """Maximum bytes of the files of a request's images together."""


class SessionObject(msgspec.Struct, kw_only=True):
    """The browser's session."""

    object: Literal["console.session"] = "console.session"
    id: str
    tenant: str
    holder: str
    """Id of the key or the member that has signed in."""
    role: str | None
    """Role of a member; null for a key."""
    scopes: list[str]
    project_id: str
    tier: str
    models: list[str] | None
    """The only models that the key may use; null: all models of the tenant."""
    viewed: list[str]
    """Tenants whose pages the operator has opened."""
    csrf_token: str
    """Token to send in the header X-CSRF-Token with every change."""
    created_at: int
    ends_at: int
    base_models: list[str]
    images: ImageBounds
    version: str


class LinkObject(msgspec.Struct, kw_only=True):
    """A sign-in link. It works once."""

    object: Literal["console.link"] = "console.link"
    path: str
    """Path to append to the server's address."""
    ends_at: int


def session_object(
    session: Session, csrf_token: str, base_models: list[str], images: ImageSettings, version: str
) -> SessionObject:
    """Return the session as a JSON object."""
    caller = session.principal
    return SessionObject(
        id=session.id,
        tenant=caller.tenant_name,
        holder=caller.key_id,
        role=caller.role,
        scopes=sorted(caller.scopes),
        project_id=caller.project,
        tier=caller.tier,
        models=None if caller.models is None else sorted(caller.models),
        viewed=list(session.viewed),
        csrf_token=csrf_token,
        created_at=session.created_at // SECOND,
        ends_at=session.ends_at // SECOND,
        base_models=base_models,
        images=ImageBounds(
            formats=list(FORMATS),
            max_per_request=images.max_per_request,
            max_bytes=images.max_bytes,
            max_request_bytes=images.max_request_bytes,
        ),
        version=version,
    )


class ConsoleSessionController(Controller):
    """Signing in and out."""

    path = "/console"
    tags = ("Console",)

    @post("/session", status_code=201, summary="Sign in", responses=REFUSALS)
    async def sign_in(
        self,
        request: AnyRequest,
        data: JSONBody[SignInBody],
        tenants: NamedDependency[Tenants],
        bases: NamedDependency[ServedBases],
        settings: NamedDependency[Settings],
    ) -> Response[SessionObject]:
        """Open a session with an API key or a sign-in link, and set its cookie."""
        ensure_same_origin(request)
        sessions = tenants.sessions
        if (data.key is None) == (data.link is None):
            raise InvalidRequest("Send either 'key' or 'link'.", field="key", code="invalid_value")
        if data.link is not None:
            caller = await sessions.holder_of_link(data.link, origin_of(request))
        else:
            credential = Credential(secret=(data.key or "").strip(), origin=origin_of(request))
            caller = await tenants.authenticator.authenticate(credential)
            if caller.role is not None:
                raise InvalidKey("that is a token, and the console wants an API key, which begins with sk-lm-", "key")
        secret = await sessions.open(caller)
        session = await sessions.find(secret, origin_of(request))
        return Response(
            _described(tenants, bases, settings, session, secret),
            cookies=[session_cookie(request, secret)],
            headers=NO_STORE,
            status_code=201,
        )

    @get("/session", summary="Describe the session", responses=REFUSALS)
    async def describe(
        self,
        request: AnyRequest,
        tenants: NamedDependency[Tenants],
        bases: NamedDependency[ServedBases],
        settings: NamedDependency[Settings],
    ) -> Response[SessionObject]:
        """Return the session of the browser's cookie, with the token that changes need."""
        session = await session_of(request)
        return Response(
            _described(tenants, bases, settings, session, request.cookies[cookie_name(SESSION_COOKIE, request)]),
            headers=NO_STORE,
        )

    @delete("/session", status_code=200, summary="Sign out", responses=REFUSALS)
    async def sign_out(
        self, request: AnyRequest, tenants: NamedDependency[Tenants], everywhere: FromQuery[bool] = False
    ) -> Response[None]:
        """End the session and remove the cookie. With `everywhere`, end all sessions of the same key or member."""
        await session_of(request)
        secret = request.cookies[cookie_name(SESSION_COOKIE, request)]
        await tenants.sessions.end(secret, origin_of(request), all_of_holder=everywhere)
        gone = session_cookie(request, "", max_age=0)
        return Response(None, status_code=HTTPStatus.OK, cookies=[gone], headers=NO_STORE)

    @post("/views", status_code=200, summary="Look at a tenant's pages", responses=REFUSALS)
    async def view(
        self,
        request: AnyRequest,
        data: JSONBody[ViewBody],
        tenants: NamedDependency[Tenants],
        bases: NamedDependency[ServedBases],
        settings: NamedDependency[Settings],
    ) -> SessionObject:
        """Let an operator's session read a tenant's pages, with the header X-View-Tenant. The audit log records this
        view.
        """
        session = await session_of(request)
        if "operator" not in session.principal.scopes:
            raise InvalidRequest("Only operators look at other tenants' pages.", field="tenant", code="not_allowed")
        session = await tenants.sessions.view(session, data.tenant)
        return _described(tenants, bases, settings, session, request.cookies[cookie_name(SESSION_COOKIE, request)])


class ConsoleSignInController(Controller):
    """Signing in at an identity provider: the redirect to its page, and the return. The provider's tokens stay on the
    server.
    """

    path = "/console/oidc"
    tags = ("Console",)

    @get("/providers", summary="List identity providers")
    async def providers(self, tenants: NamedDependency[Tenants]) -> ProviderList:
        """Return the identity providers at which members sign in to the console."""
        found = tenants.sign_ins.providers
        return ProviderList(data=[ProviderObject(issuer=one.issuer, label=one.label) for one in found])

    @post(status_code=201, summary="Begin to sign in at a provider", responses=REFUSALS)
    async def begin(
        self, request: AnyRequest, data: JSONBody[BeginBody], tenants: NamedDependency[Tenants]
    ) -> Response[BegunObject]:
        """Return the provider's page to open, and set the cookie that binds the sign-in to this browser."""
        ensure_same_origin(request)
        url = tenants.sign_ins.url
        if url.partition("://")[2] != request.headers.get("host"):
            raise InvalidRequest(f"Open the console at {url}/console to sign in there.", field="host")
        begun = await tenants.sign_ins.begin(data.issuer, data.tenant)
        cookie = sign_in_cookie(request, begun.secret, SIGN_IN_SECONDS)
        return Response(BegunObject(location=begun.location), cookies=[cookie], headers=NO_STORE, status_code=201)

    @get("/callback", include_in_schema=False)
    async def callback(
        self,
        request: AnyRequest,
        tenants: NamedDependency[Tenants],
        answered_state: Annotated[str, QueryParameter(name="state")] = "",
        code: QueryText = "",
        iss: OptionalText = None,
        error: OptionalText = None,
    ) -> Response[None]:
        """Open a session for the member that the provider has sent back. If that fails, show the reason on the sign-in
        page.
        """
        callback = Callback(state=answered_state, code=code, issuer=iss, error=error)
        secret = request.cookies.get(cookie_name(SIGN_IN_COOKIE, request), "")
        cookies = [sign_in_cookie(request, "", 0)]
        try:
            caller, is_operator = await tenants.sign_ins.finish(secret, callback, origin_of(request))
            opened = await tenants.sessions.open(caller, is_operator=is_operator)
            cookies.append(session_cookie(request, opened))
            fragment = ""
        except SeveralTenants as choice:
            fragment = "#" + urlencode({"issuer": choice.issuer, "tenant": choice.tenants}, doseq=True)
        except LoramuxError as refusal:
            is_known = isinstance(refusal, SignInRefused) or not isinstance(refusal, InvalidKey)
            fragment = f"#refused={refusal.code if is_known else SignInRefused.code}"
        headers = PAGE_HEADERS | NO_STORE | {"Location": f"/console/{fragment}"}
        return Response(None, status_code=HTTPStatus.SEE_OTHER, cookies=cookies, headers=headers)


class ConsoleLinkController(Controller):
    """Links that sign a browser in."""

    path = "/console/links"
    tags = ("Console",)

    @post(guards=[requires("read")], status_code=201, summary="Make a sign-in link", responses=REFUSALS)
    async def make(self, principal: NamedDependency[Principal], tenants: NamedDependency[Tenants]) -> LinkObject:
        """Return a link that opens one session with the rights of this key, within an hour."""
        link = await tenants.sessions.open_link(principal)
        return LinkObject(path=f"/console/#sign-in={link.secret}", ends_at=link.ends_at // SECOND)


def session_cookie(request: AnyRequest, secret: str, max_age: int | None = None) -> Cookie:
    """Return the session's cookie: only for this server, not readable by scripts, and only over TLS except on this
    machine.

    The cookie has no expiry: the server ends sessions, and the browser deletes the cookie when the browser closes.
    """
    return Cookie(
        key=cookie_name(SESSION_COOKIE, request),
        value=secret,
        path="/",
        httponly=True,
        samesite="strict",
        secure=not is_local(request),
        max_age=max_age,
    )


def sign_in_cookie(request: AnyRequest, secret: str, max_age: int) -> Cookie:
    """Return the cookie that binds a sign-in to its browser. The cookie is Lax, because the browser returns from the
    provider's page.
    """
    return Cookie(
        key=cookie_name(SIGN_IN_COOKIE, request),
        value=secret,
        path="/",
        httponly=True,
        samesite="lax",
        secure=not is_local(request),
        max_age=max_age,
    )


def _described(
    tenants: Tenants, bases: ServedBases, settings: Settings, session: Session, secret: str
) -> SessionObject:
    token = tenants.sessions.csrf_token(secret)
    return session_object(session, token, list(bases), settings.images, version("loramux"))
