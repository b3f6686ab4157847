"""A server with a real engine of a tiny random base, and adapters of it: what it says is random, its form is not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
from peft_uploads import form, make_adapter
from running_server import running
from site_fixture import Site, make_keys, make_settings
from tiny_base import CHAT_TEMPLATE, byte_tokenizer, make_base

from loramux.common.settings.serving import EngineSettings
from loramux_api.app import create_app

ADAPTERS = 5
THINK, END_OF_THOUGHT = 258, 259

TOOLS_TEMPLATE = (
    "{% if tools %}tools:{% for t in tools %} {{ t.function.name }}{% endfor %} in <tool_call></tool_call>\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}\n{% endfor %}"
    "assistant:"
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
)
"""Hermes' calls, and thoughts that the model begins itself, unless `enable_thinking` is false."""


@contextmanager
def constrained_site(
    folder: Path, chat_template: str | None = CHAT_TEMPLATE, adapters: int = ADAPTERS, *, thinks: bool = False
) -> Iterator[Site]:
    """`thinks`: the vocabulary has a token each for the ends of a thought."""
    base = make_base(folder / "base", chat_template, context=2048)
    if thinks:
        tokenizer = byte_tokenizer(chat_template)
        tokenizer.add_tokens(["<think>", "</think>"])
        tokenizer.save_pretrained(base)
    settings = msgspec.structs.replace(
        make_settings(base, folder), engine=EngineSettings(in_process=True, num_threads=1, pool_bytes=64 << 20)
    )
    keys = make_keys(settings)
    with running(create_app(settings), "granian") as server:
        site = Site(server, cast(Any, None), settings, keys)
        with site.http() as http:
            for number in range(adapters):
                adapter = make_adapter(base, folder / f"a{number}", seed=number)
                http.post("/v1/adapters", **form(adapter, f"a{number}")).raise_for_status()
        yield site
