"""The routes: every controller of the API."""

from __future__ import annotations

from litestar import Controller, Router

from loramux.settings import Settings
from loramux_api.controllers.account import AuditController, KeyController, MemberController, ProjectController
from loramux_api.controllers.adapters import AdapterController
from loramux_api.controllers.admin import (
    AdminController,
    AdminEngineController,
    AdminTenantController,
    AdminTenantLimitController,
    AdminTierController,
    AdminTierLimitController,
)
from loramux_api.controllers.aliases import AliasController
from loramux_api.controllers.bases import AdminBaseController
from loramux_api.controllers.batches import BatchController
from loramux_api.controllers.chat import ChatController
from loramux_api.controllers.completions import CompletionController
from loramux_api.controllers.console import (
    ConsoleController,
    ConsoleLinkController,
    ConsoleSessionController,
    ConsoleSignInController,
)
from loramux_api.controllers.evaluations import EvaluationController
from loramux_api.controllers.files import FileController
from loramux_api.controllers.grants import GrantController
from loramux_api.controllers.health import HealthController
from loramux_api.controllers.limits import BudgetController, LimitController
from loramux_api.controllers.lorax import LoraxController
from loramux_api.controllers.messages import MessageController
from loramux_api.controllers.migrations import AdminMigrationController, MigrationController
from loramux_api.controllers.models import ModelController
from loramux_api.controllers.operations import AdminActivityController, AdminPlanController
from loramux_api.controllers.pooling import PoolingController
from loramux_api.controllers.releases import (
    FeedbackController,
    GuardController,
    PolicyController,
    RevisionMetricsController,
)
from loramux_api.controllers.responses import ResponseController
from loramux_api.controllers.revisions import PinController, RevisionController
from loramux_api.controllers.shadows import ShadowController
from loramux_api.controllers.tokens import TokenController
from loramux_api.controllers.uploads import UploadController
from loramux_api.controllers.usage import InvoiceController, RequestController, ServiceLevelController, UsageController
from loramux_api.controllers.vllm import VllmController
from loramux_api.controllers.vllm_information import VllmInformationController
from loramux_api.controllers.webhooks import EventController, WebhookController

CONTROLLERS: tuple[type[Controller], ...] = (
    ChatController,
    CompletionController,
    ResponseController,
    PoolingController,
    MessageController,
    TokenController,
    LoraxController,
    ModelController,
    RevisionController,
    AliasController,
    PinController,
    GrantController,
    UsageController,
    ServiceLevelController,
    InvoiceController,
    KeyController,
    ProjectController,
    MemberController,
    AuditController,
    LimitController,
    BudgetController,
    AdminTenantController,
    AdminTierController,
    AdminEngineController,
    AdminBaseController,
    AdminMigrationController,
    MigrationController,
    AdminController,
    AdminActivityController,
    AdminPlanController,
    AdminTierLimitController,
    AdminTenantLimitController,
    EventController,
    RequestController,
    WebhookController,
    VllmController,
    VllmInformationController,
    HealthController,
    BatchController,
    EvaluationController,
    RevisionMetricsController,
    FeedbackController,
    GuardController,
    PolicyController,
    ShadowController,
)
CONSOLE = (ConsoleController, ConsoleSessionController, ConsoleSignInController, ConsoleLinkController)


def routes_of(settings: Settings) -> list[type[Controller] | Router]:
    """Return what a server of these settings answers; uploads and files may have larger bodies than other routes."""
    uploads = Router(
        "/",
        route_handlers=[AdapterController, UploadController],
        request_max_body_size=settings.server.max_upload_bytes,
    )
    files = Router("/", route_handlers=[FileController], request_max_body_size=settings.batches.max_body_bytes)
    return [*CONTROLLERS, *(CONSOLE if settings.console.enabled else ()), uploads, files]
