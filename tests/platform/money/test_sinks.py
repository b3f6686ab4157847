"""Sinks that fail, time out, forget and hear things twice: each event is counted once, or a person is told."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import parse_qs

import httpx
import pytest
import standardwebhooks
from billing_harness import SECOND, Clock, use
from cloudevents.v1.http import from_json

from loramux.common.identity import Principal
from loramux.common.settings.server import SinkSettings
from loramux.data.records.database import Database
from loramux.money.billing.service import BillingService
from loramux.money.exports.delivery import LEASE, SinkDelivery
from loramux.money.exports.sinks import make_sink
from loramux.money.exports.tables import ExportError
from loramux.money.pricing import METERS
from loramux.money.usage.service import UsageService

pytestmark = pytest.mark.anyio

HOUR = 3600 * SECOND
KINDS = ("openmeter", "stripe", "lago", "webhook")
SECRET = "whsec_" + base64.b64encode(b"s" * 32).decode()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def usage(database: Database) -> AsyncIterator[UsageService]:
    usage = UsageService(database)
    await usage.start()
    yield usage
    await usage.stop()


@pytest.fixture
async def acme(enrol: Callable[[str], Awaitable[Principal]]) -> Principal:
    return await enrol("acme")


class Double:
    """Speaks a sink's protocol as it is documented, counts what it takes, and knows ids again for `window`."""

    def __init__(self, kind: str, clock: Clock, window: int = 1 << 62) -> None:
        self.kind = kind
        self.clock = clock
        self.window = window
        self.taken: dict[str, int] = {}
        """Quantity counted by id, twice what was counted twice."""
        self.known: dict[str, int] = {}
        self.calls = 0
        self.failures: list[str] = []
        """Faults of the next calls: a status, `lost` (taken, answer lost), `down` or `` (none)."""

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.calls += 1
        failure = self.failures.pop(0) if self.failures else ""
        if failure == "down":
            raise httpx.ConnectError("nobody listens")
        if failure.isdigit():
            return httpx.Response(int(failure))
        answer = getattr(self, f"_{self.kind}")(request)
        if failure == "lost":
            raise httpx.ReadTimeout("the answer was lost")
        return answer

    def _count(self, id: str, quantity: int) -> bool:
        """Return True if the event is new, as far as the double remembers."""
        now = self.clock.now
        if id in self.known and now - self.known[id] <= self.window:
            return False
        self.known[id] = now
        self.taken[id] = self.taken.get(id, 0) + quantity
        return True

    def _openmeter(self, request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/api/v1/events"
        assert request.headers["content-type"] == "application/cloudevents-batch+json"
        assert request.headers["authorization"] == f"Bearer {SECRET}"
        for raw in json.loads(request.content):
            event = from_json(json.dumps(raw).encode())  # the official SDK refuses what is no CloudEvent
            assert event["specversion"] == "1.0"
            assert {"id", "source", "type", "subject", "time"} <= set(event.get_attributes())
            self._count(event["id"], event.data["quantity"])
        return httpx.Response(204)

    def _stripe(self, request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/v1/billing/meter_events"
        form = {name: values[0] for name, values in parse_qs(request.content.decode()).items()}
        assert set(form) == {"event_name", "identifier", "timestamp", "payload[stripe_customer_id]", "payload[value]"}
        assert form["payload[stripe_customer_id]"] == "cus_acme"
        assert len(form["identifier"]) <= 100
        age = self.clock.now // SECOND - int(form["timestamp"])
        assert -300 <= age <= 35 * 86_400
        if not self._count(form["identifier"], int(form["payload[value]"])):
            message = "An event already exists with identifier " + form["identifier"]
            return httpx.Response(400, json={"error": {"type": "invalid_request_error", "message": message}})
        return httpx.Response(200, json={"object": "billing.meter_event", **form})

    def _lago(self, request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/api/v1/events/batch"
        events = json.loads(request.content)["events"]
        assert 1 <= len(events) <= 100
        wrong = {
            str(place): {"transaction_id": ["value_already_exist"]}
            for place, event in enumerate(events)
            if event["transaction_id"] in self.known
        }
        if wrong:
            return httpx.Response(422, json={"status": 422, "code": "validation_errors", "error_details": wrong})
        for event in events:
            assert set(event) == {"transaction_id", "external_subscription_id", "code", "timestamp", "properties"}
            assert event["external_subscription_id"] == "cus_acme"
            assert event["code"] in METERS
            self._count(event["transaction_id"], int(event["properties"]["quantity"]))
        return httpx.Response(200, json={"events": events})

    def _webhook(self, request: httpx.Request) -> httpx.Response:
        timestamp = self.clock.now // SECOND
        assert int(request.headers["webhook-timestamp"]) == timestamp
        signed = standardwebhooks.Webhook(SECRET).sign(
            request.headers["webhook-id"], datetime.fromtimestamp(timestamp, UTC), request.content.decode()
        )
        assert request.headers["webhook-signature"] == signed
        told = json.loads(request.content)
        assert set(told) == {"type", "timestamp", "data"}
        assert datetime.fromisoformat(told["timestamp"]).timestamp() <= timestamp
        for event in told["data"]["events"]:
            self._count(event["id"], event["quantity"])
        return httpx.Response(200)


Deliver = Callable[[], Awaitable[int]]


@pytest.fixture
def made(tmp_path: Path, database: Database) -> Callable[[Double], Deliver]:
    """A server that delivers to a double."""
    (tmp_path / "secret").write_text(SECRET + "\n")

    def made(double: Double) -> Deliver:
        settings = SinkSettings(
            name="sink",
            kind=double.kind,
            url="https://sink.example",
            secret_file=str(tmp_path / "secret"),
            customers={"acme": "cus_acme"},
        )
        sink = make_sink(settings, httpx.AsyncClient(transport=httpx.MockTransport(double)))
        sink.max_entries = 4
        delivery = SinkDelivery(database)
        return lambda: delivery.run(sink)

    return made


async def spend(usage: UsageService, acme: Principal, requests: int = 30) -> dict[str, int]:
    """Return the quantities that a sink must count in the end, by id."""
    wanted: dict[str, int] = {}
    for i in range(requests):
        event = await use(usage, acme, f"r{i}", 100 + i, i, 7 + i)
        wanted |= {f"{event}:input_uncached": 100, f"{event}:output": 7 + i}
        if i:
            wanted[f"{event}:input_cached"] = i
    return wanted


@pytest.mark.parametrize("kind", KINDS)
async def test_sink_receives_everything_once(
    kind: str, clock: Clock, usage: UsageService, acme: Principal, made: Callable[[Double], Deliver]
) -> None:
    wanted, double = await spend(usage, acme), Double(kind, clock)
    deliver = made(double)
    assert await deliver() == 30
    assert double.taken == wanted
    calls = double.calls
    assert await deliver() == 0
    assert double.calls == calls


@pytest.mark.parametrize("kind", KINDS)
async def test_sink_failures_lose_and_double_nothing(
    kind: str, clock: Clock, usage: UsageService, acme: Principal, made: Callable[[Double], Deliver]
) -> None:
    wanted, double = await spend(usage, acme), Double(kind, clock)
    double.failures = ["down", "lost", "500", "", "429", "lost", "503", "lost", "401"] * 3
    deliver = made(double)
    for _ in range(80):
        await deliver()
        clock.now += SECOND
    assert double.taken == wanted
    assert double.failures == []


@pytest.mark.parametrize("kind", ["openmeter", "stripe"])
async def test_sink_batch_beyond_the_window_is_parked(
    kind: str, clock: Clock, database: Database, usage: UsageService, acme: Principal, made: Callable[[Double], Deliver]
) -> None:
    wanted, double = await spend(usage, acme, 3), Double(kind, clock, window=24 * HOUR)
    double.failures = ["lost"]
    deliver = made(double)
    await deliver()
    clock.now += 24 * HOUR - SECOND  # there is no telling how long the request took
    await deliver()
    assert all(double.taken[id] == wanted[id] for id in double.taken)
    parked = {one.event_id: one.reason for one in await SinkDelivery(database).parked("sink")}
    assert set(parked) == set(wanted)
    assert "no longer recognises" in next(iter(parked.values()))
    await use(usage, acme, "next", 5, 0, 5)
    await deliver()
    assert len(await SinkDelivery(database).parked("sink")) == len(wanted)
    assert len(set(double.taken) - set(wanted)) == 2


async def test_sink_gets_everything_after_a_long_outage(
    clock: Clock, database: Database, usage: UsageService, acme: Principal, made: Callable[[Double], Deliver]
) -> None:
    wanted, double = await spend(usage, acme, 3), Double("openmeter", clock, window=24 * HOUR)
    double.failures = ["down"] * 5
    deliver = made(double)
    for _ in range(6):
        await deliver()
        clock.now += 20 * 24 * HOUR
    assert double.taken == wanted
    assert await SinkDelivery(database).parked("sink") == []


async def test_stripe_sink_parks_what_stripe_cannot_take(
    clock: Clock, database: Database, usage: UsageService, acme: Principal, made: Callable[[Double], Deliver]
) -> None:
    event = await use(usage, acme, "r", 5, 0, 5)
    await BillingService(database).correct(event, {"output_tokens": -2}, "goodwill")
    double = Double("stripe", clock)
    await made(double)()
    assert sum(double.taken.values()) == 10
    [parked] = await SinkDelivery(database).parked("sink")
    assert "credit note" in parked.reason


@pytest.mark.parametrize("kind", ["stripe", "lago"])
async def test_sink_parks_events_of_a_tenant_without_a_customer(
    kind: str,
    clock: Clock,
    database: Database,
    usage: UsageService,
    enrol: Callable[[str], Awaitable[Principal]],
    made: Callable[[Double], Deliver],
) -> None:
    await use(usage, await enrol("globex"), "r", 5, 0, 5)
    double = Double(kind, clock)
    assert await made(double)() == 1
    assert double.taken == {}
    assert {one.reason for one in await SinkDelivery(database).parked("sink")} == {
        "the sink's settings name no customer for this tenant"
    }


async def test_sink_delivery_by_many_servers_is_once(
    clock: Clock, usage: UsageService, acme: Principal, made: Callable[[Double], Deliver]
) -> None:
    wanted, double = await spend(usage, acme), Double("openmeter", clock)
    servers = [made(double) for _ in range(6)]
    for _ in range(3):
        await asyncio.gather(*(deliver() for deliver in servers))
    assert double.taken == wanted
    assert double.calls == 8


async def test_sink_lease_of_a_dead_server_expires(
    clock: Clock, database: Database, usage: UsageService, acme: Principal, made: Callable[[Double], Deliver]
) -> None:
    from loramux.data.records.sinks import SinkRepository

    wanted, double = await spend(usage, acme, 2), Double("openmeter", clock)
    async with database.begin() as session:
        await SinkRepository(session, "sink", "dead").lease(clock.now, clock.now + LEASE)
    deliver = made(double)
    assert await deliver() == 0
    clock.now += LEASE + 1
    assert await deliver() == 2
    assert double.taken == wanted


async def test_sink_cursor_is_not_moved_without_the_lease(database: Database, clock: Clock) -> None:
    from loramux.data.records.sinks import SinkRepository

    async with database.begin() as session:
        slow, quick = SinkRepository(session, "sink", "slow"), SinkRepository(session, "sink", "quick")
        assert await slow.lease(clock.now, clock.now + 10) is not None
        assert await quick.lease(clock.now, clock.now + 10) is None
        state = await quick.lease(clock.now + 11, clock.now + 30)
        assert state is not None
        assert state.cursor == 0
        assert not await slow.advance(7)
        assert await quick.advance(7)


def test_sink_secret_that_is_unreadable_is_refused_by_its_field(tmp_path: Path) -> None:
    settings = SinkSettings(name="x", kind="lago", url="https://x", secret_file=str(tmp_path / "absent"))
    with pytest.raises(ExportError, match=r"sinks\.x\.secret_file"):
        make_sink(settings, httpx.AsyncClient())
