"""The house, put together from its settings: records, tenants, registry, usage, engine, and what answers requests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from loramux import records
from loramux.billing import Billing, Catalog, PlanPrices
from loramux.engine import EngineClient, spawn_engine
from loramux.exports import AlertDelivery, Delivery, Sink, WebhookSink, make_sink
from loramux.gateway.adapters import AdapterService
from loramux.gateway.chores import every
from loramux.gateway.local_folders import LocalFolders
from loramux.gateway.service import CompletionService
from loramux.gateway.tokenizer import Tokenizer
from loramux.registry import Registry, RegistryError
from loramux.settings import RecordsSettings, Settings, SettingsError
from loramux.storage import BlobStore, StorageUnavailable, open_blobs
from loramux.tenants import Tenants, TenantsError, load_or_create_pepper
from loramux.uploads import Uploads
from loramux.usage import Usage
from loramux.validation import Validator
from loramux.webhooks import Webhooks, webhook_client

if TYPE_CHECKING:
    from loramux_adapters import BaseDescription

HOUSE_SECONDS = 10.0
STORAGE_SECONDS = 3600.0
FORGET_SECONDS = 3600.0
CACHE_SECONDS = 60.0
UPLOAD_SECONDS = 15.0
UPLOAD_SWEEP_SECONDS = 3600.0
DELIVERY_SECONDS = 10.0
SINK_SECONDS = 20.0
WEBHOOK_SECONDS = 1.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Platform:
    """Everything that a server serves from."""

    settings: Settings
    started_at: int
    """Unix seconds."""
    tenants: Tenants
    adapters: AdapterService
    uploads: Uploads
    usage: Usage
    billing: Billing
    engine: EngineClient
    completions: CompletionService
    webhooks: Webhooks
    local_folders: LocalFolders


@dataclass(frozen=True, slots=True)
class BillingDesk:
    """What an operator's billing commands work with."""

    database: records.Database
    usage: Usage
    billing: Billing
    catalog: Catalog


def migrate(settings: Settings) -> str:
    """Bring the database to this release's schema, and return its revision."""
    return records.migrate(settings.records.url)


@asynccontextmanager
async def open_tenants(settings: Settings) -> AsyncIterator[Tenants]:
    """Tenants and keys alone, for the command line: no model is loaded."""
    async with _open_database(settings) as database, aclosing(_tenants(settings, database)) as tenants:
        yield tenants


@asynccontextmanager
async def open_billing(settings: Settings) -> AsyncIterator[BillingDesk]:
    """The ledger and the money alone, for the command line: no model is loaded."""
    async with _open_database(settings) as database:
        yield BillingDesk(database, Usage(database), Billing(database), Catalog(database))


async def open_sinks(settings: Settings, stack: AsyncExitStack) -> list[Sink]:
    """The sinks of the settings, whose connections close with `stack`. Raises ExportError."""
    clients = [await stack.enter_async_context(httpx.AsyncClient(timeout=SINK_SECONDS)) for _ in settings.sinks]
    return [make_sink(sink, client) for sink, client in zip(settings.sinks, clients, strict=True)]


@asynccontextmanager
async def open_platform(settings: Settings, engine: EngineClient | None = None) -> AsyncIterator[Platform]:
    """The whole house, swept and serving; at the end it drains, and stops everything in reverse order.

    `engine` takes the place of the one that the settings ask for. Raises RecordsError, SettingsError, TenantsError,
    or EngineDied where the model cannot be loaded.
    """
    async with AsyncExitStack() as stack:
        database = await stack.enter_async_context(_open_database(settings))
        tenants = await stack.enter_async_context(aclosing(_tenants(settings, database)))
        tenants.last_use.start()
        blobs = _open_blobs(settings.records)
        stack.callback(blobs.close)
        usage = Usage(database, PlanPrices(database, settings.model.served_model_name))
        await usage.start()
        stack.push_async_callback(usage.stop)
        engine = engine or spawn_engine(settings)
        stack.push_async_callback(engine.stop)
        facts, (base, tokenizer) = await asyncio.gather(engine.start(), _describe(Path(settings.model.path)))
        validator = Validator(settings, base, facts.dtype)
        stack.callback(validator.close)
        registry = Registry(database, blobs, base, settings.model.served_model_name, settings.adapters, validator)
        await _sweep(registry, usage)
        uploads = Uploads(database, blobs, registry, tenants, settings, usage.server_id)
        stack.push_async_callback(uploads.workshop.stop)
        adapters = AdapterService(registry, engine)
        await _preload(settings, tenants, adapters)
        completions = CompletionService(
            engine=engine,
            facts=facts,
            registry=registry,
            usage=usage,
            tokenizer=tokenizer,
            share_base_cache=settings.engine.share_base_cache_between_projects,
        )
        stack.push_async_callback(completions.drain, settings.server.drain_seconds)
        await stack.enter_async_context(every(STORAGE_SECONDS, usage.accrue))
        await stack.enter_async_context(every(FORGET_SECONDS, usage.forget_answers))
        await stack.enter_async_context(every(UPLOAD_SECONDS, uploads.workshop.tend))
        await stack.enter_async_context(every(UPLOAD_SWEEP_SECONDS, uploads.workshop.sweep))
        trim_cache = partial(registry.contents.trim_cache, settings.records.cache_bytes)
        await stack.enter_async_context(every(CACHE_SECONDS, trim_cache))
        await stack.enter_async_context(every(HOUSE_SECONDS, adapters.keep_house))
        webhooks = await _tell_others(settings, database, stack)
        yield Platform(
            settings=settings,
            started_at=int(time.time()),
            tenants=tenants,
            adapters=adapters,
            uploads=uploads,
            usage=usage,
            billing=Billing(database),
            engine=engine,
            completions=completions,
            webhooks=webhooks,
            local_folders=LocalFolders(adapters, settings.adapters.local_root),
        )


async def _tell_others(settings: Settings, database: records.Database, stack: AsyncExitStack) -> Webhooks:
    """Deliver usage and alerts to the operator's sinks, and events to the tenants' own webhooks, until `stack` ends."""
    sinks = await open_sinks(settings, stack)
    if listening := [sink for sink in sinks if isinstance(sink, WebhookSink)]:
        await stack.enter_async_context(every(DELIVERY_SECONDS, AlertDelivery(database, listening).run))
    for sink in sinks:
        await stack.enter_async_context(every(DELIVERY_SECONDS, partial(Delivery(database).run, sink)))
    client = await stack.enter_async_context(webhook_client(settings.webhooks))
    webhooks = Webhooks(database, client, _pepper(settings), settings.webhooks)
    await stack.enter_async_context(every(FORGET_SECONDS, webhooks.courier.forget))
    await stack.enter_async_context(every(WEBHOOK_SECONDS, webhooks.courier.run))
    return webhooks


def _open_blobs(settings: RecordsSettings) -> BlobStore:
    try:
        return open_blobs(settings.blobs, settings.cache, settings.blob_options)
    except StorageUnavailable as error:
        raise SettingsError(f"records.blobs: {error}") from None


def _tenants(settings: Settings, database: records.Database) -> Tenants:
    return Tenants(database, _pepper(settings), settings.issuers)


def _pepper(settings: Settings) -> bytes:
    return load_or_create_pepper(Path(settings.records.pepper_file))


@asynccontextmanager
async def _open_database(settings: Settings) -> AsyncIterator[records.Database]:
    """The database at this release's schema: an embedded one is brought there, another must be there already."""
    url = settings.records.url
    await asyncio.to_thread(records.migrate if url.startswith("sqlite:") else records.check, url)
    database = records.Database(url)
    try:
        yield database
    finally:
        await database.close()


async def _describe(model_dir: Path) -> tuple[BaseDescription, Tokenizer]:
    return await asyncio.to_thread(_describe_base, model_dir), await asyncio.to_thread(Tokenizer.load, model_dir)


def _describe_base(model_dir: Path) -> BaseDescription:
    from loramux_adapters import BaseUnusable, describe_base  # torch: not for those who only make a key

    try:
        return describe_base(model_dir)
    except BaseUnusable as error:
        raise SettingsError(f"model.path: {error}") from None


async def _preload(settings: Settings, tenants: Tenants, adapters: AdapterService) -> None:
    """What cannot be preloaded is loaded when it is asked for, like any other: a reason to warn, not to stop."""
    for model in settings.adapters.preload:
        try:
            refused = await adapters.preload(await tenants.representing(model.partition("/")[0]), model)
        except (TenantsError, RegistryError) as error:
            refused = error.message
        if refused:
            logger.warning("adapters.preload: an adapter is not preloaded: %s", refused)


async def _sweep(registry: Registry, usage: Usage) -> None:
    interrupted, contents = await usage.sweep(), await registry.contents.sweep()
    if interrupted or contents:
        logger.info("after a crash: %d requests closed as interrupted, %d contents removed", interrupted, contents)
