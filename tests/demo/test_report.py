from __future__ import annotations

import dataclasses
import io
from collections import Counter

import pytest
from rich.console import Console

from loramux_demo.assets import AGENT, MODEL_NAME, OWNERS, load_prompts
from loramux_demo.drive import ENDPOINTS, Answer, Drive, plan_calls
from loramux_demo.tour import Report, StepSharing, UsageRow, show, usage_of

CALLS = plan_calls(load_prompts())


def right_answers():
    return tuple(
        Answer(call, model=f"{call.model}@1", text=call.prompt.expected, input_tokens=30, output_tokens=10)
        for call in CALLS
    )


def a_report(**changes):
    answers = right_answers()
    bill = tuple(usage_of(answers))
    report = Report(
        url="http://127.0.0.1:1",
        drive=Drive(answers, seconds=2.0),
        sharing=StepSharing(in_a_step=6, beside_base=6),
        usage=bill,
        usage_of_responses=bill,
        isolated=True,
    )
    return dataclasses.replace(report, **changes)


def test_plan_calls_adapters_by_owner_and_base_by_all():
    askers = {(call.tenant, call.model) for call in CALLS}
    owned = {(tenant, f"{tenant}/{adapter}") for tenant, adapters in OWNERS.items() for adapter in adapters}
    assert askers == owned | {(tenant, MODEL_NAME) for tenant in OWNERS}


def test_plan_calls_every_model_on_every_endpoint_and_one_with_tools_in_chats():
    ways = {model: {call.endpoint for call in CALLS if call.model == model} for model in {call.model for call in CALLS}}
    assert ways.pop(f"globex/{AGENT}") == {"chat", "chat, streamed"}
    assert all(used == set(ENDPOINTS) for used in ways.values())
    texts = [call for call in CALLS if call.model != f"globex/{AGENT}"]
    assert max(Counter(call.endpoint for call in texts).values()) <= len(texts) / 4 + 1


def test_report_of_a_good_run_has_no_failures():
    document = a_report().as_json()
    assert document["ok"]
    assert document["failures"] == []
    assert document["exact"] == 1.0
    assert document["max_distinct_adapters_in_a_step"] == 6
    assert document["tokens_per_second"] == len(CALLS) * 10 / 2
    assert document["answers"][0].keys() >= {"model", "prompt", "text", "expected", "ok"}
    assert document["usage"][0].keys() == {"tenant", "model", "input_tokens", "output_tokens", "requests"}


def spoiled(count):
    answers = list(right_answers())
    answers[:count] = [dataclasses.replace(answer, text=answer.text + " ") for answer in answers[:count]]
    return Drive(tuple(answers), 2.0)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"drive": spoiled(9)}, "only 88% of the answers"),
        ({"sharing": StepSharing(in_a_step=6, beside_base=4)}, "at most 4 adapters shared a step with the base"),
        ({"usage": ()}, "usage rows differ"),
        ({"isolated": False}, "can distinguish"),
    ],
)
def test_report_failure_is_one_sentence_per_check(changes, sentence):
    (failure,) = a_report(**changes).failures
    assert sentence in failure


def test_report_accepts_ninety_percent_exact():
    assert a_report(drive=spoiled(7)).failures == []


def test_usage_of_responses_is_summed_by_tenant_and_model():
    acme, globex = CALLS[0], CALLS[7]
    assert (acme.tenant, globex.tenant, acme.model) == ("acme", "globex", globex.model)
    answers = [
        Answer(acme, "m@1", input_tokens=1, output_tokens=2),
        Answer(globex, "m@1", input_tokens=3, output_tokens=4),
        Answer(acme, "m@1", input_tokens=5, output_tokens=6),
        Answer(acme, error="refused"),
    ]
    assert usage_of(answers) == [UsageRow("acme", "m@1", 6, 8, 2), UsageRow("globex", "m@1", 3, 4, 1)]


def printed(report, *, links=None):
    text = io.StringIO()
    keys = {tenant: f"sk-lm-{tenant}" for tenant in OWNERS}
    show(report, keys, Console(file=text, width=160), links=links)
    return text.getvalue()


def test_show_prints_answers_figures_and_usage():
    text = printed(a_report())
    for answer in right_answers()[:7]:
        assert answer.text in text
    assert "6 distinct adapters and the base model shared one step" in text
    assert "77 of 77 answers are exactly as expected" in text
    assert "acme/upper@1" in text
    assert "curl" not in text


def test_show_while_serving_prints_curl_lines_and_sign_in_links():
    text = printed(a_report(), links={"acme": "http://127.0.0.1:1/console/#sign-in=secret"})
    assert "http://127.0.0.1:1/console/#sign-in=secret" in text
    assert "curl http://127.0.0.1:1/v1/chat/completions -H 'Authorization: Bearer sk-lm-acme'" in text
    assert "Bearer sk-lm-globex" in text


def test_show_wrong_answers_up_to_a_limit_with_the_expected_text():
    text = printed(a_report(drive=spoiled(60)))
    assert "(expected: " in text
    assert text.count("(expected: ") == 21 + 10
