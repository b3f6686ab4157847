"""Events in the transactions that make them, and their way to webhooks that fail, come back, and are slow."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

import httpx
import msgspec
import pytest
import sqlalchemy as sa
import standardwebhooks

from loramux.accounts.tenants.account import KeyRequest
from loramux.accounts.tenants.errors import NotPermitted
from loramux.accounts.tenants.tenants import Tenants
from loramux.accounts.webhooks.dispatcher import LEASE, MAX_VISITS_PER_TENANT, _retry_after, webhook_client
from loramux.accounts.webhooks.endpoints import (
    Endpoint,
    EndpointNotFound,
    InvalidEndpoint,
    TooManyEndpoints,
    TooManyTests,
    WebhookEndpoints,
    WebhookService,
)
from loramux.accounts.webhooks.messages import endpoint_secret, write_secret
from loramux.common.identity import Principal
from loramux.common.public_http import NotPublic, Resolver
from loramux.common.settings.server import WebhookSettings
from loramux.data.entities import EventDetail, Refusal
from loramux.data.records.adapters import AdapterRepository, RevisionContent, Stamp
from loramux.data.records.contents import register_revision
from loramux.data.records.database import Database
from loramux.data.records.webhooks import (
    KINDS,
    READY,
    REJECTED,
    RETIRED,
    DeliveryRepository,
    EndpointRow,
    EventRepository,
    EventRow,
)

pytestmark = pytest.mark.anyio

PEPPER = b"p" * 32
OPEN = WebhookSettings(allow_private_addresses=True, max_per_tenant=3)
HOUR = 3600 * 1_000_000
Enrol = Callable[[str], Awaitable[Principal]]


@dataclass
class Receiver:
    """Answers by host; checks signatures; keeps what it has taken."""

    secrets: dict[str, str] = field(default_factory=dict)
    answers: dict[str, int] = field(default_factory=dict)
    poison: str = ""
    taken: list[tuple[str, str, dict]] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    retry_after: str = ""
    gates: dict[str, asyncio.Event] = field(default_factory=dict)
    """Hosts that answer only when their gate is open."""
    through: dict[str, httpx.AsyncBaseTransport] = field(default_factory=dict)
    """Hosts that are really called."""

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        host = request.url.host
        self.asked.append(host)
        if host in self.through:
            return await self.through[host].handle_async_request(request)
        if host in self.gates:
            await self.gates[host].wait()
        at = datetime.fromtimestamp(int(request.headers["webhook-timestamp"]), UTC)
        id, body = request.headers["webhook-id"], request.content.decode()
        signed = standardwebhooks.Webhook(self.secrets[host]).sign(id, at, body)
        assert request.headers["webhook-signature"] == signed
        status = 400 if self.poison and self.poison in body else self.answers.get(host, 204)
        if status == 0:
            raise httpx.ConnectError("refused")
        if status < 300:
            self.taken.append((host, id, json.loads(body)))
        return httpx.Response(status, headers={"Retry-After": self.retry_after} if self.retry_after else {})


class Harness:
    def __init__(self, database: Database, tenants: Tenants) -> None:
        self.now = 1_800_000_000_000_000
        database.now = lambda: self.now
        self.database, self.tenants, self.receiver = database, tenants, Receiver()
        client = httpx.AsyncClient(transport=httpx.MockTransport(self.receiver))
        self.webhooks = WebhookService(database, client, PEPPER, OPEN)

    def endpoints(self, who: Principal) -> WebhookEndpoints:
        return self.webhooks.endpoints(self.tenants.changes_by(who), who)

    async def listen(self, who: Principal, host: str, *kinds: str) -> Endpoint:
        made = await self.endpoints(who).create(f"https://{host}/hook", kinds or KINDS)
        self.receiver.secrets[host] = self.webhooks.secret(made)
        return made

    async def happen(self, who: Principal, adapter: str, kind: str = READY) -> None:
        self.now += 1
        async with self.database.begin() as session:
            await EventRepository(session, who.tenant).add(kind, adapter, EventDetail(revision=1, digest="d"), self.now)

    async def deliver(self, after: int = 0) -> list[str]:
        """Return the adapters of the messages that arrive after this time."""
        self.now += after
        before = len(self.receiver.taken)
        await self.webhooks.dispatcher.run()
        return [body["data"]["adapter"] for _, _, body in self.receiver.taken[before:]]


@pytest.fixture
def harness(database: Database, tenants: Tenants) -> Harness:
    return Harness(database, tenants)


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came")


def content(digest: str) -> RevisionContent:
    return RevisionContent(digest=digest, rank=4, size_bytes=1, base="base")


async def test_webhook_events_go_to_subscribed_endpoints(harness: Harness, enrol: Enrol) -> None:
    acme, globex = await enrol("acme"), await enrol("globex")
    await harness.listen(acme, "all.example")
    await harness.listen(acme, "retired.example", RETIRED)
    await harness.listen(globex, "globex.example")
    async with harness.database.begin() as session:
        adapters = AdapterRepository(session, acme.tenant)
        for digest in ("sha256:a", "sha256:b", "sha256:b"):
            harness.now += 1
            await register_revision(session, acme.tenant, "bot", content(digest), Stamp(harness.now, "k"))
    harness.now += 1
    async with harness.database.begin() as session:
        adapters = AdapterRepository(session, acme.tenant)
        adapter = await adapters.lock("bot")
        assert adapter is not None
        assert await adapters.delete(adapter, harness.now, harness.now)
    refusal = Refusal("nan", "not finite", "lora_A")
    async with harness.database.begin() as session:
        events = EventRepository(session, acme.tenant)
        await events.add(REJECTED, "bot", EventDetail(upload="u1", error=refusal), harness.now)
    await harness.webhooks.dispatcher.run()
    told = {(host, body["type"], body["data"].get("model")) for host, _, body in harness.receiver.taken}
    everything = {(READY, "acme/bot@1"), (READY, "acme/bot@2"), (RETIRED, "acme/bot@1"), (RETIRED, "acme/bot@2")}
    heard = {("all.example", *one) for one in everything | {(REJECTED, None)}}
    assert told == heard | {("retired.example", RETIRED, f"acme/bot@{number}") for number in (1, 2)}
    assert len(harness.receiver.taken) == len(told)
    rejected = next(body for _, _, body in harness.receiver.taken if body["type"] == REJECTED)
    assert rejected["data"] == {"adapter": "acme/bot", "upload": "u1", "error": msgspec.to_builtins(refusal)}
    assert await harness.deliver(HOUR) == []


async def test_webhook_event_of_a_rolled_back_change_is_not_sent(harness: Harness, enrol: Enrol) -> None:
    acme = await enrol("acme")
    await harness.listen(acme, "a.example")
    transaction = harness.database.begin()
    session = await transaction.__aenter__()
    await register_revision(session, acme.tenant, "bot", content("sha256:a"), Stamp(harness.now, "k"))
    assert not await transaction.__aexit__(RuntimeError, RuntimeError(), None)
    assert await harness.webhooks.events(acme, None, None, 10) == []
    assert await harness.deliver() == []


async def test_webhook_that_fails_pauses_and_is_retried(harness: Harness, enrol: Enrol) -> None:
    acme = await enrol("acme")
    bad = await harness.listen(acme, "bad.example")
    await harness.listen(acme, "good.example")
    harness.receiver.answers["bad.example"] = 500
    for name in ("a", "b", "c"):
        await harness.happen(acme, name)
    assert await harness.deliver() == ["acme/a", "acme/b", "acme/c"]
    assert harness.receiver.asked.count("bad.example") == 1
    assert await harness.deliver(4_000_000) == []
    assert harness.receiver.asked.count("bad.example") == 1
    logged = await harness.endpoints(acme).log(bad.id, 10)
    assert [(one.event.adapter, one.state, one.attempts, one.status) for one in logged] == [
        ("c", "pending", 0, None),
        ("b", "pending", 0, None),
        ("a", "pending", 1, 500),
    ]
    harness.receiver.answers["bad.example"] = 200
    ids = [id for host, id, _ in harness.receiver.taken if host == "good.example"]
    assert sorted(await harness.deliver(HOUR)) == ["acme/a", "acme/b", "acme/c"]
    assert sorted(id for host, id, _ in harness.receiver.taken if host == "bad.example") == sorted(ids)
    assert (await harness.endpoints(acme).get(bad.id)).failing_since is None


async def test_webhook_message_that_always_fails_delays_no_other(harness: Harness, enrol: Enrol) -> None:
    acme = await enrol("acme")
    hook = await harness.listen(acme, "a.example")
    harness.receiver.poison = "acme/poison"
    await harness.happen(acme, "poison")
    for _ in range(10):
        assert await harness.deliver() == []
        await harness.happen(acme, "fine")
        assert await harness.deliver(2 * HOUR) == ["acme/fine"]
        harness.now += 30 * HOUR
    assert await harness.deliver() == []
    poison = (await harness.endpoints(acme).log(hook.id, 50))[-1]
    assert (poison.event.adapter, poison.state, poison.attempts, poison.status) == ("poison", "failed", 10, 400)
    assert poison.next_attempt_at is None
    assert (await harness.endpoints(acme).get(hook.id)).disabled_at is None


@pytest.mark.parametrize(("answer", "wait", "why"), [(410, 0, "410"), (500, 121 * HOUR, "5 days")])
async def test_webhook_that_is_gone_is_disabled_until_enabled(
    harness: Harness, enrol: Enrol, answer: int, wait: int, why: str
) -> None:
    acme = await enrol("acme")
    hook = await harness.listen(acme, "a.example")
    harness.receiver.answers["a.example"] = answer
    await harness.happen(acme, "first")
    await harness.deliver()
    await harness.deliver(wait)
    off = await harness.endpoints(acme).get(hook.id)
    assert why in str(off.disabled_because)
    await harness.happen(acme, "unheard")
    harness.receiver.answers["a.example"] = 204
    assert await harness.deliver(100 * HOUR) == []
    assert (await harness.endpoints(acme).enable(hook.id)).disabled_at is None
    assert await harness.deliver() == ["acme/first"]


async def test_webhook_that_recovered_is_not_disabled(harness: Harness, enrol: Enrol) -> None:
    acme = await enrol("acme")
    hook = await harness.listen(acme, "a.example")
    harness.receiver.answers["a.example"] = 500
    await harness.happen(acme, "poison")
    await harness.deliver()
    await harness.deliver(119 * HOUR)
    harness.receiver.answers["a.example"], harness.receiver.poison = 204, "acme/poison"
    harness.now += 2 * HOUR
    await harness.happen(acme, "fine")
    assert await harness.deliver() == ["acme/fine"]
    assert harness.receiver.asked == ["a.example"] * 4
    back = await harness.endpoints(acme).get(hook.id)
    assert (back.disabled_at, back.failing_since) == (None, harness.now)


async def test_webhook_delivery_by_two_servers_is_once(harness: Harness, enrol: Enrol) -> None:
    acme = await enrol("acme")
    await harness.listen(acme, "a.example")
    await harness.listen(acme, "b.example")
    for number in range(20):
        await harness.happen(acme, f"a{number}")
    client = httpx.AsyncClient(transport=httpx.MockTransport(harness.receiver))
    other = WebhookService(harness.database, client, PEPPER, OPEN)
    assert sum(await asyncio.gather(harness.webhooks.dispatcher.run(), other.dispatcher.run())) == 40
    assert len({(host, id) for host, id, _ in harness.receiver.taken}) == 40


async def test_webhook_lease_of_a_dead_server_expires(harness: Harness, enrol: Enrol) -> None:
    acme = await enrol("acme")
    await harness.listen(acme, "a.example")
    await harness.happen(acme, "bot")
    async with harness.database.begin() as session:
        deliveries = DeliveryRepository(session)
        assert len(await deliveries.lease(await deliveries.due(harness.now), harness.now, harness.now + LEASE)) == 1
    assert await harness.deliver(LEASE - 1) == []
    assert await harness.deliver(1) == ["acme/bot"]


async def test_webhook_that_is_deleted_gets_nothing(harness: Harness, enrol: Enrol) -> None:
    acme, globex = await enrol("acme"), await enrol("globex")
    hook = await harness.listen(acme, "a.example")
    await harness.happen(acme, "bot")
    for act in (harness.endpoints(globex).remove, harness.endpoints(globex).get, harness.endpoints(globex).enable):
        with pytest.raises(EndpointNotFound):
            await act(hook.id)
    await harness.endpoints(acme).remove(hook.id)
    assert await harness.deliver() == []
    assert [event.adapter for event in await harness.webhooks.events(acme, None, None, 10)] == ["bot"]


async def test_webhook_events_are_paged_and_limited_to_a_keys_adapters(
    harness: Harness, enrol: Enrol, tenants: Tenants
) -> None:
    acme = await enrol("acme")
    for name in ("a", "b", "a", "b", "a"):
        await harness.happen(acme, name)
    first = await harness.webhooks.events(acme, "acme/a", None, 2)
    rest = await harness.webhooks.events(acme, "a", first[-1].id, 5)
    assert [event.adapter for event in first + rest] == ["a", "a", "a"]
    assert first[0].created_at > first[1].created_at > rest[0].created_at
    only_b = KeyRequest(scopes=frozenset({"read", "webhooks"}), models=frozenset({"acme/b"}))
    limited = await tenants.authenticator.authenticate((await (await tenants.account("acme")).keys.create(only_b))[1])
    assert {event.adapter for event in await harness.webhooks.events(limited, None, None, 10)} == {"b"}
    assert await harness.webhooks.events(limited, "a", None, 10) == []
    with pytest.raises(NotPermitted):
        await harness.listen(limited, "spy.example")
    harness.now += 91 * 24 * HOUR
    await harness.webhooks.dispatcher.forget()
    assert await harness.webhooks.events(acme, None, None, 10) == []


async def test_key_of_a_project_sees_no_batch_and_no_job_of_another_project(
    harness: Harness, enrol: Enrol, tenants: Tenants
) -> None:
    acme = await enrol("acme")
    account = await tenants.account("acme")
    own, other = [(await account.projects.create(name)).id for name in ("own", "other")]
    bound_key = (await account.keys.create(KeyRequest(scopes=frozenset({"read", "webhooks"}), project="own")))[1]
    bound = await tenants.authenticator.authenticate(bound_key)
    await harness.listen(bound, "bound.example")
    await harness.listen(acme, "all.example")
    at, detail = harness.now, EventDetail(batch="batch_1")
    async with harness.database.begin() as session:
        events = EventRepository(session, acme.tenant)
        for kind in ("batch.completed", "fine_tuning.job.failed"):
            for project in (own, other, None):  # None: written by an earlier release
                await events.add(kind, "", detail, at, project)
    await harness.happen(acme, "a")
    seen = await harness.webhooks.events(bound, None, None, 10)
    assert sorted(event.kind for event in seen) == [READY, "batch.completed", "fine_tuning.job.failed"]
    assert len(await harness.webhooks.events(acme, None, None, 10)) == 7
    await harness.webhooks.dispatcher.run()
    assert Counter(host for host, _, _ in harness.receiver.taken) == {"bound.example": 3, "all.example": 7}


REFUSED = {
    "http://hook.example/": "https://",
    "ftp://hook.example/": "https://",
    "https://user:pw@hook.example/": "without a user",
    "https://": "HOST",
    "nonsense": "HOST",
    "https://xn--0/": "HOST",
    "https://hook.example:port/": "HOST",
    "https://127.0.0.1/": "no public address",
    "https://localhost:8000/admin": "no public address",
    "https://[::ffff:10.0.0.1]/": "no public address",
    "https://169.254.169.254/latest/meta-data": "no public address",
}


async def test_webhook_address_that_is_not_public_is_refused(harness: Harness, enrol: Enrol) -> None:
    acme = await enrol("acme")
    endpoints = WebhookEndpoints(harness.tenants.changes_by(acme), acme.tenant, WebhookSettings(), Resolver("test"))
    for address, told in REFUSED.items():
        with pytest.raises(InvalidEndpoint, match=told):
            await endpoints.create(address)
    assert await endpoints.all() == []


async def test_webhook_port_is_one_that_the_operator_allows(harness: Harness, enrol: Enrol) -> None:
    acme = await enrol("acme")

    async def create(settings: WebhookSettings, url: str) -> None:
        changes = harness.tenants.changes_by(acme)
        await WebhookEndpoints(changes, acme.tenant, settings, Resolver("test")).create(url)

    for refused in ("https://93.184.216.34:22/", "https://93.184.216.34:6379/", "https://[2606:4700::1111]:25/"):
        with pytest.raises(InvalidEndpoint, match=r"one of 443, 8443; got"):
            await create(WebhookSettings(), refused)
    await create(WebhookSettings(), "https://93.184.216.34/")
    await create(WebhookSettings(), "https://93.184.216.34:8443/")
    with pytest.raises(InvalidEndpoint, match="one of 9443; got 443"):
        await create(WebhookSettings(ports=(9443,)), "https://93.184.216.34:443/")
    await create(WebhookSettings(ports=(9443,)), "https://93.184.216.34:9443/")


@pytest.mark.parametrize("url", ["https://93.184.216.34:22/", "http://93.184.216.34/", "https://93.184.216.34:9443/"])
async def test_webhook_to_a_port_that_is_not_allowed_any_more_is_not_called(url: str) -> None:
    """The operator may have narrowed the ports after the address was given."""
    async with webhook_client(WebhookSettings(), Resolver("test")) as client:
        with pytest.raises(NotPublic, match=r"the port \d+ is not allowed"):
            await client.post(url)


async def test_webhook_number_and_kinds_are_limited(harness: Harness, enrol: Enrol) -> None:
    acme = await enrol("acme")
    with pytest.raises(InvalidEndpoint, match=r"adapter\.revision\.ready"):
        await harness.listen(acme, "a.example", "nonsense")
    for number in range(3):
        await harness.listen(acme, f"h{number}.example")
    with pytest.raises(TooManyEndpoints, match="3 webhooks"):
        await harness.listen(acme, "one.too.many.example")
    audit = await harness.tenants.audit.read(tenant=acme.tenant, limit=1)
    assert audit[0].action == "webhook.create"


async def test_webhook_number_is_limited_for_creations_at_once(harness: Harness, enrol: Enrol) -> None:
    acme = await enrol("acme")
    made = [harness.endpoints(acme).create(f"https://h{number}.example/") for number in range(8)]
    ends = await asyncio.gather(*made, return_exceptions=True)
    assert sum(isinstance(end, TooManyEndpoints) for end in ends) == 5
    assert len(await harness.endpoints(acme).all()) == 3


async def test_webhook_tests_at_once_are_limited_by_tenant(harness: Harness, enrol: Enrol) -> None:
    acme, globex = await enrol("acme"), await enrol("globex")
    slow, quick = await harness.listen(acme, "slow.example"), await harness.listen(globex, "quick.example")
    gate = harness.receiver.gates["slow.example"] = asyncio.Event()
    running = [asyncio.create_task(harness.webhooks.test(slow, acme)) for _ in range(2)]
    await until(lambda: harness.receiver.asked.count("slow.example") == 2)
    with pytest.raises(TooManyTests, match="2 tests are running"):
        await harness.webhooks.test(slow, acme)
    assert (await harness.webhooks.test(quick, globex)).delivered
    gate.set()
    assert all(attempt.delivered for attempt in await asyncio.gather(*running))
    assert (await harness.webhooks.test(slow, acme)).delivered


async def test_webhook_deliveries_of_a_server_that_stops_are_free_at_once(harness: Harness, enrol: Enrol) -> None:
    acme = await enrol("acme")
    await harness.listen(acme, "slow.example")
    harness.receiver.gates["slow.example"] = asyncio.Event()
    await harness.happen(acme, "a")
    await harness.happen(acme, "b")
    running = asyncio.create_task(harness.webhooks.dispatcher.run())
    await until(lambda: "slow.example" in harness.receiver.asked)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    del harness.receiver.gates["slow.example"]
    assert await harness.deliver() == ["acme/a", "acme/b"]


async def test_webhook_redirect_is_a_failure_and_is_not_followed(harness: Harness, enrol: Enrol) -> None:
    acme = await enrol("acme")
    hook = await harness.listen(acme, "a.example")
    harness.receiver.answers["a.example"] = 302
    await harness.happen(acme, "bot")
    assert await harness.deliver() == []
    [logged] = await harness.endpoints(acme).log(hook.id, 10)
    assert (logged.state, logged.status, harness.receiver.asked) == ("pending", 302, ["a.example"])
    async with webhook_client(OPEN, Resolver("test")) as client:
        assert not client.follow_redirects


async def test_webhook_retry_after_postpones_the_next_attempt(harness: Harness, enrol: Enrol) -> None:
    acme = await enrol("acme")
    hook = await harness.listen(acme, "a.example")
    harness.receiver.answers["a.example"], harness.receiver.retry_after = 503, "7200"
    await harness.happen(acme, "bot")
    assert await harness.deliver() == []
    [logged] = await harness.endpoints(acme).log(hook.id, 10)
    assert logged.next_attempt_at == harness.now + 2 * HOUR
    harness.receiver.answers["a.example"] = 204
    assert await harness.deliver(2 * HOUR - 1) == []
    assert len(harness.receiver.asked) == 1
    assert await harness.deliver(1) == ["acme/bot"]


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("120", 120_000_000),
        ("Fri, 15 Jan 2027 08:10:00 GMT", 600_000_000),
        ("Fri, 15 Jan 2027 07:00:00 GMT", 0),
        ("99999999999999999999", 24 * HOUR),
        ("soon", None),
        ("", None),
        ("-5", None),
        ("\u0661", None),
    ],
)
def test_webhook_retry_after_is_seconds_or_a_date_and_bounded(header: str, expected: int | None) -> None:
    response = httpx.Response(503, headers={"Retry-After": header.encode()})
    assert _retry_after(response, 1_800_000_000_000_000) == expected


async def test_webhook_port_out_of_range_is_refused_and_stops_nothing(harness: Harness, enrol: Enrol) -> None:
    """A port above 65535 once raised OverflowError out of the dispatcher again and again."""
    acme = await enrol("acme")
    for port in ("70000", "0", "-1", "99999999999999999999"):
        with pytest.raises(InvalidEndpoint):
            await harness.endpoints(acme).create(f"https://hook.example:{port}/")
    bad = await harness.listen(acme, "bad.example")
    await harness.listen(acme, "good.example")
    async with harness.database.begin() as session:
        await session.execute(
            sa.update(EndpointRow).where(EndpointRow.id == bad.id).values(url="https://127.0.0.1:70000/")
        )
    transport = httpx.AsyncHTTPTransport()
    harness.receiver.through["127.0.0.1"] = transport
    await harness.happen(acme, "bot")
    assert await harness.deliver() == ["acme/bot"]
    [logged] = await harness.endpoints(acme).log(bad.id, 10)
    assert (logged.state, logged.attempts) == ("pending", 1)
    await transport.aclose()


async def test_webhook_event_that_is_damaged_is_quarantined(harness: Harness, enrol: Enrol) -> None:
    acme, globex = await enrol("acme"), await enrol("globex")
    hook = await harness.listen(acme, "a.example")
    await harness.listen(globex, "b.example")
    await harness.happen(acme, "damaged")
    await harness.happen(acme, "fine")
    await harness.happen(globex, "fine")
    async with harness.database.begin() as session:
        await session.execute(sa.update(EventRow).where(EventRow.adapter == "damaged").values(detail="{"))
    assert sorted(await harness.deliver()) == ["acme/fine", "globex/fine"]
    async with harness.database.begin() as session:
        await session.execute(sa.update(EventRow).where(EventRow.adapter == "damaged").values(detail="{}"))
    logged = {one.event.adapter: one for one in await harness.endpoints(acme).log(hook.id, 10)}
    assert (logged["damaged"].state, logged["fine"].state) == ("failed", "delivered")
    assert await harness.deliver(HOUR) == []


async def test_webhook_that_is_slow_delays_no_other_endpoint(harness: Harness, enrol: Enrol) -> None:
    """While one endpoint takes its time, new events of others are delivered."""
    acme, globex = await enrol("acme"), await enrol("globex")
    await harness.listen(acme, "slow.example")
    await harness.listen(globex, "quick.example")
    gate = harness.receiver.gates["slow.example"] = asyncio.Event()
    await harness.happen(acme, "bot")
    running = asyncio.create_task(harness.webhooks.dispatcher.run())
    await until(lambda: "slow.example" in harness.receiver.asked)
    await harness.happen(globex, "late")
    await until(lambda: "quick.example" in [host for host, _, _ in harness.receiver.taken])
    assert not running.done()
    gate.set()
    assert await running == 2


async def test_webhook_deliveries_of_one_tenant_are_bounded(harness: Harness, enrol: Enrol) -> None:
    acme, globex = await enrol("acme"), await enrol("globex")
    gate = asyncio.Event()
    async with harness.database.begin() as session:
        for number in range(20):
            row = EndpointRow(
                id=f"whk_{number}", tenant_id=acme.tenant, url=f"https://h{number}.example/", events=" ".join(KINDS),
                created_at=harness.now, failures=0, quiet_until=0,
            )  # fmt: skip
            session.add(row)
            host = f"h{number}.example"
            harness.receiver.secrets[host] = write_secret(endpoint_secret(PEPPER, row.id))
            harness.receiver.gates[host] = gate
    await harness.listen(globex, "quick.example")
    await harness.happen(acme, "bot")
    await harness.happen(globex, "bot")
    running = asyncio.create_task(harness.webhooks.dispatcher.run())
    await until(lambda: len(harness.receiver.asked) > MAX_VISITS_PER_TENANT)
    await asyncio.sleep(0.05)
    assert len(harness.receiver.asked) == MAX_VISITS_PER_TENANT + 1
    assert [host for host, _, _ in harness.receiver.taken] == ["quick.example"]
    gate.set()
    assert await running == 21
