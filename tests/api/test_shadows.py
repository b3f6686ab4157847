"""Shadow traffic over HTTP: a candidate repeats an adapter's requests, unseen, waived, and compared."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from peft_uploads import form, make_adapter
from scripted_engine import EOS
from site_fixture import Site

from loramux.engine.messages import EngineFault, Request, ServiceClass

numbers = itertools.count()
PATIENCE = 60.0
SCOPES = ["adapters", "inference", "read", "usage", "billing"]


@dataclass
class Shadowed:
    """An adapter of a new tenant: revision 1 is released, revision 2 is the candidate."""

    site: Site
    http: httpx.Client
    tenant: str
    digests: dict[int, str]

    path = "/v1/adapters/voice"

    def start(self, **body: Any) -> httpx.Response:
        return self.http.post(f"{self.path}/shadow", json={"revision": 2, "share": 1} | body)

    def ask(self, **body: Any) -> Any:
        asked = {"model": "voice", "prompt": "hello", "max_tokens": 8} | body
        return self.site.openai(self.tenant).completions.create(**asked)

    def report(self, count: int = 0) -> dict[str, Any]:
        """The shadow once `count` requests have come to their ends."""
        deadline = time.monotonic() + PATIENCE
        while True:
            found: dict[str, Any] = self.http.get(f"{self.path}/shadow").json()
            requests = found["requests"]
            if requests["compared"] + requests["failed"] + sum(requests["dropped"].values()) >= count:
                return found
            assert time.monotonic() < deadline, found
            time.sleep(0.05)

    def tend(self) -> None:
        tending = self.site.server.app.state.programs.shadows.tend()
        asyncio.run_coroutine_threadsafe(tending, self.site.server.loop).result(PATIENCE)

    def requests_of(self, revision: int) -> list[Request]:
        digest = self.digests[revision]
        return [one for one in self.site.engine.requests if one.adapter and one.adapter.digest.startswith(digest)]

    def answers(self, first: bytes, second: bytes) -> None:
        """Let revision 2 answer `second` and every other one `first`."""

        def script(request: Request) -> list[int | EngineFault]:
            of_second = request.adapter is not None and request.adapter.digest.startswith(self.digests[2])
            return [*(second if of_second else first), EOS]

        self.site.engine.script = script

    def events(self, kind: str) -> list[dict[str, Any]]:
        found = self.http.get("/v1/events", params={"adapter": "voice"}).json()["data"]
        return [one["data"] for one in found if one["type"] == kind]

    def used(self, *groups: str) -> list[dict[str, Any]]:
        asked = {"start_time": int(time.time()) - 3600, "group_by": list(groups)}
        page = self.http.get("/v1/organization/usage/completions", params=asked).json()
        return [one for bucket in page["data"] for one in bucket["results"]]


@pytest.fixture
def shadowed(site: Site, base_dir: Path, tmp_path: Path) -> Iterator[Shadowed]:
    """A tenant for each test: what is billed is all its own."""
    name = f"shadowed-{next(numbers)}"
    with site.http("all-scopes") as operator:
        operator.post("/admin/tenants", json={"name": name}).raise_for_status()
        site.keys[name] = operator.post(f"/admin/tenants/{name}/keys", json={"scopes": SCOPES}).json()["key"]
    with site.http(name) as http:
        for seed in (41, 42):
            made = http.post("/v1/adapters", **form(make_adapter(base_dir, tmp_path / str(seed), seed=seed), "voice"))
            assert made.status_code == 201, made.text
        assert http.post(f"{Shadowed.path}/promote", json={"revision": 1}).status_code == 200
        digests = {one["revision"]: one["digest"] for one in http.get(f"{Shadowed.path}/revisions").json()["data"]}
        yield Shadowed(site, http, name, digests)
        http.delete(Shadowed.path, params={"undo_s": 0})


def test_shadow_runs_on_the_candidate_waived_and_unseen(shadowed: Shadowed) -> None:
    shadowed.answers(b"good", b"goat")
    started = shadowed.start()
    assert (started.status_code, started.json()["revision"]) == (201, 2), started.text
    answers = [shadowed.ask() for _ in range(3)]
    streamed = list(shadowed.ask(stream=True))
    assert {answer.choices[0].text for answer in answers} == {"good"}
    assert {answer.model for answer in answers} | {chunk.model for chunk in streamed} == {f"{shadowed.tenant}/voice@1"}
    found = shadowed.report(4)
    assert (found["requests"]["compared"], found["requests"]["failed"]) == (4, 0), found
    means = {name: measure["mean"] for name, measure in found["measures"].items()}
    assert (means["exact"], means["prefix"], means["same_finish_reason"], means["length_ratio"]) == (0, 0.4, 1, 1)
    assert means["similarity"] == 0.6, "g, o and the end of five"
    exact = found["measures"]["exact"]
    assert (exact["requests"], exact["low"]) == (4, 0)
    assert 0 < exact["high"] < 1
    (used,) = shadowed.used()
    assert (used["num_model_requests"], used["input_tokens"], used["output_tokens"]) == (4, 24, 20)
    assert "waived_input_tokens" not in used
    tiers = {one["service_tier"]: one for one in shadowed.used("service_tier")}
    shadow = tiers["shadow"]
    assert (shadow["input_tokens"], shadow["output_tokens"]) == (0, 0)
    assert (shadow["waived_input_tokens"], shadow["waived_output_tokens"]) == (24, 20)
    classes = {request.service_class for request in shadowed.requests_of(2)}
    assert classes == {ServiceClass.BATCH}
    metrics = shadowed.http.get(f"{shadowed.path}/metrics").json()["data"]
    assert [one["model"] for one in metrics] in ([], [f"{shadowed.tenant}/voice@1"]), "shadows count as no requests"


def test_shadow_costs_nothing_on_the_invoice(shadowed: Shadowed) -> None:
    shadowed.start()
    shadowed.ask()
    shadowed.report(1)
    month = time.strftime("%Y-%m", time.gmtime())
    invoice = shadowed.http.get(f"/v1/organization/invoices/{month}", params={"format": "html"}).text
    assert "Not charged: 6 input tokens, 6 output tokens." in invoice


def test_shadow_repeats_choices_seed_stops_and_format(shadowed: Shadowed) -> None:
    shadowed.answers(b'{"a": 1}', b'{"a": "x"}')
    shadowed.start()
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    shadowed.site.openai(shadowed.tenant).chat.completions.create(
        model=f"{shadowed.tenant}/voice:default",
        messages=[{"role": "user", "content": "hi"}],
        n=2,
        seed=7,
        stop="END",
        max_tokens=20,
        logprobs=True,
        response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schema}},
    )
    found = shadowed.report(1)
    current, candidate = shadowed.requests_of(1), shadowed.requests_of(2)
    assert [one.sampling.seed for one in candidate] == [one.sampling.seed for one in current]
    assert [one.prompt_token_ids for one in candidate] == [one.prompt_token_ids for one in current]
    assert [one.constraint for one in candidate] == [one.constraint for one in current] != [None, None]
    assert {one.sampling.logprobs for one in candidate} == {None}, "nobody reads them"
    means = {name: measure["mean"] for name, measure in found["measures"].items()}
    assert (means["valid_current"], means["valid_candidate"], means["valid_difference"]) == (1, 0, -1)
    assert found["requests"]["compared"] == 1


def test_shadow_of_a_share_follows_the_user(shadowed: Shadowed) -> None:
    shadowed.start(share=0.5)
    users = [f"user-{number}" for number in range(12)]
    for user in users:
        shadowed.ask(user=user)
    shadowed.ask(user=users[0], model="voice@1")  # asks for a revision, not for the alias
    once = len(shadowed.requests_of(2))
    deadline = time.monotonic() + PATIENCE
    while (report := shadowed.report())["requests"]["compared"] < len(shadowed.requests_of(2)) or not once:
        once = len(shadowed.requests_of(2))
        assert time.monotonic() < deadline, report
        time.sleep(0.05)
    first = report["requests"]["compared"]
    assert 0 < first < len(users)
    for user in users:
        shadowed.ask(user=user)
    assert shadowed.report(2 * first)["requests"]["compared"] == 2 * first


def test_shadow_meets_no_limit_and_holds_none(shadowed: Shadowed) -> None:
    with shadowed.site.http("all-scopes") as operator:
        for name, value in {"requests_per_minute": 3, "batch_requests_per_minute": 1}.items():
            answer = operator.put(f"/admin/tenants/{shadowed.tenant}/limits/{name}", json={"value": value})
            assert answer.status_code == 200, answer.text
    shadowed.start()
    for _ in range(3):
        shadowed.ask()
    with pytest.raises(openai.RateLimitError):
        shadowed.ask()
    assert shadowed.report(3)["requests"]["compared"] == 3


def test_shadow_stops_at_its_tokens_of_the_day(shadowed: Shadowed) -> None:
    shadowed.start(max_tokens_per_day=30)
    for _ in range(4):
        shadowed.ask()  # 6 and 6 tokens; 14 at most
    found = shadowed.report(4)
    assert (found["requests"]["compared"], found["requests"]["dropped"]["day_limit"]) == (2, 2), found
    assert found["tokens_today"] == 24


def test_shadow_of_a_failing_candidate_is_counted_and_fails_no_request(shadowed: Shadowed) -> None:
    digest = shadowed.digests[2]

    def broken(request: Request) -> list[int | EngineFault]:
        is_candidate = request.adapter is not None and request.adapter.digest.startswith(digest)
        return [EngineFault("adapter_failed", "broken")] if is_candidate else [*b"fine", EOS]

    shadowed.site.engine.script = broken
    shadowed.start()
    assert shadowed.ask().choices[0].text == "fine"
    assert shadowed.report(1)["requests"]["failed"] == 1


def test_shadow_ends_when_its_candidate_is_promoted_or_deleted(shadowed: Shadowed) -> None:
    shadowed.start()
    shadowed.ask()
    shadowed.report(1)
    assert shadowed.http.post(f"{shadowed.path}/promote", json={"revision": 2}).status_code == 200
    shadowed.tend()
    assert shadowed.report()["ended_because"] == "promoted"
    (ended,) = shadowed.events("adapter.shadow.ended")
    assert (ended["revision"], ended["shadow"]["ended_because"], ended["shadow"]["compared"]) == (2, "promoted", 1)
    assert shadowed.start().json()["error"]["code"] == "shadow_of_itself"
    assert shadowed.start(revision=1).status_code == 201
    assert shadowed.http.delete(f"{shadowed.path}/revisions/1", params={"undo_s": 0}).status_code == 200
    shadowed.tend()
    history = shadowed.http.get(f"{shadowed.path}/shadow/history").json()["data"]
    assert [(one["revision"], one["ended_because"]) for one in history] == [(1, "revision_deleted"), (2, "promoted")]
    assert len(shadowed.events("adapter.shadow.started")) == 2


def test_shadow_is_stopped_by_its_caller_once(shadowed: Shadowed) -> None:
    shadowed.start()
    shadowed.ask()
    shadowed.report(1)
    ended = shadowed.http.delete(f"{shadowed.path}/shadow")
    assert (ended.status_code, ended.json()["ended_because"], ended.json()["requests"]["compared"]) == (
        200,
        "stopped",
        1,
    )
    assert shadowed.http.delete(f"{shadowed.path}/shadow").status_code == 404
    before = len(shadowed.requests_of(2))
    shadowed.ask()
    shadowed.ask()
    assert len(shadowed.requests_of(2)) == before


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ({"share": 0}, 400, "share"),
        ({"share": 1.5}, 400, "share"),
        ({"share": 1e-9}, 400, "share"),
        ({"max_tokens_per_day": 0}, 400, "max_tokens_per_day"),
        ({"revision": 9}, 404, "revision"),
        ({"revision": 1}, 409, "revision"),
        ({"luck": 1}, 400, "luck"),
    ],
)
def test_shadow_that_cannot_be_is_refused_with_its_field(
    shadowed: Shadowed, body: dict[str, Any], status: int, field: str
) -> None:
    refused = shadowed.start(**body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (status, field), refused.text
    assert shadowed.http.get(f"{shadowed.path}/shadow").status_code == 404


def test_second_shadow_of_an_adapter_is_refused(shadowed: Shadowed) -> None:
    assert shadowed.start().status_code == 201
    assert shadowed.start().json()["error"]["code"] == "shadow_exists"


def test_shadow_is_its_owners_alone(shadowed: Shadowed) -> None:
    shadowed.http.put(f"{shadowed.path}/grants/globex")
    shadowed.start()
    name = f"{shadowed.tenant}/voice"
    shadowed.site.openai("globex").completions.create(model=name, prompt="hello", max_tokens=4)
    with shadowed.site.http("globex") as other:
        for path in (f"/v1/adapters/{name}/shadow", f"/v1/adapters/{name}/shadow/history"):
            assert other.get(path).status_code == 404
        assert other.delete(f"/v1/adapters/{name}/shadow").status_code == 404
    shadowed.ask()
    assert shadowed.report(1)["requests"]["compared"] == 1
    assert len(shadowed.requests_of(2)) == 1, "another tenant's request was repeated"


def files_of(shadowed: Shadowed) -> list[Any]:
    return list(shadowed.site.openai(shadowed.tenant).files.list(purpose="shadow_output"))


def test_outputs_are_kept_in_a_file_only_where_they_are_asked_for(shadowed: Shadowed) -> None:
    shadowed.answers(b"good", b"goat")
    shadowed.start()
    shadowed.ask()
    shadowed.report(1)
    shadowed.http.delete(f"{shadowed.path}/shadow")
    assert files_of(shadowed) == []
    shadowed.start(keep_outputs=True)
    answer = shadowed.ask()
    shadowed.report(1)
    shadowed.tend()
    (file,) = files_of(shadowed)
    line = json.loads(shadowed.site.openai(shadowed.tenant).files.content(file.id).text)
    assert (line["request_id"], line["model"], line["candidate"]) == (
        answer.id,
        f"{shadowed.tenant}/voice@1",
        f"{shadowed.tenant}/voice@2",
    )
    texts = [one["text"] for side in ("current_choices", "candidate_choices") for one in line[side]]
    assert texts == ["good", "goat"]
    assert line["measures"]["exact"] == 0


def test_kept_output_of_a_shadow_is_no_longer_than_what_was_billed(shadowed: Shadowed) -> None:
    shadowed.answers(b"g", b"goats and sheep")
    shadowed.start(keep_outputs=True)
    answer = shadowed.ask(max_tokens=25)
    found = shadowed.report(1)
    shadowed.tend()
    (file,) = files_of(shadowed)
    line = json.loads(shadowed.site.openai(shadowed.tenant).files.content(file.id).text)
    assert (answer.usage.completion_tokens, found["candidate_tokens"]) == (2, 16)
    assert line["current_choices"] == [{"text": "g", "finish_reason": "stop"}]
    assert line["candidate_choices"] == [{"text": "go", "finish_reason": None, "truncated": True}]
    assert line["measures"]["length_ratio"] == pytest.approx(math.log(8)), "measured over the whole answer"


def test_outputs_of_a_tenant_with_zero_retention_are_never_kept(shadowed: Shadowed) -> None:
    path = f"/admin/tenants/{shadowed.tenant}"
    shadowed.start(keep_outputs=True)
    with shadowed.site.http("all-scopes") as operator:
        assert operator.patch(path, json={"zero_retention": True}).status_code == 200
    shadowed.ask()
    found = shadowed.report(1)
    shadowed.tend()
    assert (found["requests"]["compared"], files_of(shadowed)) == (1, [])
    shadowed.http.delete(f"{shadowed.path}/shadow")
    refused = shadowed.start(keep_outputs=True)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "zero_retention")
    assert shadowed.start().status_code == 201


def test_caller_cannot_ask_for_the_tier_of_shadows(shadowed: Shadowed) -> None:
    with pytest.raises(openai.BadRequestError):
        shadowed.ask(extra_body={"service_tier": "shadow"})
