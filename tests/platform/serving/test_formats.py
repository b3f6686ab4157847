"""Templates of revisions are rendered in turns by tenant, and their failures are the caller's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

import pytest
from tiny_base import byte_tokenizer

from loramux.catalog.validation.rendering import TemplateFailed
from loramux.common.bundle import Bundle
from loramux.serving.errors import InvalidRequest
from loramux.serving.formats import RENDERINGS_PER_TENANT, Format, Formats
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
