"""The application: every route, what it depends on, and the house that it opens when it starts."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from litestar import Litestar, Request, Router
from litestar.di import Provide

from loramux.gateway import AdapterService, CompletionService, EngineClient, Platform, open_platform
from loramux.limits import Limits
from loramux.settings import Settings, load_settings
from loramux.tenants import Account, Principal, Tenants
from loramux.uploads import Uploads
from loramux.webhooks import Endpoints
from loramux_api.auth import platform_of, principal_of
from loramux_api.controllers.adapters import AdapterController
from loramux_api.controllers.admin import AdminController, AdminTenantController, AdminTierController
from loramux_api.controllers.admin_limits import AdminTenantLimitController, AdminTierLimitController
from loramux_api.controllers.aliases import AliasController
from loramux_api.controllers.audit import AuditController
from loramux_api.controllers.chat import ChatController
from loramux_api.controllers.completions import CompletionController
from loramux_api.controllers.events import EventController
from loramux_api.controllers.grants import GrantController
from loramux_api.controllers.health import HealthController
from loramux_api.controllers.invoices import InvoiceController
from loramux_api.controllers.keys import KeyController
from loramux_api.controllers.limits import BudgetController, LimitController
from loramux_api.controllers.lorax import LoraxController
from loramux_api.controllers.members import MemberController
from loramux_api.controllers.models import ModelController
from loramux_api.controllers.projects import ProjectController
from loramux_api.controllers.requests import RequestController
from loramux_api.controllers.revisions import PinController, RevisionController
from loramux_api.controllers.uploads import UploadController
from loramux_api.controllers.usage import UsageController
from loramux_api.controllers.vllm import VllmController
from loramux_api.controllers.webhooks import WebhookController
from loramux_api.metrics import Metrics
from loramux_api.openapi import openapi_config
from loramux_api.problems import EXCEPTION_HANDLERS
from loramux_api.request_ids import send_request_id

MAX_JSON_BYTES = 16 << 20
CONFIG_VARIABLE = "LORAMUX_CONFIG"

AnyRequest = Request[Any, Any, Any]


def create_app(settings: Settings, engine: EngineClient | None = None) -> Litestar:
    """The application of one server. Its lifespan opens the house (`open_platform`) and closes it.

    `engine` takes the place of the one that the settings ask for.
    """
    metrics = Metrics()

    @asynccontextmanager
    async def house(app: Litestar) -> AsyncIterator[None]:
        async with open_platform(settings, engine) as platform:
            app.state.platform = platform
            metrics.watch(platform)
            yield

    uploads = Router(
        "/",
        route_handlers=[AdapterController, UploadController],
        request_max_body_size=settings.server.max_upload_bytes,
    )
    return Litestar(
        route_handlers=[
            ChatController,
            CompletionController,
            LoraxController,
            ModelController,
            RevisionController,
            AliasController,
            PinController,
            GrantController,
            UsageController,
            InvoiceController,
            KeyController,
            ProjectController,
            MemberController,
            AuditController,
            LimitController,
            BudgetController,
            AdminTenantController,
            AdminTierController,
            AdminController,
            AdminTierLimitController,
            AdminTenantLimitController,
            EventController,
            RequestController,
            WebhookController,
            VllmController,
            HealthController,
            uploads,
        ],
        dependencies={**_dependencies(), "metrics": Provide(lambda: metrics, sync_to_thread=False)},
        lifespan=[house],
        before_send=[send_request_id, metrics.count],
        exception_handlers=EXCEPTION_HANDLERS,
        request_max_body_size=MAX_JSON_BYTES,
        openapi_config=openapi_config(),
        logging_config=None,
        debug=False,
    )


def from_environment() -> Litestar:
    """For any ASGI server: `LORAMUX_CONFIG=FILE uvicorn --factory loramux_api.app:from_environment`."""
    return create_app(load_settings(Path(os.environ[CONFIG_VARIABLE])))


def _dependencies() -> dict[str, Provide]:
    def platform(request: AnyRequest) -> Platform:
        return platform_of(request)

    def principal(request: AnyRequest) -> Principal:
        return principal_of(request)

    def account(request: AnyRequest) -> Account:
        return platform_of(request).tenants.account_of(principal_of(request))

    def limits(request: AnyRequest) -> Limits:
        return Limits(platform_of(request).tenants.changes_of(principal_of(request)))

    def endpoints(request: AnyRequest) -> Endpoints:
        house, caller = platform_of(request), principal_of(request)
        return house.webhooks.endpoints(house.tenants.changes_of(caller), caller)

    def operators(request: AnyRequest) -> Tenants:
        return platform_of(request).tenants.in_the_name_of(principal_of(request))

    def completions(request: AnyRequest) -> CompletionService:
        return platform_of(request).completions

    def uploads(request: AnyRequest) -> Uploads:
        return platform_of(request).uploads

    def adapters(request: AnyRequest) -> AdapterService:
        return platform_of(request).adapters

    return {
        provider.__name__: Provide(provider, sync_to_thread=False)
        for provider in (platform, principal, account, limits, endpoints, operators, completions, uploads, adapters)
    }
