"""Events in the transactions that make them, and their way to webhooks that fail, come back, and are slow."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

import httpx
import msgspec
import pytest
import standardwebhooks

from loramux.records import Database, Principal
from loramux.records.adapters import AdapterRepository, RevisionContent
from loramux.records.aliases import Stamp
from loramux.records.events import KINDS, READY, REJECTED, RETIRED, Detail, EventRepository, Refusal
from loramux.records.webhooks import DeliveryRepository
from loramux.settings import WebhookSettings
from loramux.tenants import KeyRequest, NotPermitted, Tenants
from loramux.webhooks import Endpoint, EndpointNotFound, Endpoints, InvalidEndpoint, TooManyEndpoints, Webhooks
from loramux.webhooks.courier import LEASE

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

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        host = request.url.host
        self.asked.append(host)
        at = datetime.fromtimestamp(int(request.headers["webhook-timestamp"]), UTC)
        id, body = request.headers["webhook-id"], request.content.decode()
        signed = standardwebhooks.Webhook(self.secrets[host]).sign(id, at, body)
        assert request.headers["webhook-signature"] == signed
        status = 400 if self.poison and self.poison in body else self.answers.get(host, 204)
        if status == 0:
            raise httpx.ConnectError("refused")
        if status < 300:
            self.taken.append((host, id, json.loads(body)))
        return httpx.Response(status)


class House:
    def __init__(self, database: Database, tenants: Tenants) -> None:
        self.now = 1_800_000_000_000_000
        database.now = lambda: self.now
        self.database, self.tenants, self.receiver = database, tenants, Receiver()
        client = httpx.AsyncClient(transport=httpx.MockTransport(self.receiver))
        self.webhooks = Webhooks(database, client, PEPPER, OPEN)

    def endpoints(self, who: Principal) -> Endpoints:
        return self.webhooks.endpoints(self.tenants.changes_of(who), who)

    async def listen(self, who: Principal, host: str, *kinds: str) -> Endpoint:
        made = await self.endpoints(who).create(f"https://{host}/hook", kinds or KINDS)
        self.receiver.secrets[host] = self.webhooks.secret(made)
        return made

    async def happen(self, who: Principal, adapter: str, kind: str = READY) -> None:
        self.now += 1
        async with self.database.begin() as session:
            await EventRepository(session, who.tenant).add(kind, adapter, Detail(revision=1, digest="d"), self.now)

    async def deliver(self, after: int = 0) -> list[str]:
        """What arrives once that much time has passed: adapters."""
        self.now += after
        before = len(self.receiver.taken)
        await self.webhooks.courier.run()
        return [body["data"]["adapter"] for _, _, body in self.receiver.taken[before:]]


@pytest.fixture
def house(database: Database, tenants: Tenants) -> House:
    return House(database, tenants)


def content(digest: str) -> RevisionContent:
    return RevisionContent(digest=digest, rank=4, size_bytes=1, base="base")


async def test_an_adapters_changes_are_told_to_those_who_asked_for_them(house: House, enrol: Enrol) -> None:
    acme, globex = await enrol("acme"), await enrol("globex")
    await house.listen(acme, "all.example")
    await house.listen(acme, "retired.example", RETIRED)
    await house.listen(globex, "globex.example")
    async with house.database.begin() as session:
        adapters = AdapterRepository(session, acme.tenant)
        for digest in ("sha256:a", "sha256:b", "sha256:b"):
            house.now += 1
            await adapters.register("bot", content(digest), Stamp(house.now, "k"))
    house.now += 1
    async with house.database.begin() as session:
        adapters = AdapterRepository(session, acme.tenant)
        adapter = await adapters.lock("bot")
        assert adapter is not None
        assert await adapters.delete(adapter, house.now, house.now)
    refusal = Refusal("nan", "not finite", "lora_A")
    async with house.database.begin() as session:
        events = EventRepository(session, acme.tenant)
        await events.add(REJECTED, "bot", Detail(upload="u1", error=refusal), house.now)
    await house.webhooks.courier.run()
    told = {(host, body["type"], body["data"].get("model")) for host, _, body in house.receiver.taken}
    everything = {(READY, "acme/bot@1"), (READY, "acme/bot@2"), (RETIRED, "acme/bot@1"), (RETIRED, "acme/bot@2")}
    heard = {("all.example", *one) for one in everything | {(REJECTED, None)}}
    assert told == heard | {("retired.example", RETIRED, f"acme/bot@{number}") for number in (1, 2)}
    assert len(house.receiver.taken) == len(told)
    rejected = next(body for _, _, body in house.receiver.taken if body["type"] == REJECTED)
    assert rejected["data"] == {"adapter": "acme/bot", "upload": "u1", "error": msgspec.to_builtins(refusal)}
    assert await house.deliver(HOUR) == []


async def test_what_is_rolled_back_did_not_happen(house: House, enrol: Enrol) -> None:
    acme = await enrol("acme")
    await house.listen(acme, "a.example")
    transaction = house.database.begin()
    session = await transaction.__aenter__()
    await AdapterRepository(session, acme.tenant).register("bot", content("sha256:a"), Stamp(house.now, "k"))
    assert not await transaction.__aexit__(RuntimeError, RuntimeError(), None)
    assert await house.webhooks.events(acme, None, None, 10) == []
    assert await house.deliver() == []


async def test_a_webhook_that_fails_is_left_alone_and_tried_again(house: House, enrol: Enrol) -> None:
    acme = await enrol("acme")
    bad = await house.listen(acme, "bad.example")
    await house.listen(acme, "good.example")
    house.receiver.answers["bad.example"] = 500
    for name in ("a", "b", "c"):
        await house.happen(acme, name)
    assert await house.deliver() == ["acme/a", "acme/b", "acme/c"]
    assert house.receiver.asked.count("bad.example") == 1
    assert await house.deliver(4_000_000) == []
    assert house.receiver.asked.count("bad.example") == 1
    logged = await house.endpoints(acme).log(bad.id, 10)
    assert [(one.event.adapter, one.state, one.attempts, one.status) for one in logged] == [
        ("c", "pending", 0, None),
        ("b", "pending", 0, None),
        ("a", "pending", 1, 500),
    ]
    house.receiver.answers["bad.example"] = 200
    ids = [id for host, id, _ in house.receiver.taken if host == "good.example"]
    assert sorted(await house.deliver(HOUR)) == ["acme/a", "acme/b", "acme/c"]
    assert sorted(id for host, id, _ in house.receiver.taken if host == "bad.example") == sorted(ids)
    assert (await house.endpoints(acme).get(bad.id)).failing_since is None


async def test_one_message_that_is_never_taken_holds_up_no_other_and_is_given_up(house: House, enrol: Enrol) -> None:
    acme = await enrol("acme")
    hook = await house.listen(acme, "a.example")
    house.receiver.poison = "acme/poison"
    await house.happen(acme, "poison")
    for _ in range(10):
        assert await house.deliver() == []
        await house.happen(acme, "fine")
        assert await house.deliver(2 * HOUR) == ["acme/fine"]
        house.now += 30 * HOUR
    assert await house.deliver() == []
    poison = (await house.endpoints(acme).log(hook.id, 50))[-1]
    assert (poison.event.adapter, poison.state, poison.attempts, poison.status) == ("poison", "failed", 10, 400)
    assert poison.next_attempt_at is None
    assert (await house.endpoints(acme).get(hook.id)).disabled_at is None


@pytest.mark.parametrize(("answer", "wait", "why"), [(410, 0, "410"), (500, 121 * HOUR, "5 days")])
async def test_a_webhook_that_is_gone_is_switched_off_until_its_owner_switches_it_on(
    house: House, enrol: Enrol, answer: int, wait: int, why: str
) -> None:
    acme = await enrol("acme")
    hook = await house.listen(acme, "a.example")
    house.receiver.answers["a.example"] = answer
    await house.happen(acme, "first")
    await house.deliver()
    await house.deliver(wait)
    off = await house.endpoints(acme).get(hook.id)
    assert why in str(off.disabled_because)
    await house.happen(acme, "unheard")
    house.receiver.answers["a.example"] = 204
    assert await house.deliver(100 * HOUR) == []
    assert (await house.endpoints(acme).enable(hook.id)).disabled_at is None
    assert await house.deliver() == ["acme/first"]


async def test_a_webhook_that_has_come_back_is_not_switched_off_for_what_was(house: House, enrol: Enrol) -> None:
    acme = await enrol("acme")
    hook = await house.listen(acme, "a.example")
    house.receiver.answers["a.example"] = 500
    await house.happen(acme, "poison")
    await house.deliver()
    await house.deliver(119 * HOUR)
    house.receiver.answers["a.example"], house.receiver.poison = 204, "acme/poison"
    house.now += 2 * HOUR
    await house.happen(acme, "fine")
    assert await house.deliver() == ["acme/fine"]
    assert house.receiver.asked == ["a.example"] * 4
    back = await house.endpoints(acme).get(hook.id)
    assert (back.disabled_at, back.failing_since) == (None, house.now)


async def test_two_servers_tell_everything_once(house: House, enrol: Enrol) -> None:
    acme = await enrol("acme")
    await house.listen(acme, "a.example")
    await house.listen(acme, "b.example")
    for number in range(20):
        await house.happen(acme, f"a{number}")
    client = httpx.AsyncClient(transport=httpx.MockTransport(house.receiver))
    other = Webhooks(house.database, client, PEPPER, OPEN)
    assert sum(await asyncio.gather(house.webhooks.courier.run(), other.courier.run())) == 40
    assert len({(host, id) for host, id, _ in house.receiver.taken}) == 40


async def test_what_a_server_took_with_it_when_it_died_is_told_by_another(house: House, enrol: Enrol) -> None:
    acme = await enrol("acme")
    await house.listen(acme, "a.example")
    await house.happen(acme, "bot")
    async with house.database.begin() as session:
        deliveries = DeliveryRepository(session)
        assert len(await deliveries.lease(await deliveries.due(house.now), house.now, house.now + LEASE)) == 1
    assert await house.deliver(LEASE - 1) == []
    assert await house.deliver(1) == ["acme/bot"]


async def test_a_deleted_webhook_is_told_nothing(house: House, enrol: Enrol) -> None:
    acme, globex = await enrol("acme"), await enrol("globex")
    hook = await house.listen(acme, "a.example")
    await house.happen(acme, "bot")
    for act in (house.endpoints(globex).remove, house.endpoints(globex).get, house.endpoints(globex).enable):
        with pytest.raises(EndpointNotFound):
            await act(hook.id)
    await house.endpoints(acme).remove(hook.id)
    assert await house.deliver() == []
    assert [event.adapter for event in await house.webhooks.events(acme, None, None, 10)] == ["bot"]


async def test_events_are_read_in_pages_by_who_may_name_their_adapters(
    house: House, enrol: Enrol, tenants: Tenants
) -> None:
    acme = await enrol("acme")
    for name in ("a", "b", "a", "b", "a"):
        await house.happen(acme, name)
    first = await house.webhooks.events(acme, "acme/a", None, 2)
    rest = await house.webhooks.events(acme, "a", first[-1].id, 5)
    assert [event.adapter for event in first + rest] == ["a", "a", "a"]
    assert first[0].created_at > first[1].created_at > rest[0].created_at
    only_b = KeyRequest(scopes=frozenset({"read", "webhooks"}), models=frozenset({"acme/b"}))
    limited = await tenants.authenticate((await (await tenants.account("acme")).keys.create(only_b))[1])
    assert {event.adapter for event in await house.webhooks.events(limited, None, None, 10)} == {"b"}
    assert await house.webhooks.events(limited, "a", None, 10) == []
    with pytest.raises(NotPermitted):
        await house.listen(limited, "spy.example")
    house.now += 91 * 24 * HOUR
    await house.webhooks.courier.forget()
    assert await house.webhooks.events(acme, None, None, 10) == []


REFUSED = {
    "http://hook.example/": "https://",
    "ftp://hook.example/": "https://",
    "https://user:pw@hook.example/": "without a user",
    "https://": "HOST",
    "nonsense": "HOST",
    "https://127.0.0.1/": "not a public address",
    "https://localhost:8000/admin": "not a public address",
    "https://[::ffff:10.0.0.1]/": "not a public address",
    "https://169.254.169.254/latest/meta-data": "not a public address",
}


async def test_addresses_that_cannot_be_told_are_refused(house: House, enrol: Enrol) -> None:
    acme = await enrol("acme")
    endpoints = Endpoints(house.tenants.changes_of(acme), acme.tenant, WebhookSettings())
    for address, told in REFUSED.items():
        with pytest.raises(InvalidEndpoint, match=told):
            await endpoints.create(address)
    assert await endpoints.all() == []


async def test_limits_and_kinds(house: House, enrol: Enrol) -> None:
    acme = await enrol("acme")
    with pytest.raises(InvalidEndpoint, match=r"adapter\.revision\.ready"):
        await house.listen(acme, "a.example", "nonsense")
    for number in range(3):
        await house.listen(acme, f"h{number}.example")
    with pytest.raises(TooManyEndpoints, match="3 webhooks"):
        await house.listen(acme, "one.too.many.example")
    audit = await house.tenants.audit.read(tenant=acme.tenant, limit=1)
    assert audit[0].action == "webhook.create"
