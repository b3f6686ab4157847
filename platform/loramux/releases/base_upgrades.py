"""Base upgrades, moves of adapters from base to base: every revision of an alias is checked on the other base.

    begin     one row in `base_migrations`, one item for each revision; this server holds it by a lease
    check     the stored files against the target: shapes, limits, parity ──> a further revision of the same files,
              registered without moving any alias, in the transaction that writes the item
    evaluate  if the owner has evaluated the adapter before: the same questions to both revisions, as a batch
    decide    fits, needs retraining, or refused, each with the reason
    shift     an operator moves aliases to revisions that fit, by weight, and back (`BaseUpgrades.shift`)

If a server dies, another server adopts its upgrade and continues after the last decided item. No served revision
changes before `shift`. `shift` moves aliases in the same way as their owners, so release policies and canary guards
apply.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Collection, Sequence
from functools import partial
from http import HTTPStatus
from pathlib import Path

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from loramux.accounts.tenants.entities import Changes
from loramux.accounts.tenants.tenants import Tenants
from loramux.catalog.registry.aliases import MAX_WEIGHT
from loramux.catalog.registry.changes import Preconditions
from loramux.catalog.registry.entities import AdapterInfo, AliasInfo, WeightedRevision, etag
from loramux.catalog.registry.errors import InvalidChange, PreconditionFailed, ValidationUnavailable
from loramux.catalog.uploads.errors import UploadSuperseded
from loramux.catalog.uploads.ingest import Ingest, StagedUpload
from loramux.common.errors import LoramuxError
from loramux.common.identity import Principal, new_id
from loramux.common.jobs import JobRunner, ThreadPool
from loramux.data.entities import BaseUpgrade, Evaluation, UpgradeItem
from loramux.data.records.adapters import AdapterRepository, RevisionRow
from loramux.data.records.aliases import DEFAULT_ALIAS, ReleasePolicyRepository
from loramux.data.records.bases import (
    CANCELLED,
    COMPLETED,
    EVALUATING,
    FAILED,
    FITS,
    NEEDS_RETRAINING,
    OUTCOMES,
    PENDING,
    REFUSED,
    RUNNING,
    BaseUpgradeRepository,
    UpgradeReports,
)
from loramux.data.records.comparisons import RUNNING as EVALUATION_RUNNING
from loramux.data.records.comparisons import EvaluationRepository
from loramux.data.records.database import BASES, Database, advisory_lock
from loramux.data.records.errors import RecordsError
from loramux.data.storage.blobs import BlobCorrupt, BlobMissing, BlobStore, files_of
from loramux.data.storage.errors import StorageError
from loramux.releases.comparison import EvaluationResult
from loramux.releases.evaluations import Evaluations
from loramux.releases.graders import Grader, Judge
from loramux.releases.policies import EvaluationRule, ReleasePolicy, evaluated
from loramux.serving.adapters import AdapterService
from loramux.serving.errors import BaseConflict, InvalidBase, UnknownBase
from loramux.serving.lifecycle import BaseLifecycle

MAX_ATTEMPTS = 5
"""Maximum number of servers that die while they run the same upgrade."""
PAGE = 500
"""Maximum number of adapters that one call shifts."""
MAY_BE_RETRAINED = frozenset(
    {
        *("shape_mismatch", "tensors_missing", "tensors_unexpected", "target_unsupported", "no_module_matched"),
        *("base_differs", "outputs_not_finite"),
    }
)
"""Codes of refusals that the other base causes. The solution is to train the adapter for that base."""

logger = logging.getLogger(__name__)


class UpgradeNotFound(LoramuxError):
    """The base upgrade does not exist."""

    code = "base_migration_not_found"
    status = HTTPStatus.NOT_FOUND

    def __init__(self, id: str) -> None:
        super().__init__(f"there is no migration {id[:80]!r}; `loramux base migrations` lists them", "migration_id")


class Upgrade(msgspec.Struct, frozen=True, kw_only=True):
    """A base upgrade and its progress."""

    upgrade: BaseUpgrade
    counts: dict[str, int]
    """Revisions by outcome."""


class BaseUpgrades:
    """Migrations of every tenant's adapters. A tenant reads the results for its own adapters."""

    def __init__(
        self,
        *,
        database: Database,
        blobs: BlobStore,
        tenants: Tenants,
        lifecycle: BaseLifecycle,
        ingest: Ingest,
        adapters: AdapterService,
        evaluations: Evaluations,
        server_id: str,
    ) -> None:
        self._database = database
        self._blobs = blobs
        self._tenants = tenants
        self._lifecycle = lifecycle
        self._ingest = ingest
        self._adapters = adapters
        self._evaluations = evaluations
        self._server_id = server_id
        self._threads = ThreadPool("migrations", 1, 1)
        self._jobs: JobRunner[BaseUpgrade] = JobRunner("base migration", self._held, self._run)

    # operators

    async def begin(
        self,
        changes: Changes,
        *,
        source: str,
        target: str,
        tenant: str | None = None,
        adapter: str | None = None,
        evaluates: bool = True,
    ) -> Upgrade:
        """Check revisions for `source` on `target` in the background: of one tenant, of one `tenant/adapter`, or of all
        tenants.

        A repeated call while such an upgrade runs returns the running upgrade. Raises UnknownBase, InvalidBase,
        BaseConflict, TenantNotFound.
        """
        names = self._names(source, target)
        tenant, own = await self._scope(tenant, adapter)
        async with changes.begin() as change:
            await advisory_lock(change.session, BASES)
            repository = BaseUpgradeRepository(change.session)
            upgrade = BaseUpgrade(
                id=new_id("migration"),
                source=source,
                target=target,
                tenant=tenant,
                adapter=own,
                evaluates=int(evaluates),
                created_by=changes.actor.name,
                state=RUNNING,
                server_id=self._server_id,
                attempts=1,
                created_at=change.now,
            )
            found = await repository.running(upgrade)
            if found is None:
                if not await repository.begin(upgrade, names) and not self._lifecycle.knows(source):
                    raise UnknownBase(f"there is no base model {source[:80]!r}, and no adapter for one", "from")
                await change.note("base.migrate", upgrade.id, tenant=None, after=upgrade)
        self._jobs.look()
        return await self.get((found or upgrade).id)

    async def get(self, id: str) -> Upgrade:
        """Return an upgrade. Raises UpgradeNotFound."""
        async with self._database.read() as session:
            repository = BaseUpgradeRepository(session)
            found = await repository.get(id)
            if found is None:
                raise UpgradeNotFound(id)
            return Upgrade(upgrade=found, counts=(await repository.counts([id]))[id])

    async def newest(self, limit: int) -> list[Upgrade]:
        """List at most `limit` upgrades, newest first."""
        async with self._database.read() as session:
            repository = BaseUpgradeRepository(session)
            found = await repository.newest(limit)
            counts = await repository.counts([one.id for one in found])
        return [Upgrade(upgrade=one, counts=counts[one.id]) for one in found]

    async def items(
        self, id: str, outcomes: Sequence[str] = OUTCOMES, after: int = -1, limit: int = 100
    ) -> list[UpgradeItem]:
        """List at most `limit` revisions of an upgrade by position, after `after`. Raises UpgradeNotFound."""
        await self.get(id)
        async with self._database.read() as session:
            return await BaseUpgradeRepository(session).items(id, outcomes=outcomes, after=after, limit=limit)

    async def cancel(self, changes: Changes, id: str) -> Upgrade:
        """End a running upgrade. Revisions that it has registered remain. Raises UpgradeNotFound."""
        await self.get(id)
        async with changes.begin() as change:
            if await BaseUpgradeRepository(change.session).end(id, CANCELLED, change.now):
                await change.note("base.migrate.cancel", id, tenant=None)
        self._jobs.cancel(id)
        return await self.get(id)

    async def shift(
        self,
        operator: Principal,
        id: str,
        weight: int,
        *,
        tenant: str | None = None,
        adapter: str | None = None,
        after: int = -1,
    ) -> list[Shifted]:
        """Move `weight` percent of the share of every alias to new revisions that fit, and the remaining share to the
        old ones; 0 rolls back.

        One call moves at most PAGE revisions, beginning after `after`. If a revision cannot be moved, the other
        revisions are still moved. Raises UpgradeNotFound, InvalidChange, TenantNotFound.
        """
        await self.get(id)
        if not 0 <= weight <= 100:
            raise InvalidChange(f"weight is a percentage, 1 to 100; got {weight}", "weight")
        tenant, own = await self._scope(tenant, adapter)
        async with self._database.read() as session:
            items = await BaseUpgradeRepository(session).items(
                id, outcomes=(FITS,), tenant=tenant, adapter=own, after=after, limit=PAGE
            )
        return [await self._move_aliases(operator, item, weight) for item in items]

    async def _move_aliases(self, operator: Principal, item: UpgradeItem, weight: int) -> Shifted:
        """Give an item's new revision `weight` percent of the old revision's share of every alias; 0 rolls back."""
        system = await self._tenants.system_principal(item.tenant_name)
        principal = msgspec.structs.replace(system, key_id=operator.key_id, origin=operator.origin)
        moved: tuple[str, ...] = ()
        try:
            for tried in range(1, TRIES + 1):
                try:
                    moved += await _move(self._adapters, principal, item, weight)
                    break
                except PreconditionFailed:
                    if tried == TRIES:
                        raise
        except LoramuxError as error:
            if isinstance(error, RecordsError):
                raise
            return Shifted(item=item, aliases=moved, error=error)
        item = msgspec.structs.replace(item, weight=weight)
        async with self._database.begin() as session:
            await BaseUpgradeRepository(session).change(item)
        return Shifted(item=item, aliases=moved)

    # tenants

    async def reports(self, principal: Principal, limit: int) -> list[tuple[BaseUpgrade, UpgradeItem]]:
        """List the results of upgrades for at most `limit` revisions of the caller's adapters, newest upgrade first."""
        async with self._database.read() as session:
            found = await UpgradeReports(session, principal.tenant).newest(limit)
        return [(upgrade, item) for upgrade, item in found if principal.may_use(item.name)]

    # the job

    async def tend(self) -> None:
        """Adopt upgrades of dead servers, and go on with this server's own."""
        async with self._database.begin() as session:
            await BaseUpgradeRepository(session).adopt_abandoned(self._server_id)
        self._jobs.look()

    async def stop(self) -> None:
        """Stop. After a restart this server continues the upgrades, or another server does."""
        await self._jobs.stop()

    async def _held(self) -> Sequence[BaseUpgrade]:
        async with self._database.read() as session:
            return await BaseUpgradeRepository(session).held(self._server_id)

    async def _run(self, upgrade: BaseUpgrade) -> None:
        """Decide the undecided items. After a temporary error, a later run continues."""
        try:
            problem = self._problem(upgrade)
            if problem is None and self._lifecycle.models.named(upgrade.target) is None:
                return  # the target is being loaded
            if problem is None:
                while items := await self._open_items(upgrade, PENDING):
                    await self._check(upgrade, items[0])
                if not await self._judge_all(upgrade):
                    return
            async with self._database.begin() as session:
                await BaseUpgradeRepository(session).end(
                    upgrade.id,
                    COMPLETED if problem is None else FAILED,
                    self._database.now(),
                    server_id=self._server_id,
                    error=problem,
                )
        except (RecordsError, StorageError, ValidationUnavailable) as failure:
            logger.warning("the migration %s waits: %s", upgrade.id, failure)
        except UploadSuperseded as ended:
            logger.info("%s", ended)

    def _problem(self, upgrade: BaseUpgrade) -> str | None:
        """Return the reason why an upgrade can never go on, if there is one."""
        if upgrade.attempts > MAX_ATTEMPTS:
            return f"{MAX_ATTEMPTS} servers have died under it"
        known = {base.base_model: base for base in self._lifecycle.statuses()}
        target = known.get(upgrade.target)
        if target is None or target.state in ("draining", "retired"):
            return f"the base model {upgrade.target} was retired"
        return None

    async def _open_items(self, upgrade: BaseUpgrade, outcome: str, after: int = -1) -> list[UpgradeItem]:
        async with self._database.read() as session:
            repository = BaseUpgradeRepository(session)
            return await repository.items(upgrade.id, outcomes=(outcome,), after=after)

    async def _check(self, upgrade: BaseUpgrade, item: UpgradeItem) -> None:
        """Check one revision on the target and register it there, or write the reason of the refusal."""
        try:
            decided = await self._registered(upgrade, item)
        except (BlobMissing, BlobCorrupt) as error:
            decided = _refused(item, "files_damaged", f"its stored files are damaged: {error.message}")
        except (RecordsError, StorageError, ValidationUnavailable, UploadSuperseded):
            raise
        except LoramuxError as refusal:
            decided = _refused(item, refusal.code, refusal.message)
        except Exception:
            logger.exception("%s@%d could not be checked for %s", item.name, item.number, upgrade.target)
            decided = _refused(item, "internal_error", "The server failed while it checked the files.")
        if decided is not None:
            await self._decide(decided)

    async def _registered(self, upgrade: BaseUpgrade, item: UpgradeItem) -> UpgradeItem | None:
        """Register the revision for the target and write the item. Return the refusal if the revision does not fit."""
        async with self._database.read() as session:
            is_callable = await BaseUpgradeRepository(session).is_callable(item.revision_id)
        if not is_callable:
            return _refused(item, "revision_deleted", "It was deleted meanwhile.")
        principal = await self._tenants.system_principal(item.tenant_name)
        is_evaluated = bool(upgrade.evaluates) and await self._template(item) is not None
        with self._blobs.staging() as folder:
            await self._threads.run(principal.tenant, _copy, self._blobs, item.digest, folder)
            report, quota = await self._ingest.check_files(principal, folder, upgrade.target)
            if (refusal := report.refusal) is not None:
                outcome = NEEDS_RETRAINING if refusal.code in MAY_BE_RETRAINED else REFUSED
                return msgspec.structs.replace(item, outcome=outcome, code=refusal.code, reason=refusal.message)
            staged = StagedUpload(item.adapter, False, folder, report, quota)
            passed = msgspec.structs.replace(item, outcome=EVALUATING if is_evaluated else FITS)
            await self._ingest.register(principal, staged, partial(self._accept, passed))
        return None

    async def _accept(self, item: UpgradeItem, session: AsyncSession, revision: RevisionRow) -> None:
        """Write the item in the transaction that registers its revision; roll both back if this server has lost the
        upgrade.
        """
        repository = BaseUpgradeRepository(session)
        if not await repository.is_callable(item.revision_id):
            raise UploadSuperseded(f"{item.name}@{item.number} was deleted while it was migrated")
        await self._write(repository, msgspec.structs.replace(item, new_number=revision.number))

    async def _decide(self, item: UpgradeItem) -> None:
        async with self._database.begin() as session:
            await self._write(BaseUpgradeRepository(session), item)

    async def _write(self, repository: BaseUpgradeRepository, item: UpgradeItem) -> None:
        if not await repository.decide(item, self._server_id):
            raise UploadSuperseded(f"the migration {item.migration_id} was cancelled, or is another server's")

    # evaluations

    async def _template(self, item: UpgradeItem) -> Evaluation | None:
        """Return the evaluation of the tenant whose questions are used: with the release policy's set, or the newest
        evaluation.
        """
        policy = await self._policy(item)
        rule = None if policy is None else policy.evaluation
        async with self._database.read() as session:
            repository = EvaluationRepository(session, item.tenant_id)
            return await repository.newest_of(item.name, None if rule is None else rule.file_id)

    async def _policy(self, item: UpgradeItem) -> ReleasePolicy | None:
        async with self._database.read() as session:
            adapter = await AdapterRepository(session, item.tenant_id).get(item.adapter)
            row = None if adapter is None else await ReleasePolicyRepository(session).get(adapter.id, DEFAULT_ALIAS)
        return None if row is None else msgspec.json.decode(row.policy, type=ReleasePolicy)

    async def _judge_all(self, upgrade: BaseUpgrade) -> bool:
        """Begin missing evaluations, and judge those that have ended; return whether all are judged."""
        is_done, after = True, -1
        while items := await self._open_items(upgrade, EVALUATING, after):
            after = items[0].position
            is_done &= await self._judge(items[0])
        return is_done

    async def _judge(self, item: UpgradeItem) -> bool:
        assert item.new_number is not None, "it is registered"
        models = f"{item.name}@{item.new_number} {item.name}@{item.number}"
        async with self._database.read() as session:
            evaluation = await EvaluationRepository(session, item.tenant_id).newest_between(models)
        if evaluation is None:
            try:
                evaluation = await self._evaluate(item, item.new_number)
            except (RecordsError, StorageError):
                raise
            except LoramuxError as refusal:
                await self._decide(_unevaluated(item, refusal.message))
                return True
        if evaluation.state == EVALUATION_RUNNING:
            return False
        item = msgspec.structs.replace(item, evaluation_id=evaluation.id)
        if evaluation.result is None:
            await self._decide(_unevaluated(item, evaluation.error or "it failed"))
        else:
            result = msgspec.json.decode(evaluation.result, type=EvaluationResult)
            policy = await self._policy(item)
            await self._decide(_judged(item, result, None if policy is None else policy.evaluation))
        return True

    async def _evaluate(self, item: UpgradeItem, number: int) -> Evaluation:
        """Put the owner's questions to both revisions, in the owner's name. Raises LoramuxError."""
        template = await self._template(item)
        if template is None:
            raise InvalidChange("the evaluation that was to be repeated is gone")
        grader = msgspec.json.decode(template.grader, type=Grader)
        if isinstance(grader, Judge):
            raise InvalidChange("its grader is a judge, whose key is not kept; evaluate it yourself")
        principal = await self._tenants.authenticator.principal_behind(
            item.tenant_id, template.owner, template.project_id
        )
        return await self._evaluations.create(
            principal,
            adapter=item.name,
            revision=number,
            against=item.number,
            file_id=template.file_id,
            grader=grader,
        )

    # scopes

    def _names(self, source: str, target: str) -> tuple[str, ...]:
        """Return the current and the earlier names of the source. Raises UnknownBase, InvalidBase, BaseConflict."""
        lifecycle = self._lifecycle
        status = lifecycle.status(target)
        known = lifecycle.models.named(target)
        if source == target:
            raise InvalidBase("from and to are two base models", "to")
        if known is None:
            raise BaseConflict("base_not_serving", f"the base model {target!r} is {status.state} here", "to")
        old = lifecycle.models.named(source)
        if old is not None and old.description.architecture != known.description.architecture:
            raise InvalidBase(
                f"{source!r} is a {old.description.architecture} and {target!r} a {known.description.architecture}: "
                "adapters cannot move between architectures and must be trained again",
                "to",
            )
        return lifecycle.names_of(source)

    async def _scope(self, tenant: str | None, adapter: str | None) -> tuple[str | None, str | None]:
        """Return the tenant's and the adapter's own name. Raises InvalidChange, TenantNotFound."""
        own = None
        if adapter is not None:
            owner, slash, own = adapter.partition("/")
            if not slash or tenant not in (None, owner):
                raise InvalidChange("adapter is `tenant/adapter`, of the tenant if one is named", "adapter")
            tenant = owner
        if tenant is not None:
            await self._tenants.named(tenant)
        return tenant, own


def _copy(blobs: BlobStore, digest: str, folder: Path) -> None:
    """Copy a stored content into a staging folder, because a check may replace its files."""
    source = blobs.directory(digest)
    for name in files_of(source):
        shutil.copyfile(source / name, folder / name)


def _refused(item: UpgradeItem, code: str, reason: str) -> UpgradeItem:
    return msgspec.structs.replace(item, outcome=REFUSED, code=code, reason=reason)


def _unevaluated(item: UpgradeItem, reason: str) -> UpgradeItem:
    text = f"It fits by its shapes; its evaluation was not possible: {reason}"
    return msgspec.structs.replace(item, outcome=FITS, code="not_evaluated", reason=text)


def _judged(item: UpgradeItem, result: EvaluationResult, rule: EvaluationRule | None) -> UpgradeItem:
    """Decide by the owner's rule. Without a rule, a revision needs retraining if the evaluation proves that it is
    worse.
    """
    assert item.new_number is not None, "it was evaluated"
    if rule is not None:
        check = evaluated(rule, result, item.new_number, item.number)
        passed, reason = check.passed, check.message
    else:
        difference = result.difference
        passed = difference.high >= 0
        reason = (
            f"evaluation: @{item.new_number} scores {result.candidate.score.mean:.3f}, @{item.number} "
            f"{result.against.score.mean:.3f} on {result.questions} questions; the difference is "
            f"{difference.mean:+.3f}, its interval {difference.low:+.3f} to {difference.high:+.3f}"
        )
    if passed:
        return msgspec.structs.replace(item, outcome=FITS, reason=reason)
    return msgspec.structs.replace(item, outcome=NEEDS_RETRAINING, code="evaluated_worse", reason=reason)


TRIES = 3
"""Attempts to change an adapter that others change at the same time."""


class Shifted(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a shift for one revision."""

    item: UpgradeItem
    aliases: tuple[str, ...] = ()
    """The aliases that were moved."""
    error: LoramuxError | None = None
    """The reason why no alias, or not every alias, was moved."""


async def _move(adapters: AdapterService, principal: Principal, item: UpgradeItem, weight: int) -> tuple[str, ...]:
    moved = []
    info = await adapters.queries.get(principal, item.name)
    for alias in info.aliases:
        numbers = {target.revision for target in alias.targets}
        same = Preconditions(if_match=etag(info.version))
        if weight == 0 and item.new_number in numbers:
            info = await _roll_back(adapters, principal, item, alias, same)
        elif weight and (targets := _shares(alias, item, weight)) != alias.targets:
            info = await adapters.aliases.point(principal, item.name, alias.name, targets, same)
        else:
            continue
        moved.append(alias.name)
    return tuple(moved)


async def _roll_back(
    adapters: AdapterService, principal: Principal, item: UpgradeItem, alias: AliasInfo, same: Preconditions
) -> AdapterInfo:
    """Point an alias at the last targets that it had without the new revision."""
    for version in await adapters.queries.history(principal, item.name, alias.name):
        numbers = {target.revision for target in version.targets}
        if version.version < alias.version and numbers and item.new_number not in numbers:
            return await adapters.aliases.roll_back(principal, item.name, alias.name, version.version, same)
    raise InvalidChange(f"`{alias.name}` has had no targets without @{item.new_number}; point it yourself", "alias")


def _shares(alias: AliasInfo, item: UpgradeItem, weight: int) -> tuple[WeightedRevision, ...]:
    """Return an alias's targets after the new revision got `weight` percent of the share of the old and the new
    revision.

    All other targets keep their shares. Raises InvalidChange if integers up to MAX_WEIGHT cannot express these shares.
    """
    assert item.new_number is not None, "it fits"
    pair = (item.number, item.new_number)
    weights = {target.revision: target.weight for target in alias.targets}
    both = sum(weights.pop(number, 0) for number in pair)
    if not both:
        return alias.targets
    shares = {number: 100 * share for number, share in weights.items()}
    shares |= {item.number: both * (100 - weight), item.new_number: both * weight}
    targets = _reduced(shares)
    if max(targets.values()) > MAX_WEIGHT:
        raise InvalidChange(
            f"{weight}% of the weights of `{alias.name}` are no whole numbers; point it by hand", "weight"
        )
    if _reduced(weights | dict(_present(alias, pair))) == targets:
        return alias.targets
    return tuple(WeightedRevision(number, share) for number, share in sorted(targets.items()))


def _present(alias: AliasInfo, pair: Collection[int]) -> list[tuple[int, int]]:
    return [(target.revision, target.weight) for target in alias.targets if target.revision in pair]


def _reduced(shares: dict[int, int]) -> dict[int, int]:
    """Return the smallest whole numbers in the same proportion. A single target gets the weight of a whole alias."""
    present = {number: share for number, share in shares.items() if share}
    divisor = math.gcd(*present.values())
    return {number: 100 if len(present) == 1 else share // divisor for number, share in present.items()}
