"""The application: the dependencies of its handlers, and the platform that its lifespan opens.

`DEPENDENCIES` maps a handler's parameter names to their values. `create_app` combines the dependencies with the routes
of `controllers`, error handlers, hooks and the OpenAPI document.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, cast

from litestar import Litestar
from litestar.config.cors import CORSConfig
from litestar.datastructures import State
from litestar.di import Provide
from litestar.types import ASGIApp, HTTPScope, LifeSpanReceive, LifeSpanScope, LifeSpanSend, Receive, Scope, Send
from typing_extensions import override

from loramux.accounts.tenants.account import Account
from loramux.accounts.tenants.tenants import Tenants
from loramux.accounts.webhooks.endpoints import WebhookEndpoints
from loramux.common.errors import LoramuxError
from loramux.common.identity import Principal
from loramux.common.settings.file import Settings, SettingsError, load_settings
from loramux.engine.client import EngineClient, EngineDied
from loramux.money.billing.catalog import Catalog, PlanPrices
from loramux.money.limits.limits import Limits
from loramux.server.platform import Platform, open_platform
from loramux.server.programs import Programs, Provisions, open_programs
from loramux_api.answering import inference
from loramux_api.auth import platform_of, principal_of
from loramux_api.batch_endpoints import batch_endpoints
from loramux_api.bodies import AnyRequest, ApiRequest, StrictJSON, release_answered_body, release_body
from loramux_api.controllers.console import ConsoleFiles
from loramux_api.controllers.plans import WhatIf
from loramux_api.headers import READABLE, send_console_policy, send_ignored, send_request_id, send_transport_policy
from loramux_api.http_layer import serve
from loramux_api.metrics import Metrics
from loramux_api.openapi import openapi_config
from loramux_api.peers import Peers
from loramux_api.problems import EXCEPTION_HANDLERS
from loramux_api.request_log import Tracer, logged, note_begun, note_ended, note_response
from loramux_api.routes import routes_of
from loramux_api.training_examples import example_format

logger = logging.getLogger(__name__)

CONFIG_VARIABLE = "LORAMUX_CONFIG"


def principal(request: AnyRequest) -> Principal:
    """Return the caller, on guarded routes."""
    return principal_of(request)


def account(request: AnyRequest) -> Account:
    """Return the caller's own tenant, which it can read and change."""
    return platform_of(request).tenants.account_of(principal_of(request))


def limits(request: AnyRequest) -> Limits:
    """Limits and budgets, changed as the caller."""
    changes = platform_of(request).tenants.changes_by(principal_of(request))
    return Limits(changes, PlanPrices(changes.database))


def endpoints(request: AnyRequest) -> WebhookEndpoints:
    """Return the caller's webhook endpoints."""
    platform, caller = platform_of(request), principal_of(request)
    return platform.webhooks.endpoints(platform.tenants.changes_by(caller), caller)


def operators(request: AnyRequest) -> Tenants:
    """Return every tenant. Raises NotAllowed unless the caller is an operator."""
    return platform_of(request).tenants.as_operator(principal_of(request))


def catalog(request: AnyRequest) -> Catalog:
    """Return the price plans, which the operator can change."""
    return Catalog(platform_of(request).database, operators(request).changes)


def _part(of: Callable[[AnyRequest], object], name: str) -> Callable[[AnyRequest], Any]:
    def part(request: AnyRequest) -> Any:
        return getattr(of(request), name)

    return part


def database_is_reachable(request: AnyRequest) -> Callable[[], Awaitable[bool]]:
    """Return a function that checks if the database answers."""
    return platform_of(request).database.is_reachable


def peers(request: AnyRequest) -> Peers:
    """Return the other workers of this server."""
    found = request.app.state.peers
    assert isinstance(found, Peers)
    return found


def _programs_of(request: AnyRequest) -> Programs:
    programs = request.app.state.programs
    assert isinstance(programs, Programs)
    return programs


PARTS = (
    *("adapters", "bases", "billing", "completions", "ledger_proof", "lifecycle", "local_folders", "pushes"),
    *("responses", "settings", "sinks", "started_at", "tenants", "uploads", "usage", "webhooks"),
)
"""Attributes of `Platform` that a handler may name as parameters."""
TRAINER_COMMAND = (sys.executable, "-m", "loramux_api", "trainer", "--settings-on-stdin")
"""The command with which a server starts a trainer on its own machine."""
PROGRAMS = (
    *("batches", "files", "evaluations", "guards", "shadows", "policies", "base_upgrades", "revision_metrics"),
    "training",
)
"""Attributes of `Programs` that a handler may name as parameters."""
PROVIDERS: dict[str, Callable[..., Any]] = {
    "database_is_reachable": database_is_reachable,
    **{
        provider.__name__: provider
        for provider in (principal, inference, account, limits, endpoints, operators, catalog, peers)
    },
    **{name: _part(platform_of, name) for name in PARTS},
    **{name: _part(_programs_of, name) for name in PROGRAMS},
}
DEPENDENCIES = {name: Provide(provider, sync_to_thread=False) for name, provider in PROVIDERS.items()}


class Application(Litestar):
    """The application, with one log line and optionally a trace for each request."""

    tracer: Tracer | None = None

    @override
    async def __call__(
        self, scope: Scope | LifeSpanScope, receive: Receive | LifeSpanReceive, send: Send | LifeSpanSend
    ) -> None:
        """Answer one ASGI request, or run the lifespan."""
        if scope["type"] == "lifespan":
            await super().__call__(scope, receive, send)
            return
        async with logged(scope, self.tracer):
            await serve(self._answer, cast(HTTPScope, scope), cast(Receive, receive), cast(Send, send))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:  # of this scope: the HTTP layer may have replaced the server's
            release_body(scope)


def create_app(settings: Settings, engine: EngineClient | None = None) -> Application:
    """Return the application of one server.

    The application's lifespan opens the platform, unless `attached` has given it an open platform. The parameter
    `engine` replaces the engines of the settings.
    """
    metrics = Metrics()

    @asynccontextmanager
    async def lifespan(app: Litestar) -> AsyncIterator[None]:
        assert isinstance(app, Application), "it is made below"
        opening = open_platform(settings) if engine is None else open_platform(settings, lambda *_: engine)
        async with opening as platform, attached(app, platform):
            with _lame_duck_on_sigterm(app, settings.server.lame_duck_seconds):
                yield

    app = Application(
        route_handlers=routes_of(settings),
        dependencies={**DEPENDENCIES, "metrics": Provide(lambda: metrics, sync_to_thread=False)},
        lifespan=[lifespan],
        before_send=[
            release_answered_body,
            send_transport_policy,
            send_request_id,
            send_ignored,
            send_console_policy,
            metrics.count,
            note_response,
        ],
        exception_handlers=EXCEPTION_HANDLERS,
        request_class=ApiRequest,
        dto=StrictJSON,
        return_dto=None,
        request_max_body_size=None,  # ApiRequest has the limit of the route's kind
        cors_config=_cors(settings),
        openapi_config=openapi_config(),
        logging_config=None,
        debug=False,
        state=State(
            {
                "metrics": metrics,
                "stopping": False,
                "what_if": WhatIf(),
                "console_files": ConsoleFiles(),
                "peers": Peers(),
            }
        ),
    )
    if settings.tracing.endpoint is not None:
        app.tracer = Tracer(settings.tracing)
    return app


def _cors(settings: Settings) -> CORSConfig | None:
    """Return the origins whose pages may call the API with a key. Pages of other origins never get the console's
    cookie.
    """
    if not settings.server.cors_origins:
        return None
    return CORSConfig(
        allow_origins=list(settings.server.cors_origins),
        allow_headers=["*"],
        allow_credentials=False,
        expose_headers=list(READABLE),
    )


@asynccontextmanager
async def attached(app: Application, platform: Platform) -> AsyncIterator[None]:
    """Serve from an open platform, and run its batches, while the block runs; then send the last traces."""
    provisions = Provisions(
        endpoints=batch_endpoints(platform.completions),
        examples=example_format(platform.completions.context),
        trainer_command=TRAINER_COMMAND if app.state.peers.is_first else None,
    )
    async with open_programs(platform, provisions) as programs:
        app.state.platform, app.state.programs = platform, programs
        app.state.metrics.watch(platform)
        platform.completions.on_begun(note_begun)
        platform.completions.on_ended(note_ended)
        if app.tracer is not None:
            platform.uploads.worker.jobs.on_ended(app.tracer.export_job)
            programs.batch_jobs.on_ended(app.tracer.export_job)
            programs.training_jobs.on_ended(app.tracer.export_job)
        yield
    if app.tracer is not None:
        await asyncio.to_thread(app.tracer.close)


def from_environment() -> ASGIApp:
    """Return the application; used by `LORAMUX_CONFIG=FILE uvicorn --factory loramux_api.app:from_environment`.

    If the settings are invalid, raises SystemExit with one sentence, which the ASGI server logs.
    """
    file = os.environ.get(CONFIG_VARIABLE)
    if file is None:
        raise SystemExit(f"Error: {CONFIG_VARIABLE} is not set; it names the settings file (`loramux init` writes one)")
    try:
        app = create_app(load_settings(Path(file)))
    except SettingsError as error:
        raise SystemExit(f"Error: {error}") from None
    return _with_sentences(app)


def _with_sentences(app: Litestar) -> ASGIApp:
    """Return the application with a lifespan that reports a known error as one sentence; Litestar would send the
    traceback.
    """

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":  # type: ignore[comparison-overlap]  # Litestar's Scope leaves it out
            await app(scope, receive, send)
            return
        refusal: str | None = None

        async def send_sentence(message: Any) -> None:
            nonlocal refusal
            if message["type"] == "lifespan.startup.failed":
                refusal = refusal_of(sys.exc_info()[1])
                message["message"] = message["message"] if refusal is None else f"Error: {refusal}"
            await send(message)

        try:
            await app(scope, receive, send_sentence)
        except BaseException:
            if refusal is None:
                raise

    return wrapped


def refusal_of(error: BaseException | None) -> str | None:
    """Return the sentence of a known error of a start, which may be inside exception groups; None for a bug."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return " ".join(str(error).split()) if isinstance(error, LoramuxError | EngineDied | SettingsError) else None


@contextmanager
def _lame_duck_on_sigterm(app: Litestar, seconds: float) -> Iterator[None]:
    """Delay the ASGI server's own SIGTERM handler: first /health/ready answers 503 for `seconds`.

    Servers such as uvicorn stop accepting connections at once, but load balancers still send requests for a while.
    """
    stop = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or not callable(stop):
        yield
        return
    loop = asyncio.get_running_loop()

    def begin() -> None:
        app.state.stopping = True
        logger.info("stopping: /health/ready answers 503, requests are served for %g s more", seconds)
        loop.call_later(seconds, stop, signal.SIGTERM, None)

    loop.add_signal_handler(signal.SIGTERM, begin)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
        signal.signal(signal.SIGTERM, stop)
