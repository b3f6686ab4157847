"""Templates of revisions are rendered in turns by tenant, and their failures are the caller's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

import pytest
from tiny_base import byte_tokenizer

from loramux.catalog.validation.rendering import TemplateFailed, template_variables
from loramux.common.bundle import Bundle
from loramux.common.sandbox import sandbox
from loramux.engine.messages import Constraint
from loramux.serving.errors import InvalidRequest, ServingError
from loramux.serving.formats import (
    CHEAP_SECONDS,
    RENDERINGS_PER_TENANT,
    Format,
    Formats,
    ProcessorBudget,
    TemplateTooExpensive,
)
from loramux.serving.messages import ChatOptions, Message
from loramux.serving.tokenizer import Tokenizer

HELLO = (Message("user", "hello"),)


class Renderer:
    """Renders at once, but for a template that waits until it may end."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.waiting = 0

    def render(self, template: str, variables: Mapping[str, Any], max_characters: int) -> str:
        del max_characters
        if template == "slow":
            self.waiting += 1
            assert self.may_end.wait(30)
        if template == "broken":
            raise TemplateFailed("refused", "it wants another role")
        if template == "dear":
            self.waiting += 1
            raise TemplateFailed("too_expensive", "it takes long")
        if template == "strict" and any(one["role"] == "system" for one in variables["messages"][1:]):
            raise TemplateFailed("refused", "system first")
        return f"{template}: {variables['messages'][0]['content']}"


def format_with(template: str) -> Format:
    return Format(Tokenizer(byte_tokenizer()), Bundle(chat_template=template))


def test_formats_one_tenant_s_slow_templates_delay_no_other() -> None:
    async def run() -> None:
        renderer = Renderer()
        formats = Formats(renderer)  # type: ignore[arg-type]
        slow, quick = format_with("slow"), format_with("quick")
        stuck = [
            asyncio.create_task(formats.encode_chat(slow, HELLO, ChatOptions(), 100, "acme"))
            for _ in range(5 * RENDERINGS_PER_TENANT)
        ]
        for _ in range(5):
            answer = await formats.encode_chat(quick, HELLO, ChatOptions(), 100, "globex")
            assert bytes(answer.token_ids) == b"quick: hello"
        assert renderer.waiting <= RENDERINGS_PER_TENANT, "the others wait for their turn without a thread"
        renderer.may_end.set()
        assert len(await asyncio.gather(*stuck)) == len(stuck)
        formats.close()

    asyncio.run(run())


def test_formats_template_that_refuses_is_the_caller_s_error() -> None:
    formats = Formats(Renderer())  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="another role") as refused:
        asyncio.run(formats.encode_chat(format_with("broken"), HELLO, ChatOptions(), 100, "acme"))
    assert (refused.value.field, refused.value.code) == ("messages", "chat_template_failed")
    formats.close()


LATE = (*HELLO, Message("system", "late"))


def test_formats_late_instructions_are_folded_where_a_revisions_template_refuses_them() -> None:
    formats = Formats(Renderer())  # type: ignore[arg-type]
    rendered = asyncio.run(formats.encode_chat(format_with("strict"), LATE, ChatOptions(), 100, "acme"))
    assert bytes(rendered.token_ids) == b"strict: late"
    formats.close()


def test_formats_template_that_costs_too_much_is_rendered_once() -> None:
    renderer = Renderer()
    formats = Formats(renderer)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="takes long"):
        asyncio.run(formats.encode_chat(format_with("dear"), LATE, ChatOptions(), 100, "acme"))
    assert renderer.waiting == 1
    formats.close()


@pytest.mark.parametrize("tail", ["assistant: <think>\n", "assistant: "])
def test_formats_constraint_begins_after_a_thought_or_with_a_call_in_it(tail: str) -> None:
    tokenizer = byte_tokenizer("{% if tools %}<tool_call>{% endif %}<think></think>")
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>"])
    format, asked = Format(Tokenizer(tokenizer)), Constraint(grammar="g", field="tools")
    free = format.behind_thought(asked, tail, may_call=False)
    assert (free.after, free.entry) == (259, None)
    assert free.opening == (None if "<think>" in tail else 258)
    assert format.behind_thought(asked, tail, may_call=True).entry == 260
    assert format.behind_thought(asked, "<think></think>", may_call=True) == asked


class ClockedBudget:
    """A budget whose clock stands until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.budget = ProcessorBudget(lambda: self.now)


def test_formats_expensive_templates_use_up_their_tenants_processor_time_and_get_it_back() -> None:
    clocked = ClockedBudget()
    for _ in range(60):
        clocked.budget.charge("acme", 0.05)
    with pytest.raises(TemplateTooExpensive, match="more than 5 ms") as refused:
        clocked.budget.check("acme")
    assert (refused.value.status, refused.value.retry_after) == (429, 17)
    clocked.budget.check("globex")
    clocked.now += 17
    clocked.budget.check("acme")


def test_formats_cheap_templates_are_never_counted() -> None:
    clocked = ClockedBudget()
    for _ in range(100_000):
        clocked.budget.charge("acme", CHEAP_SECONDS)
    clocked.budget.check("acme")
    assert not clocked.budget._spent


class CostlyRenderer(Renderer):
    """Runs a job for each rendering that takes all that it may, as the sandbox counts it."""

    def render(self, template: str, variables: Mapping[str, Any], max_characters: int) -> str:
        sandbox._charge(0.5)
        raise TemplateFailed("too_expensive", "it takes more than 50 ms of processor time")


def test_formats_a_tenant_with_costly_templates_is_refused_before_the_next_is_rendered() -> None:
    async def run() -> list[str]:
        formats, codes = Formats(CostlyRenderer()), list[str]()  # type: ignore[arg-type]
        for _ in range(5):
            with pytest.raises(ServingError) as refused:
                await formats.encode_chat(format_with("x"), HELLO, ChatOptions(), 100, "acme")
            codes.append(refused.value.code)
        formats.close()
        return codes

    assert asyncio.run(run()) == ["chat_template_failed"] * 3 + ["chat_template_too_expensive"] * 2


@pytest.mark.parametrize("name", ["eos_token", "image_token"])
def test_formats_a_caller_cannot_set_what_the_adapter_sets(name: str) -> None:
    formats = Formats(Renderer())  # type: ignore[arg-type]
    bundle = Bundle(chat_template="quick", special_tokens={name: "<x>"})
    asked = ChatOptions(template={name: "<y>"})
    with pytest.raises(InvalidRequest, match="set by the adapter") as refused:
        asyncio.run(formats.encode_chat(Format(Tokenizer(byte_tokenizer()), bundle), HELLO, asked, 100, "acme"))
    assert refused.value.field == f"chat_template_kwargs.{name}"
    formats.close()


def test_template_variables_take_every_name_of_a_caller() -> None:
    given = {"special_tokens": 1, "more": 2, "self": 3, "messages": 4, "class": 5, "not a name": 6}
    variables = template_variables({"eos_token": "</s>"}, [], **given | {"eos_token": "other"})
    assert variables["messages"] == []
    assert variables["eos_token"] == "</s>"
    assert {name: variables[name] for name in given if name != "messages"} == {
        name: value for name, value in given.items() if name != "messages"
    }
