"""The routes of a server: every controller, and the console's controllers if the settings enable the console."""

from __future__ import annotations

from litestar import Controller

from loramux.common.settings.file import Settings
from loramux_api.controllers import (
    account,
    adapters,
    admin,
    bases,
    batches,
    chat,
    completions,
    console,
    evaluations,
    health,
    home,
    limits,
    lorax,
    messages,
    models,
    plans,
    pooling,
    prices,
    releases,
    responses,
    uploads,
    usage,
    vllm,
    webhooks,
)

CONTROLLERS: tuple[type[Controller], ...] = (
    chat.ChatController,
    completions.CompletionController,
    responses.ResponseController,
    pooling.PoolingController,
    messages.MessageController,
    vllm.TokenController,
    lorax.LoraxController,
    models.ModelController,
    adapters.AdapterController,
    uploads.UploadController,
    adapters.DeletedAdapterController,
    adapters.RevisionController,
    adapters.AliasController,
    adapters.PinController,
    adapters.GrantController,
    usage.UsageController,
    usage.ServiceLevelController,
    usage.InvoiceController,
    account.KeyController,
    account.ProjectController,
    account.MemberController,
    account.AuditController,
    limits.LimitController,
    limits.BudgetController,
    admin.AdminTenantController,
    admin.AdminTierController,
    admin.AdminEngineController,
    bases.AdminBaseController,
    bases.AdminMigrationController,
    bases.MigrationController,
    admin.AdminController,
    admin.AdminActivityController,
    plans.AdminPlanController,
    prices.AdminPricePlanController,
    prices.AdminTenantPlanController,
    limits.AdminTierLimitController,
    limits.AdminTenantLimitController,
    webhooks.EventController,
    usage.RequestController,
    webhooks.WebhookController,
    vllm.VllmController,
    vllm.VllmInformationController,
    health.HealthController,
    home.HomeController,
    batches.BatchController,
    batches.FileController,
    evaluations.EvaluationController,
    releases.RevisionMetricsController,
    releases.FeedbackController,
    releases.GuardController,
    releases.PolicyController,
    releases.ShadowController,
)
CONSOLE = (
    console.ConsoleController,
    console.ConsoleSessionController,
    console.ConsoleSignInController,
    console.ConsoleLinkController,
)


def routes_of(settings: Settings) -> list[type[Controller]]:
    """Return the controllers of a server with these settings."""
    return [*CONTROLLERS, *(CONSOLE if settings.console.enabled else ())]
