"""/admin, which operators call: tenants, tiers, keys and the audit log; engines and their activity; the verification of
the ledger.

Base models and migrations are in `bases`, limits and budgets in `limits`, plans in `plans`.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable

import msgspec
from litestar import delete, get, patch, post, put
from litestar.di import NamedDependency
from litestar.params import JSONBody

from loramux.accounts.tenants.entities import Tenant
from loramux.accounts.tenants.tenants import Tenants
from loramux.common.logs import set_level
from loramux.money.billing.reconcile import LedgerProof
from loramux.money.exports.delivery import SinkDelivery
from loramux.money.usage.service import UsageService
from loramux.serving.adapters import AdapterService
from loramux.serving.bases import ServedBases
from loramux.serving.service import CompletionService
from loramux_api.bodies import DocumentRequest
from loramux_api.openapi import OperatorController
from loramux_api.parameters import MAX_PAGE, BeforeSequence, OptionalText, PageLimit, PathName
from loramux_api.peers import EngineOrder, EngineQuery, LevelOrder, Peers
from loramux_api.schemas.admin import (
    EngineObject,
    EngineOrderBody,
    LogLevelBody,
    OverviewObject,
    ServedTenant,
    TenantBody,
    TenantChange,
    TenantObject,
    TierBody,
    TierObject,
    engine_object,
    overview_object,
    tenant_object,
    tier_object,
)
from loramux_api.schemas.batches import Cursored, page_of
from loramux_api.schemas.operations import (
    ActivityObject,
    LedgerObject,
    ReconciliationObject,
    activity_object,
    ledger_object,
    reconciliation_object,
)
from loramux_api.schemas.tenancy import AuditObject, KeyBody, KeyObject, Listing, audit_object, key_object

logger = logging.getLogger(__name__)


class AdminTenantController(OperatorController):
    """Tenants and their keys."""

    path = "/admin/tenants"

    @get(summary="List tenants")
    async def list_tenants(self, operators: NamedDependency[Tenants]) -> Listing[TenantObject]:
        """List every tenant by name."""
        return Listing(data=[tenant_object(tenant) for tenant in await operators.list_tenants()])

    @post(summary="Create a tenant")
    async def create(self, data: JSONBody[TenantBody], operators: NamedDependency[Tenants]) -> TenantObject:
        """Create a tenant with the project `default` and no key."""
        return tenant_object(await operators.create(data.name, data.tier))

    @get("/{name:str}", summary="Describe a tenant")
    async def get_tenant(self, name: PathName, operators: NamedDependency[Tenants]) -> TenantObject:
        """Return one tenant."""
        return tenant_object(await operators.named(name))

    @patch("/{name:str}", summary="Change a tenant")
    async def change(
        self, name: PathName, data: JSONBody[TenantChange], operators: NamedDependency[Tenants]
    ) -> TenantObject:
        """Change a tenant's tier, suspend or resume it, set zero retention, allow judges. The change applies from the
        tenant's next request on.
        """
        tenant: Tenant = await operators.named(name)
        if isinstance(data.tier, str):
            tenant = await operators.move(name, data.tier)
        if isinstance(data.suspended, bool):
            tenant = await (operators.suspend(name) if data.suspended else operators.resume(name))
        if isinstance(data.zero_retention, bool):
            tenant = await operators.set_zero_retention(name, data.zero_retention)
        if isinstance(data.allow_judges, bool):
            tenant = await operators.set_allow_judges(name, data.allow_judges)
        return tenant_object(tenant)

    @get("/{name:str}/keys", summary="List a tenant's keys")
    async def list_keys(
        self,
        name: PathName,
        operators: NamedDependency[Tenants],
        after: OptionalText = None,
        limit: PageLimit = MAX_PAGE,
    ) -> Cursored[KeyObject]:
        """List a tenant's keys, oldest first, including revoked keys; `after` is the last id of the previous page."""
        found = await (await operators.account(name)).keys.after(after, limit + 1)
        return page_of([key_object(key) for key in found], limit, [key.id for key in found])

    @post("/{name:str}/keys", summary="Create a key", request_class=DocumentRequest)
    async def create_key(
        self, name: PathName, data: JSONBody[KeyBody], operators: NamedDependency[Tenants]
    ) -> KeyObject:
        """Create a key. Only this answer has its secret, in `key`."""
        return key_object(*await (await operators.account(name)).keys.create(data.request()))


class AdminEngineController(OperatorController):
    """The engines of this server."""

    path = "/admin/engines"

    @get(summary="List engines")
    async def list_engines(
        self, bases: NamedDependency[ServedBases], peers: NamedDependency[Peers]
    ) -> Listing[EngineObject]:
        """List the engines of every base with their state. `requests` are those of all workers of this server."""
        requests = Counter({status.engine: status.requests for status in bases.engines()})
        for statuses in (await peers.ask(EngineQuery())).values():
            requests.update({status.engine: status.requests for status in statuses})
        return Listing(
            data=[
                engine_object(msgspec.structs.replace(status, requests=requests[status.engine]))
                for status in bases.engines()
            ]
        )

    @post("/drain", status_code=202, summary="Drain an engine")
    async def drain(
        self, data: JSONBody[EngineOrderBody], bases: NamedDependency[ServedBases], peers: NamedDependency[Peers]
    ) -> EngineObject:
        """Send an engine no more requests, and stop it when its last request has ended. The engine stays stopped until
        it is restarted.
        """
        return await _order(EngineOrder(data.engine, restart=False, seconds=data.seconds), bases, peers)

    @post("/restart", status_code=202, summary="Restart an engine")
    async def restart(
        self, data: JSONBody[EngineOrderBody], bases: NamedDependency[ServedBases], peers: NamedDependency[Peers]
    ) -> EngineObject:
        """Drain an engine and start it again. When the engine serves, the list shows it as `ready`, with one more
        start.
        """
        return await _order(EngineOrder(data.engine, restart=True, seconds=data.seconds), bases, peers)


async def _order(order: EngineOrder, bases: ServedBases, peers: Peers) -> EngineObject:
    """Begin to carry out the order in every worker of this server. Raises UnknownEngine or EngineBusy."""
    status = bases.order_engine(order.engine, restart=order.restart, seconds=order.seconds)
    await peers.ask(order)
    return engine_object(status)


class AdminTierController(OperatorController):
    """Service tiers."""

    path = "/admin/tiers"

    @get(summary="List tiers")
    async def list_tiers(self, operators: NamedDependency[Tenants]) -> Listing[TierObject]:
        """List every tier by name."""
        return Listing(data=[tier_object(tier) for tier in await operators.tiers.all()])

    @put("/{name:str}", summary="Create or change a tier")
    async def put_tier(
        self, name: PathName, data: JSONBody[TierBody], operators: NamedDependency[Tenants]
    ) -> TierObject:
        """Create or change a tier. The change applies from the next requests of the tier's tenants on."""
        return tier_object(await operators.tiers.put(name, data.service_class, data.weight, data.service_tiers))

    @delete("/{name:str}", status_code=200, summary="Delete a tier")
    async def remove(self, name: PathName, operators: NamedDependency[Tenants]) -> TierObject:
        """Delete a tier. The tier must have no tenants."""
        return tier_object(await operators.tiers.remove(name))


class AdminController(OperatorController):
    """Keys by id, and the audit log."""

    path = "/admin"

    @get("/overview", summary="Overview")
    async def overview(
        self,
        completions: NamedDependency[CompletionService],
        usage: NamedDependency[UsageService],
        sinks: NamedDependency[SinkDelivery],
        started_at: NamedDependency[int],
        database_is_reachable: NamedDependency[Callable[[], Awaitable[bool]]],
        operators: NamedDependency[Tenants],
    ) -> OverviewObject:
        """Return health, queues, pools, and service by tenant, of all engines of this server at this moment."""
        weights = {tier.name: tier.weight for tier in await operators.tiers.all()}
        tenants = {
            str(tenant.id): ServedTenant(tenant.name, weights.get(tenant.tier, 1))
            for tenant in await operators.list_tenants()
        }
        return overview_object(
            completions,
            usage,
            sinks,
            tenants,
            started_at=started_at,
            at=time.time(),
            reachable=await database_is_reachable(),
        )

    @delete("/keys/{key_id:str}", status_code=200, summary="Revoke a key")
    async def revoke_key(self, key_id: PathName, operators: NamedDependency[Tenants]) -> KeyObject:
        """Revoke any tenant's key at once. This cannot be undone."""
        return key_object(await operators.revoke_key(key_id))

    @put("/log-level", summary="Set the log level")
    async def set_log_level(self, data: JSONBody[LogLevelBody], peers: NamedDependency[Peers]) -> LogLevelBody:
        """Set the lowest level that this server logs, until it restarts. The engine's process keeps its own level."""
        set_level(data.level)
        await peers.ask(LevelOrder(data.level))
        logger.warning("the log level is %s from now on", data.level)
        return data

    @get("/audit", summary="Read the audit log")
    async def audit(
        self,
        operators: NamedDependency[Tenants],
        tenant: OptionalText = None,
        before: BeforeSequence = None,
        limit: PageLimit = 100,
    ) -> Listing[AuditObject]:
        """List changes of all tenants or of one, newest first. `before` is the previous page's last sequence number."""
        tenant_id = (await operators.named(tenant)).id if tenant else None
        return Listing(
            data=[audit_object(e) for e in await operators.audit.read(tenant=tenant_id, before=before, limit=limit)]
        )


class AdminActivityController(OperatorController):
    """The running batch of each engine, and the ledger's proof."""

    path = "/admin"

    @get("/activity", summary="Activity of the engines")
    async def activity(
        self,
        bases: NamedDependency[ServedBases],
        adapters: NamedDependency[AdapterService],
        operators: NamedDependency[Tenants],
    ) -> Listing[ActivityObject]:
        """Return each engine's steps of the last minute that had work, by model and class, and the contents of its pool
        that are evicted next.
        """
        stats = [(base.name, one, found) for base in bases.values() for one, found in base.engines.stats().items()]
        digests = {
            digest
            for _, _, found in stats
            for digest in (
                *(row.digest for sample in found.meters.timeline for row in sample.rows),
                *(one.digest for one in found.meters.evictable),
            )
            if digest is not None
        }
        models = await adapters.queries.names_of(digests)
        tenants = {str(tenant.id): tenant.name for tenant in await operators.list_tenants()}
        return Listing(data=[activity_object(one, base, found.meters, models, tenants) for base, one, found in stats])

    @get("/ledger", summary="The ledger's proof")
    async def ledger(self, ledger_proof: NamedDependency[LedgerProof]) -> LedgerObject:
        """Return the head of the hash chain, its newest checkpoint, the position of each sink, and parked events."""
        return ledger_object(await ledger_proof.state())

    @post("/ledger/reconcile", status_code=200, summary="Reconcile the ledger")
    async def reconcile(self, ledger_proof: NamedDependency[LedgerProof]) -> ReconciliationObject:
        """Compute the whole chain again, and compare it with the engines' counts, closed months and checkpoints.

        Answers 409 while another reconciliation runs.
        """
        return reconciliation_object(await ledger_proof.reconcile())
