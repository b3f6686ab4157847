"""Clients that people have, against a running server: skipped where they are not installed."""

from __future__ import annotations

from typing import Any

import pytest
from site_fixture import Site

pytestmark = pytest.mark.slow

HELLO = [{"role": "user", "content": "hello"}]
SAID = "user: hello\nassistant:"


def test_litellm_takes_two_turns_and_streams(site: Site) -> None:
    litellm: Any = pytest.importorskip("litellm", reason="pip install litellm")
    options = {"model": "openai/tiny", "api_base": f"{site.url}/v1", "api_key": site.keys["acme"]}
    first = litellm.completion(messages=HELLO, **options).choices[0].message
    assert first.content == SAID
    second = litellm.completion(messages=[*HELLO, first.model_dump(), *HELLO], **options)
    assert second.choices[0].message.content.startswith("user: hello\nassistant: user: hello")
    chunks = list(litellm.completion(messages=HELLO, stream=True, **options))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == SAID


def test_litellm_recognises_a_wrong_key(site: Site) -> None:
    litellm: Any = pytest.importorskip("litellm", reason="pip install litellm")
    with pytest.raises(litellm.AuthenticationError, match="Incorrect API key provided"):
        litellm.completion(model="openai/tiny", api_base=f"{site.url}/v1", api_key="sk-lm-wrong", messages=HELLO)


def test_langchain_chats_streams_and_counts(site: Site) -> None:
    langchain: Any = pytest.importorskip("langchain_openai", reason="pip install langchain-openai")
    model = langchain.ChatOpenAI(model="tiny", base_url=f"{site.url}/v1", api_key=site.keys["acme"], stream_usage=True)
    whole = model.invoke("hello")
    assert whole.content == SAID
    assert whole.usage_metadata["total_tokens"] == 2 * len(SAID) + 1
    chunks = list(model.stream("hello"))
    assert "".join(chunk.content for chunk in chunks) == SAID
    again = model.invoke([("user", "hello"), whole, ("user", "more")])
    assert again.content.startswith("user: hello\nassistant: user: hello")
