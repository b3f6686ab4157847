"""Judges that answer well, and judges that hang, lie, fail, or have addresses that must not be called."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from loramux.common.identity import TenantId
from loramux.common.public_http import PublicTransport, Resolver
from loramux.common.settings.server import BatchSettings
from loramux.releases import judges as judges_module
from loramux.releases.comparison import Answered, Question
from loramux.releases.graders import InvalidGrader, Judge
from loramux.releases.judges import JudgeFailed, Judges, KeyVault

ACME = TenantId("tenant_acme")
JUDGE = Judge(url="https://judge.example/v1", model="gpt")
SETTINGS = BatchSettings(judge_seconds=0.2)
PRIVATE = BatchSettings(judge_seconds=0.2, allow_private_judges=True)
Handler = Callable[[httpx.Request], Awaitable[httpx.Response]]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judges_module, "FIRST_PAUSE", 0.0)


def said(content: str) -> httpx.Response:
    return httpx.Response(200, json={"choices": [{"message": {"content": content}}]})


def judged(handler: Handler, answers: list[str | None], key: str | None = None) -> list[float]:
    async def run() -> list[float]:
        async with httpx.AsyncClient(transport=httpx.MockTransport(handler)) as client:
            judges = Judges(client, Resolver("test"), SETTINGS)
            questions = [Question(prompt=f"question {n}", expected="yes") for n in range(len(answers))]
            given = [None if text is None else Answered(f"id-{n}", text, None) for n, text in enumerate(answers)]
            return await judges.scores(JUDGE, key, ACME, questions, given)

    return asyncio.run(run())


def test_judge_scores_each_answer_and_gets_question_key_and_expected_text() -> None:
    seen: list[dict[str, Any]] = []

    async def judge(request: httpx.Request) -> httpx.Response:
        assert request.headers["authorization"] == "Bearer sk-judge"
        assert str(request.url) == "https://judge.example/v1/chat/completions"
        case = json.loads(json.loads(request.content)["messages"][1]["content"])
        seen.append(case)
        return said(f"Sure:\n```json\n{json.dumps({'score': 0.75 if case['answer'] == 'good' else 0})}\n```")

    assert judged(judge, ["good", None, "bad"], key="sk-judge") == [0.75, 0.0, 0.0]
    assert {case["question"] for case in seen} == {"question 0", "question 2"}
    assert all(case["expected"] == "yes" for case in seen)


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (httpx.Response(500), "answered 500"),
        (httpx.Response(401), "answered 401"),
        (httpx.Response(302, headers={"Location": "http://169.254.169.254/"}), "answered 302"),
        (said("I would say it is fine."), "has no"),
        (said('{"score": 7}'), "has no"),
        (said('{"score": "0.5"}'), "has no"),
        (said('{"score": NaN}'), "has no"),
        (said("{" * 100_000 + "}" * 100_000), "has no"),
        (httpx.Response(200, json={"choices": []}), "has no"),
        (httpx.Response(200, content=b"\xff\xfe"), "has no"),
        (httpx.Response(200, content=b" " * (300 << 10)), "more than"),
    ],
)
def test_judge_that_lies_or_fails_ends_with_the_question_and_the_reason(reply: httpx.Response, reason: str) -> None:
    calls = 0

    async def judge(_: httpx.Request) -> httpx.Response:
        nonlocal calls
        calls += 1
        return httpx.Response(reply.status_code, headers=reply.headers, content=reply.content)

    with pytest.raises(JudgeFailed, match="for question 1 in 3 attempts") as failed:
        judged(judge, ["good"])
    assert reason in failed.value.message
    assert calls == 3


def test_judge_that_hangs_or_drips_is_given_up() -> None:
    class Drip(httpx.AsyncByteStream):
        async def __aiter__(self) -> Any:
            while True:
                yield b" "
                await asyncio.sleep(0.01)

    async def hang(_: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async def drip(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, stream=Drip())

    for judge in (hang, drip):
        with pytest.raises(JudgeFailed, match=r"did not answer within 0\.2 s"):
            judged(judge, ["good"])


def test_judges_that_hang_for_one_tenant_hold_up_no_other() -> None:
    """Six evaluations of one tenant, 48 calls wanted, would fill all 32 places."""
    hanging, full = 0, asyncio.Event()

    async def judge(request: httpx.Request) -> httpx.Response:
        nonlocal hanging
        if request.extensions["loramux_tenant"] == ACME:
            hanging += 1
            if hanging == 8:
                full.set()
            await asyncio.Event().wait()
        return said('{"score": 1}')

    async def run() -> list[float]:
        async with httpx.AsyncClient(transport=httpx.MockTransport(judge)) as client:
            judges = Judges(client, Resolver("test"), BatchSettings(judge_seconds=600))
            questions = [Question(prompt="x")] * 8
            answers = [Answered("id", "good", None)] * 8
            stuck = [asyncio.create_task(judges.scores(JUDGE, None, ACME, questions, answers)) for _ in range(6)]
            await asyncio.wait_for(full.wait(), 60)
            other = TenantId("tenant_globex")
            scores = await asyncio.wait_for(judges.scores(JUDGE, None, other, questions, answers), 60)
            for task in stuck:
                task.cancel()
            await asyncio.gather(*stuck, return_exceptions=True)
            return scores

    assert asyncio.run(run()) == [1.0] * 8
    assert hanging == 8


def test_judge_that_fails_now_and_then_is_asked_again() -> None:
    calls = 0

    async def judge(_: httpx.Request) -> httpx.Response:
        nonlocal calls
        calls += 1
        return httpx.Response(503) if calls % 2 else said('{"score": 1}')

    assert judged(judge, ["a"]) == [1.0]


@pytest.mark.parametrize(
    ("url", "settings"),
    [
        ("http://judge.example/v1", SETTINGS),
        ("https://127.0.0.1/v1", SETTINGS),
        ("https://169.254.169.254/latest", SETTINGS),
        ("https://[::1]/v1", SETTINGS),
        ("https://2130706433/v1", SETTINGS),
        ("https://inner.example/v1", SETTINGS),
        ("https://user:secret@judge.example/v1", SETTINGS),
        ("https://judge.example/v1?x=1", SETTINGS),
        ("ftp://judge.example", PRIVATE),
        ("no address", SETTINGS),
        ("https://xn--0/v1", SETTINGS),
        ("https://:99999/", SETTINGS),
    ],
)
def test_judge_address_that_must_not_be_called_is_refused(url: str, settings: BatchSettings) -> None:
    async def run() -> None:
        resolver = Resolver("test", lookup=lambda host: ["10.0.0.7"] if host == "inner.example" else ["9.9.9.9"])
        async with httpx.AsyncClient() as client:
            await Judges(client, resolver, settings).check(Judge(url=url, model="m"), ACME)

    with pytest.raises(InvalidGrader) as refused:
        asyncio.run(run())
    assert refused.value.field == "grader.url"


def test_judge_name_that_leads_inside_at_the_call_is_not_connected_to() -> None:
    async def run() -> list[float]:
        resolver = Resolver("test", lookup=lambda _: ["127.0.0.1"])
        async with httpx.AsyncClient(transport=PublicTransport(resolver)) as client:
            answers = [Answered("id", "good", None)]
            return await Judges(client, resolver, SETTINGS).scores(JUDGE, None, ACME, [Question(prompt="x")], answers)

    with pytest.raises(JudgeFailed, match="no public address"):
        asyncio.run(run())


def test_judge_key_is_readable_for_its_evaluation_under_its_pepper_only() -> None:
    stored = KeyVault(b"pepper").encrypt("sk-judge", "eval_1")
    assert b"sk-judge" not in stored
    assert KeyVault(b"pepper").decrypt(stored, "eval_1") == "sk-judge"
    for vault, evaluation in ((KeyVault(b"other"), "eval_1"), (KeyVault(b"pepper"), "eval_2")):
        with pytest.raises(JudgeFailed):
            vault.decrypt(stored, evaluation)
