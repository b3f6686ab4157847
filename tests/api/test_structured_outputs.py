"""Formats of answers through the official client, on a real engine: half of a batch constrained, half not."""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jsonschema
import openai
import pytest
from constrained_site import ADAPTERS, TOOLS_TEMPLATE, constrained_site
from site_fixture import Site

MODELS = ["tiny", *(f"acme/a{number}" for number in range(ADAPTERS))]
HELLO = [{"role": "user", "content": "hello"}]

SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2},
    {
        "anyOf": [
            {"type": "null"},
            {
                "type": "object",
                "properties": {"kind": {"const": "x"}, "when": {"type": "string", "format": "date"}},
                "required": ["kind", "when"],
                "additionalProperties": False,
            },
        ]
    },
    {"type": "string", "pattern": "^[A-Z]{2}[0-9]{4}$"},
    {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"leaf": {"type": "boolean"}},
                "required": ["leaf"],
                "additionalProperties": False,
            }
        },
    },
]


CALLS_TEMPLATE = TOOLS_TEMPLATE.partition("{% if enable_thinking")[0]
"""Tools without thoughts."""
OBJECTS = [SCHEMAS[0], SCHEMAS[4]]
"""Arguments of tools."""


@pytest.fixture(scope="module")
def constrained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with constrained_site(tmp_path_factory.mktemp("constrained"), CALLS_TEMPLATE) as made:
        yield made


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def ask(site: Site, **fields: Any) -> Any:
    """One chat of the base at a high temperature, with a seed."""
    sampling = {"model": "tiny", "messages": HELLO, "temperature": 1.3, "seed": 5, "max_tokens": 400}
    return site.openai().chat.completions.create(**sampling | fields)


@pytest.mark.parametrize("number", range(len(SCHEMAS)))
def test_json_schema_answers_validate(constrained: Site, number: int) -> None:
    for seed in range(3):
        choice = ask(constrained, response_format=strict(SCHEMAS[number]), seed=seed).choices[0]
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), SCHEMAS[number])


def test_json_object_is_an_object_or_the_beginning_of_one(constrained: Site) -> None:
    content = ask(constrained, response_format={"type": "json_object"}, max_tokens=60).choices[0].message.content
    assert content.lstrip().startswith("{")


def test_text_format_constrains_nothing(constrained: Site) -> None:
    plain = ask(constrained, max_tokens=20).choices[0].message.content
    assert ask(constrained, response_format={"type": "text"}, max_tokens=20).choices[0].message.content == plain


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": "[0-9]{3}-[a-f]+x"}}, "[0-9]{3}-[a-f]+x"),
        ({"structured_outputs": {"choice": ["red", "grün 🙂", 'a "b"\\']}}, r'red|grün 🙂|a "b"\\'),
        ({"structured_outputs": {"grammar": 'start: "a" ("b" | "c")~3'.replace("~3", "{3}")}}, "a[bc]{3}"),
        ({"structured_outputs": {"grammar": 'root ::= "yes" | "no" [0-9]'}}, "yes|no[0-9]"),
        ({"structured_outputs": {"json": {"type": "boolean"}}}, r"\s*(true|false)\s*"),
        ({"guided_regex": "x+y"}, "x+y"),
        ({"guided_choice": ["left", "right"]}, "left|right"),
        ({"guided_grammar": 'start: "q"'}, "q"),
        ({"guided_json": '{"const": 7}'}, r"\s*7\s*"),
    ],
)
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_vllm_formats_match_on_both_endpoints(
    constrained: Site, endpoint: str, fields: dict[str, Any], pattern: str
) -> None:
    if endpoint == "chat":
        text = ask(constrained, extra_body=fields).choices[0].message.content
    else:
        answer = constrained.openai().completions.create(
            model="acme/a1", prompt="hello", temperature=1.0, max_tokens=200, extra_body=fields
        )
        text = answer.choices[0].text
    assert re.fullmatch(pattern, text), text


def test_choices_of_one_request_are_constrained_each_by_itself(constrained: Site) -> None:
    answer = ask(constrained, n=4, extra_body={"structured_outputs": {"regex": "[a-z]{8}"}})
    texts = [choice.message.content for choice in answer.choices]
    assert all(re.fullmatch("[a-z]{8}", text) for text in texts)
    assert len(set(texts)) > 1


def test_streamed_answer_joins_to_the_whole_one(constrained: Site) -> None:
    whole = ask(constrained, response_format=strict(SCHEMAS[0])).choices[0].message.content
    with ask(constrained, response_format=strict(SCHEMAS[0]), stream=True) as stream:
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole


def test_answer_cut_by_max_tokens_reports_length(constrained: Site) -> None:
    choice = ask(constrained, extra_body={"guided_regex": "[0-9]{50}"}, max_tokens=10).choices[0]
    assert re.fullmatch("[0-9]{10}", choice.message.content)
    assert choice.finish_reason == "length"


def test_logprobs_of_a_forced_token_are_zero(constrained: Site) -> None:
    fields = {"guided_regex": "a(b|c)"}
    content = ask(constrained, extra_body=fields, logprobs=True, top_logprobs=5).choices[0].logprobs.content
    assert (content[0].token, content[0].logprob) == ("a", 0.0)
    assert {top.token for top in content[1].top_logprobs} == {"b", "c"}
    assert math.fsum(math.exp(top.logprob) for top in content[1].top_logprobs) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("fields", "param", "why"),
    [
        ({"response_format": strict({"type": "integer", "not": {"const": 3}})}, "response_format", "not"),
        ({"response_format": strict({"$ref": "https://example.com/s"})}, "response_format", "https://example.com/s"),
        ({"response_format": strict({"$ref": "#"})}, "response_format", "no answer satisfies it"),
        ({"response_format": strict({"type": "colour"})}, "response_format", "colour"),
        ({"structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs.regex", "look-around"),
        ({"structured_outputs": {"grammar": "start: unknown"}}, "structured_outputs.grammar", "unknown"),
        ({"structured_outputs": {"json": "[1"}}, "structured_outputs.json", "not valid JSON"),
        ({"structured_outputs": {"json": 7}}, "structured_outputs.json", "JSON object"),
        ({"structured_outputs": {"regex": "x" * 300_000}}, "structured_outputs.regex", "262144"),
    ],
)
def test_format_that_cannot_be_enforced_is_refused_by_name(
    constrained: Site, fields: dict[str, Any], param: str, why: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(constrained, extra_body=fields)
    assert refused.value.param == param
    assert why in refused.value.message
    assert refused.value.code == "invalid_constraint"


def test_unenforceable_keyword_is_left_out_where_strict_is_not_asked_for(constrained: Site) -> None:
    schema = {"type": "integer", "minimum": 1, "maximum": 9, "not": {"const": 3}}
    format = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    assert 1 <= json.loads(ask(constrained, response_format=format).choices[0].message.content) <= 9


@dataclass(frozen=True)
class Plan:
    """One of many requests; with a schema its answer, or its call of a tool, has that form."""

    schema: dict[str, Any] | None
    fields: dict[str, Any]
    is_streamed: bool
    calls: bool = False

    async def send(self, client: openai.AsyncOpenAI) -> str:
        """Return the answer: of a call its arguments, of a free one its token ids."""
        fields = self.fields | {"stream": self.is_streamed, "extra_body": {"return_token_ids": True}}
        if self.schema is not None and self.calls:
            function = {"name": "report", "parameters": self.schema, "strict": True}
            fields |= {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
            fields["parallel_tool_calls"] = False
        elif self.schema is not None:
            fields["response_format"] = strict(self.schema)
        answer = await client.chat.completions.create(**fields)
        if not self.is_streamed:
            message = answer.choices[0].message
            text = message.tool_calls[0].function.arguments if self.calls else message.content
            return text if self.schema else str(answer.choices[0].token_ids)
        chunks = [chunk.choices[0] async for chunk in answer]
        if self.calls:
            return join_call([piece for chunk in chunks for piece in chunk.delta.tool_calls or []])
        if self.schema:
            return "".join(chunk.delta.content or "" for chunk in chunks)
        return str([token for chunk in chunks for token in getattr(chunk, "token_ids", None) or []])


def join_call(pieces: list[Any]) -> str:
    """Return the arguments of the one call that was streamed in pieces: the first has its id and name."""
    assert pieces[0].id
    assert pieces[0].function.name == "report"
    assert {piece.index for piece in pieces} == {0}
    assert not any(piece.id for piece in pieces[1:])
    return "".join(piece.function.arguments or "" for piece in pieces)


def plans(count: int) -> list[Plan]:
    """`count` seeded requests over all models: half free, a quarter in a schema, a quarter calls; some streamed."""
    rng = random.Random(3)
    made = []
    for number in range(count):
        is_bound, calls = number % 2 == 1, number % 4 == 3
        schema = rng.choice(OBJECTS if calls else SCHEMAS) if is_bound else None
        fields: dict[str, Any] = {
            "model": MODELS[number % len(MODELS)] if number % 4 < 2 else rng.choice(MODELS),
            "messages": [{"role": "user", "content": rng.choice(["hi", "what is it?", "hello " * 9])}],
            "temperature": rng.choice([0.0, 0.7, 1.2]),
            "seed": number,
            "max_tokens": 1500 if schema else rng.randrange(4, 40),
        }
        made.append(Plan(schema, fields, rng.random() < 0.5, calls))
    return made


def mixed(site: Site, asked: list[Plan]) -> list[str]:
    """Send the requests at once."""

    async def send_all() -> list[str]:
        url, key = f"{site.url}/v1", site.keys["acme"]
        async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=900) as client:
            return await asyncio.gather(*(plan.send(client) for plan in asked))

    return asyncio.run(send_all())


def check_mixed(site: Site, count: int) -> None:
    asked = plans(count)
    free = [plan for plan in asked if plan.schema is None]
    answers = dict(zip(map(id, asked), mixed(site, asked), strict=True))
    assert [answers[id(plan)] for plan in free] == mixed(site, free), "constrained neighbours change nothing"
    for plan in asked:
        if plan.schema is not None:
            jsonschema.validate(json.loads(answers[id(plan)]), plan.schema)


def test_mixed_batch_validates_and_leaves_unconstrained_rows_alone(constrained: Site) -> None:
    check_mixed(constrained, 60)


@pytest.mark.slow
def test_500_mixed_requests_validate_and_leave_unconstrained_rows_alone(constrained: Site) -> None:
    check_mixed(constrained, 500)
