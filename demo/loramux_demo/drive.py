"""Send all requests of the demo at once, with the official `openai` client."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import cast

import openai
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletionFunctionToolParam
from openai.types.chat.completion_create_params import ResponseFormat

from loramux_demo.assets import MODEL_NAME, OWNERS, TOOLS, Prompt, call_text, completion_prompt

MAX_TOKENS = 128
FACT: dict[str, object] = {
    "type": "object",
    "properties": {"who": {"type": "string"}},
    "required": ["who"],
    "additionalProperties": {"type": "string"},
}
"""Schema of the answers of the adapter `json`: the person and one fact."""
TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True)
class Call:
    """One request: tenant, model, prompt and endpoint."""

    tenant: str
    model: str
    prompt: Prompt
    endpoint: str
    """Endpoint of the request, one of ENDPOINTS."""


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool in a response."""

    name: str = ""
    arguments: str = ""
    """Arguments of the call, as JSON."""

    def __add__(self, piece: ToolCall) -> ToolCall:
        return ToolCall(self.name + piece.name, self.arguments + piece.arguments)

    @property
    def text(self) -> str:
        """The call in the model's notation."""
        return call_text(self.name, self.arguments)


@dataclass(frozen=True)
class Answer:
    """The answer to a call."""

    call: Call
    model: str = ""
    """Revision that answered, `acme/upper@1`."""
    text: str = ""
    input_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None
    tool_call: ToolCall | None = None

    @property
    def ok(self) -> bool:
        """True if the text is exactly the expected one."""
        return self.text == self.call.prompt.expected


@dataclass(frozen=True)
class Drive:
    """All answers in the order of the calls, and the total wall time."""

    answers: tuple[Answer, ...]
    seconds: float

    def __add__(self, later: Drive) -> Drive:
        return Drive(self.answers + later.answers, self.seconds + later.seconds)

    @property
    def exact(self) -> float:
        """Share of correct answers."""
        return sum(answer.ok for answer in self.answers) / len(self.answers)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second of wall time."""
        return sum(answer.output_tokens for answer in self.answers) / self.seconds


def plan_calls(prompts: Sequence[Prompt]) -> list[Call]:
    """Return one call per prompt, spread over all four endpoints. The adapter's owner sends the call. Calls to the base
    are sent by the tenants in turn.

    Calls with tools use a chat endpoint.
    """
    owner_of = {adapter: tenant for tenant, adapters in OWNERS.items() for adapter in adapters}
    tenants, endpoints = cycle(OWNERS), list(ENDPOINTS)
    chats = [name for name in endpoints if name.startswith("chat")]
    models = len(owner_of) + 1
    return [
        Call(
            tenant=(tenant := owner_of[prompt.adapter] if prompt.adapter else next(tenants)),
            model=f"{tenant}/{prompt.adapter}" if prompt.adapter else MODEL_NAME,
            prompt=prompt,
            endpoint=chosen[(number % models + number // models) % len(chosen)],
        )
        for number, prompt in enumerate(prompts)
        for chosen in (chats if prompt.adapter in TOOLS else endpoints,)
    ]


def first_of_each_model(calls: Sequence[Call]) -> tuple[list[Call], list[Call]]:
    """Split the calls into the first call of every model, and all other calls."""
    first = {call.model: call for call in reversed(calls)}
    return list(first.values()), [call for call in calls if call is not first[call.model]]


async def drive(url: str, keys: dict[str, str], calls: Sequence[Call], verify: ssl.SSLContext | bool = True) -> Drive:
    """Send every call at once and wait for all answers. Proxy settings are ignored, because the server is on this
    machine.
    """
    limits = openai.DEFAULT_CONNECTION_LIMITS
    async with DefaultAsyncHttpxClient(trust_env=False, limits=limits, verify=verify) as http:
        clients = {
            tenant: AsyncOpenAI(
                base_url=f"{url}/v1", api_key=key, http_client=http, max_retries=0, timeout=TIMEOUT_SECONDS
            )
            for tenant, key in keys.items()
        }
        began = time.perf_counter()
        answers = await asyncio.gather(*(ask(clients[call.tenant], call) for call in calls))
        return Drive(tuple(answers), time.perf_counter() - began)


async def ask(client: AsyncOpenAI, call: Call) -> Answer:
    """Send one call. A failure becomes an answer with an error."""
    try:
        return await ENDPOINTS[call.endpoint](client, call)
    except openai.APIError as error:
        return Answer(call, error=str(error))


async def chat(client: AsyncOpenAI, call: Call) -> Answer:
    """POST /v1/chat/completions."""
    whole = await client.chat.completions.create(
        model=call.model,
        messages=[{"role": "user", "content": call.prompt.question}],
        temperature=0,
        max_completion_tokens=MAX_TOKENS,
        response_format=response_format(call),
        tools=tools_of(call),
    )
    message = whole.choices[0].message
    answer = with_usage(Answer(call, whole.model, message.content or ""), whole.usage)
    made = [one.function for one in message.tool_calls or () if one.type == "function"]
    return with_call(answer, ToolCall(made[0].name, made[0].arguments)) if made else answer


async def chat_streamed(client: AsyncOpenAI, call: Call) -> Answer:
    """POST /v1/chat/completions with stream: a call of a tool arrives in pieces."""
    answer, made = Answer(call), ToolCall()
    async for chunk in await client.chat.completions.create(
        model=call.model,
        messages=[{"role": "user", "content": call.prompt.question}],
        temperature=0,
        max_completion_tokens=MAX_TOKENS,
        response_format=response_format(call),
        tools=tools_of(call),
        stream=True,
        stream_options={"include_usage": True},
    ):
        text = "".join(choice.delta.content or "" for choice in chunk.choices)
        answer = with_usage(replace(answer, model=chunk.model, text=answer.text + text), chunk.usage)
        pieces = [piece.function for choice in chunk.choices for piece in choice.delta.tool_calls or ()]
        for piece in pieces:
            made += ToolCall(piece.name or "", piece.arguments or "") if piece else ToolCall()
    return with_call(answer, made) if made.name else answer


def with_call(answer: Answer, made: ToolCall) -> Answer:
    """Return the answer with the call of a tool."""
    return replace(answer, text=answer.text + made.text, tool_call=made)


def tools_of(call: Call) -> list[ChatCompletionFunctionToolParam] | openai.Omit:
    """Return the tools that the adapter was trained with."""
    known = TOOLS.get(call.prompt.adapter or "")
    return cast(list[ChatCompletionFunctionToolParam], known) if known else openai.omit


def response_format(call: Call) -> ResponseFormat:
    """Return the schema of the adapter that answers in JSON, and plain text for every other model."""
    if call.prompt.adapter != "json":
        return {"type": "text"}
    return {"type": "json_schema", "json_schema": {"name": "fact", "schema": FACT, "strict": True}}


async def completion(client: AsyncOpenAI, call: Call) -> Answer:
    """POST /v1/completions."""
    answer = await client.completions.create(
        model=call.model, prompt=completion_prompt(call.prompt.question), temperature=0, max_tokens=MAX_TOKENS
    )
    return with_usage(Answer(call, answer.model, answer.choices[0].text), answer.usage)


async def completion_streamed(client: AsyncOpenAI, call: Call) -> Answer:
    """POST /v1/completions with stream."""
    answer = Answer(call)
    async for chunk in await client.completions.create(
        model=call.model,
        prompt=completion_prompt(call.prompt.question),
        temperature=0,
        max_tokens=MAX_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
    ):
        text = "".join(choice.text for choice in chunk.choices)
        answer = with_usage(replace(answer, model=chunk.model, text=answer.text + text), chunk.usage)
    return answer


def with_usage(answer: Answer, usage: CompletionUsage | None) -> Answer:
    """Return the answer with the token counts of the response."""
    if usage is None:
        return answer
    return replace(answer, input_tokens=usage.prompt_tokens, output_tokens=usage.completion_tokens)


ENDPOINTS: dict[str, Callable[[AsyncOpenAI, Call], Awaitable[Answer]]] = {
    "chat": chat,
    "completion, streamed": completion_streamed,
    "completion": completion,
    "chat, streamed": chat_streamed,
}
