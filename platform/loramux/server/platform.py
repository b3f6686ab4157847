"""Build the parts of the request path from the settings: records, tenants, registry, usage, engines, chores.

`open_platform` is the composition root: it makes each part from the parts that it needs, and closes them in reverse
order. No part knows the container. `programs` adds the programs that use the request path: batches and releases.
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from loramux.accounts.tenants.entities import Changes
from loramux.accounts.tenants.errors import TenantsError
from loramux.accounts.tenants.secrets import open_pepper, replace_pepper
from loramux.accounts.tenants.tenants import Tenants
from loramux.accounts.webhooks.dispatcher import webhook_client
from loramux.accounts.webhooks.endpoints import WebhookService
from loramux.catalog.pushes.service import PushService
from loramux.catalog.registry.errors import RegistryError
from loramux.catalog.registry.registry import Registry, open_registry
from loramux.catalog.registry.resolver import BaseModels
from loramux.catalog.uploads.imports import Importer
from loramux.catalog.uploads.ingest import Ingest, UploadWorker
from loramux.catalog.uploads.sessions import UploadSessions, max_bytes
from loramux.catalog.validation.rendering import TemplateRenderer
from loramux.common.jobs import TenantSlots, run_periodically
from loramux.common.public_http import Resolver, outside_client
from loramux.common.settings.file import Settings, ensure_files
from loramux.common.units import SECOND
from loramux.data.records.database import Database
from loramux.data.storage.blobs import BlobStore
from loramux.fleet.member import LaunchEngine
from loramux.money.billing.catalog import Catalog, PlanPrices
from loramux.money.billing.reconcile import Checkpoints, LedgerProof
from loramux.money.billing.service import BillingService
from loramux.money.exports.delivery import AlertDelivery, Sink, SinkDelivery
from loramux.money.exports.sinks import WebhookSink, make_sink
from loramux.money.usage.idempotency import AnswerStorage
from loramux.money.usage.service import UsageService
from loramux.server.records import StartWait, open_database, open_object_store, open_store
from loramux.serving.adapters import AdapterService, LocalFolders
from loramux.serving.bases import ServedBases
from loramux.serving.engine_questions import EngineQuestions
from loramux.serving.images import ImageReader
from loramux.serving.lifecycle import RECONCILE_SECONDS, BaseLifecycle
from loramux.serving.service import CompletionService
from loramux.serving.stored_responses import ResponseStore

MAINTENANCE_SECONDS = 10.0
COMPARE_SECONDS = 2.0
SETTLE_SECONDS = 5.0
STORAGE_SECONDS = 3600.0
SUM_SECONDS = 15.0
FORGET_SECONDS = 3600.0
CACHE_SECONDS = 60.0
UPLOAD_SECONDS = 15.0
UPLOAD_SWEEP_SECONDS = 3600.0
DELIVERY_SECONDS = 10.0
CHECKPOINT_SECONDS = 3600.0
SINK_SECONDS = 20.0
WEBHOOK_SECONDS = 1.0
WAITING_BYTES, WAITING_BYTES_OF_TENANT = 512 << 20, 128 << 20

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Platform:
    """All parts of a running server."""

    settings: Settings
    started_at: int
    """Time of the start, in Unix seconds."""
    tenants: Tenants
    adapters: AdapterService
    lifecycle: BaseLifecycle
    ingest: Ingest
    uploads: UploadSessions
    usage: UsageService
    billing: BillingService
    completions: CompletionService
    images: ImageReader
    responses: ResponseStore
    webhooks: WebhookService
    pushes: PushService
    local_folders: LocalFolders
    database: Database
    blobs: BlobStore
    sinks: SinkDelivery
    ledger_proof: LedgerProof
    memory: TenantSlots
    """Waiting bytes of tenants: bodies, lines of batches that are being read, and downloads that the client has not
    read.
    """

    @property
    def bases(self) -> ServedBases:
        """Served bases by name; the first is the default."""
        return self.lifecycle.serving


@dataclass(frozen=True, slots=True)
class BillingServices:
    """The parts that an operator's billing commands need."""

    database: Database
    usage: UsageService
    billing: BillingService
    catalog: Catalog
    settings: Settings
    stack: AsyncExitStack

    async def open_checkpoints(self) -> Checkpoints:
        """Open the object storage with the ledger's checkpoints. Unlike other commands, this needs the pepper."""
        pepper = await open_pepper(self.database, Path(self.settings.records.pepper_file))
        objects = open_object_store(self.settings.records)
        self.stack.callback(objects.close)
        return Checkpoints(self.database, objects, pepper)


@asynccontextmanager
async def open_tenants(settings: Settings) -> AsyncIterator[Tenants]:
    """Open only tenants and keys, because the command line needs no model."""
    async with open_database(settings) as database, aclosing(await _open_tenants(settings, database)) as tenants:
        yield tenants


@asynccontextmanager
async def open_billing(settings: Settings) -> AsyncIterator[BillingServices]:
    """Open only the ledger and the money, because the command line needs no model."""
    async with AsyncExitStack() as stack:
        database = await stack.enter_async_context(open_database(settings))
        yield BillingServices(
            database=database,
            usage=UsageService(database),
            billing=BillingService(database, settings.billing),
            catalog=Catalog(database),
            settings=settings,
            stack=stack,
        )


async def open_sinks(settings: Settings, stack: AsyncExitStack) -> list[Sink]:
    """The sinks of the settings, whose connections close with `stack`. Raises ExportError."""
    clients = [await stack.enter_async_context(outside_client(SINK_SECONDS, trust_env=True)) for _ in settings.sinks]
    return [make_sink(sink, client) for sink, client in zip(settings.sinks, clients, strict=True)]


@asynccontextmanager
async def open_platform(settings: Settings, launch: LaunchEngine | None = None) -> AsyncIterator[Platform]:
    """Open all parts, clean up after earlier runs, and serve; at the end drain, and stop the parts in reverse order.

    `launch` makes each engine; if it is None, the settings decide. Raises RecordsError, SettingsError, TenantsError, or
    EngineDied if a model cannot be loaded.
    """
    ensure_files(settings)
    async with AsyncExitStack() as stack:
        sinks = await open_sinks(settings, stack)
        wait = StartWait(settings.records)
        database = await stack.enter_async_context(open_database(settings, wait))
        tenants = await wait(partial(_open_tenants, settings, database))
        stack.push_async_callback(tenants.aclose)
        tenants.last_use.start()
        blobs = open_store(settings.records)
        stack.callback(blobs.close)
        answers = AnswerStorage(tenants.pepper, settings.privacy.idempotency_seconds * SECOND)
        bill_abandoned = settings.billing.bill_abandoned
        usage = UsageService(database, PlanPrices(database), answers, bill_abandoned=bill_abandoned)
        await wait(usage.start)
        stack.push_async_callback(usage.stop)
        questions = EngineQuestions(settings.validation.parity_engine_seconds)
        prefix_key = hmac.digest(tenants.pepper, b"prefixes of prompts", "sha256")
        lifecycle = BaseLifecycle(settings, database, questions, launch, prefix_key)
        stack.push_async_callback(lifecycle.close)
        await wait(lifecycle.start)
        registry = open_registry(database, blobs, lifecycle.models, settings.adapters)
        await wait(partial(_sweep, registry, usage, lifecycle.models))
        ingest = Ingest(database, blobs, registry.blob_gc, lifecycle.models, settings.adapters, lifecycle.validators)
        uploads = _open_uploads(settings, database, blobs, ingest, tenants, usage.server_id)
        stack.push_async_callback(uploads.worker.jobs.stop)
        stack.callback(questions.stop)
        adapters = AdapterService(registry, lifecycle.engines)
        await wait(partial(_preload, settings, tenants, adapters))
        pushes = PushService(
            database,
            blobs,
            registry.blob_gc,
            lifecycle.models,
            ingest,
            settings.pushes,
            settings.adapters,
            adapters.retire,
        )
        images = ImageReader(settings.images)
        completions = _open_completions(settings, lifecycle, registry, usage, images, stack)
        responses = ResponseStore(database, tenants.pepper, settings.privacy)
        chores = (
            (RECONCILE_SECONDS, lifecycle.reconcile),
            (SETTLE_SECONDS, usage.settle_late),
            (STORAGE_SECONDS, usage.accrue),
            (SUM_SECONDS, usage.sum_days),
            (FORGET_SECONDS, usage.forget_answers),
            (FORGET_SECONDS, responses.forget_expired),
            (UPLOAD_SECONDS, uploads.worker.tend),
            (UPLOAD_SWEEP_SECONDS, uploads.worker.sweep),
            (CACHE_SECONDS, partial(registry.blob_gc.trim_cache, settings.records.cache_bytes)),
            (MAINTENANCE_SECONDS, adapters.run_maintenance),
            (MAINTENANCE_SECONDS, pushes.expire),
            (COMPARE_SECONDS, pushes.compare_next),
        )
        for seconds, chore in chores:
            await stack.enter_async_context(run_periodically(seconds, chore))
        webhooks, delivery, proof = await _open_deliveries(settings, sinks, database, blobs, tenants.pepper, stack)
        yield Platform(
            settings=settings,
            started_at=int(time.time()),
            tenants=tenants,
            adapters=adapters,
            lifecycle=lifecycle,
            ingest=ingest,
            uploads=uploads,
            usage=usage,
            billing=BillingService(database, settings.billing),
            completions=completions,
            images=images,
            responses=responses,
            webhooks=webhooks,
            pushes=pushes,
            local_folders=LocalFolders(adapters, uploads, settings.adapters.local_root),
            database=database,
            blobs=blobs,
            sinks=delivery,
            ledger_proof=proof,
            memory=TenantSlots(WAITING_BYTES, WAITING_BYTES_OF_TENANT),
        )


def _open_completions(
    settings: Settings,
    lifecycle: BaseLifecycle,
    registry: Registry,
    usage: UsageService,
    images: ImageReader,
    stack: AsyncExitStack,
) -> CompletionService:
    """Serve requests until `stack` ends, which lets running requests end first."""
    renderer = TemplateRenderer()
    stack.callback(renderer.close)
    stack.push_async_callback(images.close)
    completions = CompletionService(
        bases=lifecycle.serving,
        resolver=registry.resolver,
        usage=usage,
        renderer=renderer,
        images=images,
        deadlines=settings.scheduler.deadlines_ms,
    )
    lifecycle.drain_with(completions.drain_base)
    stack.push_async_callback(completions.drain, settings.server.drain_seconds)
    return completions


async def _open_deliveries(
    settings: Settings,
    sinks: Sequence[Sink],
    database: Database,
    blobs: BlobStore,
    pepper: bytes,
    stack: AsyncExitStack,
) -> tuple[WebhookService, SinkDelivery, LedgerProof]:
    """Deliver usage and alerts to the operator's sinks, and events to the tenants' own webhooks, until `stack` ends."""
    listening = [sink for sink in sinks if isinstance(sink, WebhookSink)]
    checkpoints = Checkpoints(database, blobs.objects, pepper, listening)
    await stack.enter_async_context(run_periodically(CHECKPOINT_SECONDS, checkpoints.write))
    if listening:
        await stack.enter_async_context(run_periodically(DELIVERY_SECONDS, AlertDelivery(database, listening).run))
    delivery = SinkDelivery(database)
    for sink in sinks:
        await stack.enter_async_context(run_periodically(DELIVERY_SECONDS, partial(delivery.run, sink)))
    resolver = Resolver("webhooks")
    client = await stack.enter_async_context(webhook_client(settings.webhooks, resolver))
    webhooks = WebhookService(database, client, pepper, settings.webhooks, resolver)
    await stack.enter_async_context(run_periodically(FORGET_SECONDS, webhooks.dispatcher.forget))
    await stack.enter_async_context(run_periodically(WEBHOOK_SECONDS, webhooks.dispatcher.run))
    return webhooks, delivery, LedgerProof(database, checkpoints)


def _open_uploads(
    settings: Settings, database: Database, blobs: BlobStore, ingest: Ingest, tenants: Tenants, server_id: str
) -> UploadSessions:
    importer = Importer(settings.uploads, max_bytes(settings.adapters), settings.adapters.local_root)
    worker = UploadWorker(database, blobs, ingest, importer, tenants, server_id)
    return UploadSessions(database, blobs, ingest, worker, settings.uploads, settings.adapters)


async def renew_pepper(settings: Settings) -> int:
    """Replace a lost pepper and revoke every key; return the number of keys. Servers must be restarted afterwards."""
    async with open_database(settings) as database:
        return await replace_pepper(Changes.local(database), Path(settings.records.pepper_file))


async def _open_tenants(settings: Settings, database: Database) -> Tenants:
    pepper = await open_pepper(database, Path(settings.records.pepper_file))
    return Tenants(database, pepper, settings.issuers, settings.console)


async def _preload(settings: Settings, tenants: Tenants, adapters: AdapterService) -> None:
    """Preload adapters. If one cannot be preloaded it is loaded at its first request, so a warning is enough."""
    for model in settings.adapters.preload:
        try:
            refused = await adapters.preload(await tenants.system_principal(model.partition("/")[0]), model)
        except (TenantsError, RegistryError) as error:
            refused = error.message
        if refused:
            logger.warning("adapters.preload: an adapter is not preloaded: %s", refused)


async def _sweep(registry: Registry, usage: UsageService, models: BaseModels) -> None:
    await registry.name_bases(models)
    interrupted, contents = await usage.sweep(), await registry.blob_gc.sweep()
    if interrupted or contents:
        logger.info("after a crash: %d requests closed as interrupted, %d contents removed", interrupted, contents)
