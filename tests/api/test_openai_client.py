"""The official client, synchronous and asynchronous, against both servers."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import msgspec
import openai
import pytest
from scripted_engine import EOS
from site_fixture import Site

from loramux.common.units import TokenCounts
from loramux.engine.messages import EngineFault
from loramux.serving.messages import Delta, Token, TokenLogprob
from loramux_api.controllers.chat import ChatWriter
from loramux_api.controllers.completions import CompletionBody, CompletionWriter
from loramux_api.schemas.chat import ChatBody, ChatMessage

HELLO = [{"role": "user", "content": "héllo"}]
SAID = "user: héllo\nassistant:"
TOKENS = len(SAID.encode())


def say(text: str) -> object:
    """A script that says `text` whatever it is asked."""
    return lambda request: [*text.encode(), EOS]


def test_a_whole_chat_answer(site: Site) -> None:
    answer = site.openai().chat.completions.create(model="tiny", messages=HELLO)
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model) == ("chat.completion", "tiny")
    assert answer.system_fingerprint
    assert answer.choices[0].message.role == "assistant"
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (SAID, "stop")
    assert answer.choices[0].logprobs is None
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (TOKENS, TOKENS + 1)
    assert answer.usage.total_tokens == 2 * TOKENS + 1
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_a_streamed_chat_answer(site: Site) -> None:
    options = {"include_usage": True}
    with site.openai().chat.completions.create(
        model="tiny", messages=HELLO, stream=True, stream_options=options
    ) as stream:
        chunks = list(stream)
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == SAID
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 2 * TOKENS + 1


def test_the_clients_own_stream_helper_understands_the_stream(site: Site) -> None:
    with site.openai().chat.completions.stream(model="tiny", messages=HELLO, n=2) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert [choice.message.content for choice in final.choices] == [SAID, SAID]


def test_an_asynchronous_client(site: Site) -> None:
    async def talk() -> tuple[str, str | None]:
        async with openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key=site.keys["acme"], max_retries=0) as client:
            whole = await client.chat.completions.create(model="tiny", messages=HELLO)
            stream = await client.completions.create(model="tiny", prompt="héllo", stream=True)
            return "".join([chunk.choices[0].text async for chunk in stream]), whole.choices[0].message.content

    assert asyncio.run(talk()) == ("héllo", SAID)


def test_chat_logprobs(site: Site) -> None:
    site.engine.script = say("aé")
    answer = site.openai().chat.completions.create(model="tiny", messages=HELLO, logprobs=True, top_logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [one.token for one in logprobs.content] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    assert [one.bytes for one in logprobs.content] == [[97], [0xC3], [0xA9]]
    assert [(top.token, top.logprob) for top in logprobs.content[0].top_logprobs] == [("a", -0.5), ("b", -1.5)]


def test_streamed_chat_logprobs_come_with_their_text(site: Site) -> None:
    site.engine.script = say("aéb")
    stream = site.openai().chat.completions.create(model="tiny", messages=HELLO, logprobs=True, stream=True)
    pairs = [
        (chunk.choices[0].delta.content, bytes(b for one in chunk.choices[0].logprobs.content for b in one.bytes))
        for chunk in stream
        if chunk.choices[0].logprobs
    ]
    assert pairs == [("a", b"a"), ("é", "é".encode()), ("b", b"b")]


def test_completion_logprobs(site: Site) -> None:
    site.engine.script = say("aéb")
    answer = site.openai().completions.create(model="tiny", prompt="x", logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["a", "bytes:\\xc3", "bytes:\\xa9", "b"]
    assert logprobs.text_offset == [0, 1, 1, 2]
    assert logprobs.token_logprobs == [-0.5] * 4
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[0] == {"a": -0.5, "b": -1.5}


@pytest.mark.parametrize(
    ("prompt", "texts", "prompt_tokens"),
    [
        ("ab", ["ab"], 3),
        (["ab", "c"], ["ab", "c"], 5),
        ([104, 105], ["hi"], 2),
        ([[104, 105], [106]], ["hi", "j"], 3),
    ],
    ids=["text", "texts", "tokens", "lists of tokens"],
)
def test_every_form_of_prompt(site: Site, prompt: object, texts: list[str], prompt_tokens: int) -> None:
    answer = site.openai().completions.create(model="tiny", prompt=prompt)
    assert [choice.text for choice in answer.choices] == texts
    assert [choice.index for choice in answer.choices] == list(range(len(texts)))
    assert answer.object == "text_completion"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == prompt_tokens


def test_several_choices_of_several_prompts_are_in_order(site: Site) -> None:
    answer = site.openai().completions.create(model="tiny", prompt=["a", "b"], n=2, max_tokens=1)
    assert [(c.index, c.text, c.finish_reason) for c in answer.choices] == [
        (0, "a", "length"),
        (1, "a", "length"),
        (2, "b", "length"),
        (3, "b", "length"),
    ]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 4)


def test_a_stop_string_ends_the_text_and_the_engines_work(site: Site) -> None:
    site.engine.script = say("one END two END three")
    answer = site.openai().completions.create(model="tiny", prompt="x", stop=["END"], max_tokens=100)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("one ", "stop")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len("one END")
    assert site.engine.cancelled == [f"{answer.id}-0"]


def test_every_sampling_parameter_reaches_the_engine(site: Site) -> None:
    site.openai().chat.completions.create(
        model="tiny",
        messages=HELLO,
        temperature=0.25,
        top_p=0.5,
        seed=-7,
        presence_penalty=1.5,
        frequency_penalty=-1.5,
        logit_bias={"65": -100, "66": 5},
        max_completion_tokens=9,
        user="somebody",
        metadata={"trace": "1"},
        extra_body={
            "top_k": 40,
            "min_p": 0.125,
            "repetition_penalty": 1.25,
            "stop_token_ids": [10, 11],
            "allowed_token_ids": [72, 73],
            "min_tokens": 2,
            "ignore_eos": True,
        },
    )
    sent = site.engine.requests[0].sampling
    assert (sent.temperature, sent.top_p, sent.top_k, sent.min_p) == (0.25, 0.5, 40, 0.125)
    assert sent.allowed_token_ids == (72, 73)
    assert sent.seed == 2**63 - 7
    assert (sent.repetition_penalty, sent.presence_penalty, sent.frequency_penalty) == (1.25, 1.5, -1.5)
    assert sent.logit_bias == {65: -100.0, 66: 5.0}
    assert (sent.stop_token_ids, sent.min_tokens, sent.ignore_eos, sent.max_tokens) == ((10, 11), 2, True, 9)
    assert sent.logprobs is None


def test_the_defaults_are_openais(site: Site) -> None:
    site.openai().completions.create(model="tiny", prompt="x")
    sent = site.engine.requests[0].sampling
    assert (sent.temperature, sent.top_p, sent.top_k, sent.min_p, sent.seed) == (1.0, 1.0, 0, 0.0, None)
    assert (sent.repetition_penalty, sent.presence_penalty, sent.frequency_penalty) == (1.0, 0.0, 0.0)
    assert (sent.max_tokens, sent.min_tokens, sent.ignore_eos, sent.logit_bias) == (16, 0, False, {})


def test_content_in_parts_and_the_developers_role(site: Site) -> None:
    answer = site.openai().chat.completions.create(
        model="tiny",
        messages=[
            {"role": "developer", "content": "be kind"},
            {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
        ],
    )
    assert answer.choices[0].message.content == "system: be kind\nuser: hi\nassistant:"


def test_chat_accepts_a_returned_assistant_message(site: Site) -> None:
    client = site.openai()
    message = client.chat.completions.create(model="tiny", messages=HELLO).choices[0].message
    again = client.chat.completions.create(model="tiny", messages=[*HELLO, message.model_dump(), *HELLO])
    (hello,) = HELLO
    turn = f"user: {hello['content']}\nassistant:"
    assert message.content == turn
    assert again.choices[0].message.content == f"{turn} {message.content}\n{turn}"


def test_models(site: Site, newcomer: str) -> None:
    client = site.openai(newcomer)
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "loramux"
    with pytest.raises(openai.NotFoundError) as refusal:
        client.models.retrieve("acme/nothing")
    assert refusal.value.code == "model_not_found"


def test_an_unknown_model_is_a_not_found_error(site: Site) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist or you do not have access"):
        site.openai().chat.completions.create(model="globex/upper", messages=HELLO)


def test_a_wrong_key_is_an_authentication_error(site: Site) -> None:
    client = openai.OpenAI(base_url=f"{site.url}/v1", api_key="sk-lm-wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError) as refusal:
        client.models.list()
    assert refusal.value.code == "invalid_api_key"
    assert refusal.value.request_id


def test_a_failure_before_the_first_token_has_its_status_even_for_a_stream(site: Site) -> None:
    def break_down(request: object) -> list[int]:
        raise RuntimeError("the script is broken")

    site.engine.script = break_down
    with pytest.raises(openai.InternalServerError) as refusal:
        site.openai().completions.create(model="tiny", prompt="x", stream=True)
    assert "script" not in str(refusal.value)


def test_a_failure_in_the_middle_of_a_stream_is_raised_by_the_client(site: Site) -> None:
    site.engine.script = lambda request: [65, EngineFault("internal_error", "the engine has failed"), 66]
    stream = site.openai().completions.create(model="tiny", prompt="x", stream=True)
    assert next(stream).choices[0].text == "A"
    with pytest.raises(openai.APIError, match="the engine has failed"):
        next(stream)


def test_usage_by_the_admin_client(site: Site) -> None:
    site.openai("globex").completions.create(model="tiny", prompt="ab")
    admin = openai.OpenAI(base_url=f"{site.url}/v1", api_key="x", admin_api_key=site.keys["globex"], max_retries=0)
    page = admin.admin.organization.usage.completions(
        start_time=int(time.time()) - 60, bucket_width="1m", group_by=["model"], models=["tiny"]
    )
    results = [result for bucket in page.data for result in bucket.results]
    assert {result.model for result in results} == {"tiny"}
    assert sum(result.input_tokens for result in results) >= 3
    assert sum(result.num_model_requests for result in results) >= 1


@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_logprobs_of_a_whole_answer_are_encoded_as_they_come(kind: str) -> None:
    token = Token("a", b"a")
    one = TokenLogprob(token=token, logprob=-0.5, top=((token, -0.5), (Token("b", b"b"), -1.0)), offset=0)
    answer = SimpleNamespace(id="x", model="tiny", created=1, prompt_token_ids=[[1]], service_tier="default")
    if kind == "chat":
        body = ChatBody(model="tiny", messages=[ChatMessage(role="user", content="x")], logprobs=True, top_logprobs=2)
        writer = ChatWriter(body, answer, "fp")
    else:
        writer = CompletionWriter(CompletionBody(model="tiny", prompt="x", logprobs=2), answer, "fp")
    for index in (1, 0, 1):
        writer.collect(Delta(index=index, text="a", token_ids=(97,), logprobs=(one,)))
    choices = writer.whole(TokenCounts()).choices
    assert [choice.index for choice in choices] == [0, 1]
    logprobs = choices[1].logprobs
    encoded = logprobs.content if kind == "chat" else logprobs.top_logprobs
    assert isinstance(encoded, msgspec.Raw)
    decoded = msgspec.json.decode(msgspec.json.encode(logprobs))
    if kind == "chat":
        assert [[top["token"] for top in part["top_logprobs"]] for part in decoded["content"]] == [["a", "b"]] * 2
    else:
        assert decoded["top_logprobs"] == [{"a": -0.5, "b": -1.0}] * 2
        assert decoded["tokens"] == ["a", "a"]
