"""OpenAI's usage question: the buckets' sums are the settlements' sums, for every query."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from itertools import count, pairwise

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from manual_clock import ManualClock
from openai.types.admin.organization import UsageCompletionsResponse

from loramux.accounts.tenants.authority import CUSTOMER_SCOPES
from loramux.accounts.tenants.tenants import Tenants
from loramux.common.identity import Principal
from loramux.common.units import TokenCounts
from loramux.data.records.database import Database
from loramux.data.records.requests import OpenedRequest
from loramux.data.records.usage import DailyUsageRepository
from loramux.money.usage.errors import InvalidQuery
from loramux.money.usage.query import UsagePage, UsageQuery, UsageResult
from loramux.money.usage.service import UsageService
from loramux.money.usage.settlement import Settlement

SECOND = 1_000_000
START = 1_700_000_000
WIDTHS = {"1m": 60, "1h": 3600, "1d": 86400}
LIMITS = {"1m": 1440, "1h": 168, "1d": 31}


class Event(msgspec.Struct, frozen=True):
    """One settled request of one of two tenants."""

    at: int
    tenant: int
    key: int
    model: str
    input_tokens: int
    cached_tokens: int
    output_tokens: int


def events(models: tuple[str, ...] = ("base", "acme/upper@1", "acme/json@2")) -> st.SearchStrategy[list[Event]]:
    tokens = st.integers(0, 10**12)
    event = st.builds(
        lambda at, tenant, key, model, fresh, cached, output: Event(
            at, tenant, key, model, fresh + cached, cached, output
        ),
        st.integers(START * SECOND, (START + 200_000) * SECOND),
        st.integers(0, 1),
        st.integers(0, 1),
        st.sampled_from(models),
        tokens,
        tokens,
        tokens,
    )
    return st.lists(event, max_size=12)


queries = st.builds(
    lambda start, length, width, group_by, limit: UsageQuery(
        start_time=START + start,
        end_time=START + start + length,
        bucket_width=width,
        group_by=tuple(sorted(group_by)),
        limit=min(limit, LIMITS[width]),
    ),
    st.integers(-100_000, 150_000),
    st.integers(1, 200_000),
    st.sampled_from(sorted(WIDTHS)),
    st.sets(st.sampled_from(["model", "api_key_id", "project_id"])),
    st.integers(1, 1440),
)


class Harness:
    """Two tenants with two keys each, in a database whose clock the test sets."""

    names = (f"tenant-{number}" for number in count())

    def __init__(self, url: str) -> None:
        self.clock = ManualClock(START * SECOND)
        self.database = Database(url, clock=self.clock)
        self.usage = UsageService(self.database)
        self.keys: list[list[Principal]] = []

    async def __aenter__(self) -> "Harness":
        tenants = Tenants(self.database, b"p" * 32)
        for name in (next(self.names), next(self.names)):
            await tenants.create(name)
            scopes = CUSTOMER_SCOPES | {"projects"}
            secrets = [(await tenants.create_key(name, scopes=scopes))[1] for _ in range(2)]
            self.keys.append([await tenants.authenticator.authenticate(secret) for secret in secrets])
        await self.usage.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.usage.stop()
        await self.database.close()

    async def record(self, recorded: list[Event]) -> None:
        """Open all together, then settle each at its time."""
        ids = [f"request-{next(self.names)}" for _ in recorded]
        await asyncio.gather(*(self.open(id, event) for id, event in zip(ids, recorded, strict=True)))
        for id, event in zip(ids, recorded, strict=True):
            self.clock.now = event.at
            await self.settle(id, event)
            if event.output_tokens % 2:  # the daily sums lack some entries of the ledger
                async with self.database.begin() as session:
                    await DailyUsageRepository(session).advance(1 + event.input_tokens % 3)

    async def open(self, id: str, event: Event, user: str | None = None) -> None:
        principal = self.keys[event.tenant][event.key]
        await self.usage.open(
            OpenedRequest(
                id=id,
                tenant_id=principal.tenant,
                key_id=principal.key_id,
                model=event.model,
                adapter_digest=None,
                user_id=user,
                prompt_tokens=event.input_tokens,
                max_tokens=event.output_tokens,
            )
        )

    async def settle(self, id: str, event: Event) -> None:
        await self.usage.settle(
            Settlement(
                request_id=id,
                ended_by="completion",
                finish_reason="stop",
                delivered=TokenCounts(
                    prompt=event.input_tokens, cached=event.cached_tokens, output=event.output_tokens
                ),
            )
        )

    async def pages(self, query: UsageQuery, tenant: int = 0) -> list[UsagePage]:
        pages = [await self.usage.completions(self.keys[tenant][0], query)]
        while pages[-1].has_more:
            following = msgspec.structs.replace(query, page=pages[-1].next_page)
            pages.append(await self.usage.completions(self.keys[tenant][0], following))
        return pages


def run(url: str, scenario: Callable[[Harness], object], recorded: list[Event] = []) -> None:  # noqa: B006 - only read
    async def main() -> None:
        async with Harness(url) as harness:
            await harness.record(recorded)
            await scenario(harness)

    asyncio.run(main())


def sums(results: list[UsageResult]) -> tuple[int, int, int, int]:
    return (
        sum(result.input_tokens for result in results),
        sum(result.input_cached_tokens for result in results),
        sum(result.output_tokens for result in results),
        sum(result.num_model_requests for result in results),
    )


def expected(chosen: list[Event]) -> tuple[int, int, int, int]:
    return (
        sum(event.input_tokens for event in chosen),
        sum(event.cached_tokens for event in chosen),
        sum(event.output_tokens for event in chosen),
        len(chosen),
    )


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(recorded=events(), query=queries)
def test_usage_buckets_add_up_to_settlements(url: str, recorded: list[Event], query: UsageQuery) -> None:
    async def scenario(harness: Harness) -> None:
        pages = await harness.pages(query)
        buckets = [bucket for page in pages for bucket in page.data]
        mine = [event for event in recorded if event.tenant == 0]
        assert (buckets[0].start_time, buckets[-1].end_time) == (query.start_time, query.end_time)
        assert all(before.end_time == after.start_time for before, after in pairwise(buckets))
        assert all(bucket.start_time % WIDTHS[query.bucket_width] == 0 for bucket in buckets[1:])
        for bucket in buckets:
            inside = [e for e in mine if bucket.start_time * SECOND <= e.at < bucket.end_time * SECOND]
            assert sums(bucket.results) == expected(inside)
            for result in bucket.results:
                same = [e for e in inside if result.model in (None, e.model)]
                same = [e for e in same if result.api_key_id in (None, harness.keys[0][e.key].key_id)]
                assert sums([result]) == expected(same)
                assert (result.model is not None) == ("model" in query.group_by)
                assert (result.api_key_id is not None) == ("api_key_id" in query.group_by)
        async with harness.database.read() as session:
            assert await DailyUsageRepository(session).problems() == []

    run(url, scenario, recorded)


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(recorded=events())
def test_usage_rows_add_up_to_settlements(url: str, recorded: list[Event]) -> None:
    async def scenario(harness: Harness) -> None:
        for tenant in (0, 1):
            rows = await harness.usage.rows(harness.keys[tenant][0].tenant)
            mine = [event for event in recorded if event.tenant == tenant]
            assert [row.model for row in rows] == sorted({event.model for event in mine})
            for row in rows:
                totals = row.tokens.prompt, row.tokens.cached, row.tokens.output, row.requests
                assert totals == expected([event for event in mine if event.model == row.model])

    run(url, scenario, recorded)


EVENTS = [
    Event(START * SECOND, 0, 0, "base", 10, 4, 1),
    Event((START + 1) * SECOND, 0, 1, "acme/upper@1", 20, 0, 2),
    Event((START + 90_000) * SECOND, 0, 0, "acme/upper@1", 40, 0, 3),
    Event((START + 1) * SECOND, 1, 0, "base", 999, 0, 999),
]


def test_usage_query_filters_by_model_and_key(url: str) -> None:
    async def scenario(harness: Harness) -> None:
        everything = UsageQuery(start_time=START, end_time=START + 100_000)

        async def total(**changes: object) -> tuple[int, int, int, int]:
            pages = await harness.pages(msgspec.structs.replace(everything, **changes))
            return sums([result for page in pages for bucket in page.data for result in bucket.results])

        assert await total() == (70, 4, 6, 3)
        assert await total(models=("base",)) == (10, 4, 1, 1)
        assert await total(models=("base", "acme/upper@1")) == (70, 4, 6, 3)
        assert await total(api_key_ids=(harness.keys[0][1].key_id,)) == (20, 0, 2, 1)
        assert await total(api_key_ids=(harness.keys[1][0].key_id,)) == (0, 0, 0, 0)
        assert await total(end_time=START + 90_000) == (30, 4, 3, 2)
        assert await total(end_time=START + 90_001) == (70, 4, 6, 3)
        assert await total(start_time=START + 1) == (60, 0, 5, 2)

    run(url, scenario, EVENTS)


def test_usage_is_grouped_and_filtered_by_end_user(url: str) -> None:
    users = ("zoë@example", None, "zoë@example", "x")

    async def scenario(harness: Harness) -> None:
        for number, (user, event) in enumerate(zip(users, EVENTS, strict=True)):
            await harness.open(f"of-user-{number}", event, user)
            harness.clock.now = event.at
            await harness.settle(f"of-user-{number}", event)
        query = UsageQuery(start_time=START, end_time=START + 100_000, group_by=("user_id",))

        async def by_user(**changes: object) -> set[tuple[str | None, int, int]]:
            pages = await harness.pages(msgspec.structs.replace(query, **changes))
            results = [result for page in pages for bucket in page.data for result in bucket.results]
            return {(result.user_id, result.output_tokens, result.num_model_requests) for result in results}

        assert await by_user() == {("zoë@example", 1, 1), (None, 2, 1), ("zoë@example", 3, 1)}
        assert await by_user(user_ids=("zoë@example",)) == {("zoë@example", 1, 1), ("zoë@example", 3, 1)}
        assert await by_user(user_ids=("x",)) == set(), "another tenant's"
        assert await by_user(group_by=()) == {(None, 3, 2), (None, 3, 1)}
        assert await by_user(project_ids=("project_absent",)) == set()
        assert await harness.usage.verify_chain() >= len(EVENTS)

    run(url, scenario)


def test_usage_answer_matches_openai(url: str) -> None:
    async def scenario(harness: Harness) -> None:
        query = UsageQuery(start_time=START, end_time=START + 100_000, group_by=("model", "batch"), limit=1)
        page = await harness.usage.completions(harness.keys[0][0], query)
        answer = UsageCompletionsResponse.model_validate_json(msgspec.json.encode(page), strict=True)
        assert (answer.object, answer.has_more, len(answer.data)) == ("page", True, 1)
        assert answer.next_page is not None
        first, second = answer.data[0].results
        assert (first.object, first.model, first.input_tokens) == (
            "organization.usage.completions.result",
            "acme/upper@1",
            20,
        )
        assert (second.model, second.input_tokens, second.input_cached_tokens) == ("base", 10, 4)
        assert (second.num_model_requests, second.batch, second.project_id, second.user_id) == (1, False, None, None)
        assert json_keys(page) <= set(type(first).model_fields)

    run(url, scenario, EVENTS)


def json_keys(page: UsagePage) -> set[str]:
    return set(msgspec.to_builtins(page)["data"][0]["results"][0])


def test_usage_query_without_end_ends_now_on_every_page(url: str) -> None:
    async def scenario(harness: Harness) -> None:
        harness.clock.now = (START + 90_000) * SECOND
        query = UsageQuery(start_time=START, bucket_width="1h", limit=20)
        first = await harness.usage.completions(harness.keys[0][0], query)
        harness.clock.now = (START + 900_000) * SECOND
        second = await harness.usage.completions(
            harness.keys[0][0], msgspec.structs.replace(query, page=first.next_page)
        )
        assert first.has_more
        assert not second.has_more
        assert second.next_page is None
        assert second.data[-1].end_time == START + 90_001
        assert sums([r for page in (first, second) for b in page.data for r in b.results]) == (70, 4, 6, 3)

    run(url, scenario, EVENTS)


@pytest.mark.parametrize(
    ("field", "wrong", "says"),
    [
        ("bucket_width", {"bucket_width": "1w"}, "1m, 1h, 1d"),
        ("start_time", {"start_time": -1}, "Unix time in seconds"),
        ("start_time", {"start_time": 10**15}, "Unix time in seconds"),
        ("end_time", {"end_time": START}, "after start_time"),
        ("group_by", {"group_by": ("tenant",)}, "project_id, user_id, api_key_id, model, batch"),
        ("limit", {"limit": 32}, "1 to 31 for bucket_width=1d"),
        ("limit", {"limit": 0}, "1 to 31"),
        ("limit", {"limit": 169, "bucket_width": "1h"}, "1 to 168"),
        ("page", {"page": "page_zz"}, "next_page of an earlier answer"),
        ("page", {"page": f"page_{START - 1:x}_{START + 1:x}"}, "an earlier answer to this query"),
        ("page", {"page": f"page_{START + 1:x}_{START + 1:x}"}, "an earlier answer to this query"),
        ("page", {"page": f"page_{START + 1:x}_{1 << 41:x}"}, "an earlier answer to this query"),
        ("page", {"page": f"page_{START + 1:x}_{START + 2:x}", "end_time": START + 3}, "to this query"),
        ("models", {"models": ("x",) * 101}, "at most 100"),
        ("models", {"models": ("a\0b",)}, "printable"),
        ("api_key_ids", {"api_key_ids": ("x",) * 101}, "at most 100"),
        ("user_ids", {"user_ids": ("x",) * 101}, "at most 100"),
        ("user_ids", {"user_ids": ("a\0b",)}, "printable"),
        ("page", {"page": "page_1_2'; DROP TABLE ledger_entries"}, "next_page of an earlier answer"),
    ],
)
def test_usage_query_with_a_bad_field_is_refused_by_its_name(field: str, wrong: dict[str, object], says: str) -> None:
    with pytest.raises(InvalidQuery) as refusal:
        UsageQuery(**{"start_time": START} | wrong)
    assert refusal.value.field == field
    assert says in refusal.value.message


@given(page=st.from_regex(r"page_[0-9a-f]{1,11}_[0-9a-f]{1,11}", fullmatch=True))
@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_usage_query_with_an_invented_page_stays_in_bounds(sqlite_url: str, page: str) -> None:
    async def scenario(harness: Harness) -> None:
        with suppress(InvalidQuery):
            answer = await harness.usage.completions(harness.keys[0][0], UsageQuery(start_time=0, page=page))
            assert 1 <= len(answer.data) <= 7

    run(sqlite_url, scenario)
