"""POST /v1/chat/completions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import msgspec
from litestar import Response, post
from litestar.di import NamedDependency
from litestar.params import JSONBody
from msgspec import UNSET, UnsetType

from loramux.common.units import TokenCounts
from loramux.serving.calls import CallDelta, join_calls
from loramux.serving.messages import Answer, Delta, FinishReason, TokenLogprob
from loramux_api.answering import (
    CollectedChoice,
    Inference,
    JsonLists,
    PromptLogprobLists,
    Writer,
    asked_logprobs,
    spelled,
    usage_of_chunk,
)
from loramux_api.auth import requires
from loramux_api.bodies import InferenceRequest
from loramux_api.custom_calls import InputReader, input_of
from loramux_api.openapi import ApiController, ResponseSpec, StreamingOperation
from loramux_api.schemas.chat import (
    AssistantMessage,
    ChatBody,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatFinishReason,
    ChatLogprob,
    ChatLogprobs,
    CompletionTokensDetails,
    PromptLogprobList,
    TopLogprob,
    UsageObject,
    echoed_text,
    to_request,
    toolbox,
    usage_object,
)
from loramux_api.schemas.conversation import (
    CalledCustom,
    CalledFunction,
    CalledFunctionDelta,
    ToolCall,
    ToolCallDelta,
)
from loramux_api.schemas.tools import chat_choice


class ChatController(ApiController):
    """Conversations."""

    path = "/v1/chat/completions"
    tags = ("Inference",)
    guards = (requires("inference"),)
    request_class = InferenceRequest

    @post(
        operation_class=StreamingOperation,
        status_code=200,
        summary="Continue a conversation",
        responses={
            200: ResponseSpec(ChatCompletion, description="With stream: server-sent chat.completion.chunk events.")
        },
    )
    async def create(self, data: JSONBody[ChatBody], inference: NamedDependency[Inference]) -> Response[Any]:
        """Answer a conversation with one of your adapters, or with the base model."""
        fingerprint_of = inference.completions.fingerprint_of
        return await inference.answer(
            to_request(data), lambda answer: ChatWriter(data, answer, fingerprint_of(answer)), stream=bool(data.stream)
        )


class ChatWriter(Writer):
    """Writes one answer in OpenAI's shape."""

    def __init__(self, body: ChatBody, answer: Answer, fingerprint: str) -> None:
        self._body = msgspec.structs.replace(body, messages=[])  # images are large, and a stream is long
        self._answer = answer
        self._fingerprint = fingerprint
        self._echo = echoed_text(body)
        self._thought_tokens = 0
        self._num_tokens = 0
        """Number of tokens of the answer so far."""
        self._calling: set[int] = set()
        """Choices that contain a call."""
        self._tools = toolbox(body)
        self._inputs: dict[tuple[int, int], InputReader] = {}
        """Readers of the calls of custom tools, by choice and call."""
        self._collected: defaultdict[int, CollectedChoice] = defaultdict(CollectedChoice)
        self._logprobs: defaultdict[int, JsonLists] = defaultdict(lambda: JsonLists("content"))
        """Log probabilities of the collected choices."""
        self._of_prompts = PromptLogprobLists()

    def opening(self) -> Iterable[ChatChunk]:
        """Return a chunk with the role for every choice."""
        for index in range(self._body.n or 1):
            delta = ChatDelta(role="assistant", content=self._echo, refusal=None)
            chunk = self._chunk(ChatChunkChoice(index=index, delta=delta))
            chunk.prompt_token_ids = self._prompt_token_ids
            yield chunk

    def chunk(self, delta: Delta) -> Iterable[ChatChunk]:
        """Return the event for a delta; none if the delta contains nothing that the client requested."""
        delta = self._noted(delta)
        logprobs, token_ids = asked_logprobs(delta, self._body), self._token_ids(delta)
        news = delta.text or delta.thought or delta.calls
        if not (news or delta.finish_reason or logprobs or token_ids):
            return
        yield self._chunk(
            ChatChunkChoice(
                index=delta.index,
                delta=self._chat_delta(delta) if news or not delta.finish_reason else ChatDelta(),
                logprobs=ChatLogprobs([self._logprob(one) for one in logprobs]) if logprobs else None,
                finish_reason=self._finish_reason(delta.index, delta.finish_reason),
                token_ids=token_ids,
            )
        )

    def closing(self, usage: TokenCounts) -> Iterable[ChatChunk]:
        """Return the usage if the request has `include_usage`."""
        if self._body.include_usage:
            chunk = self._chunk()
            chunk.usage = self._usage(usage)
            yield chunk

    def collect(self, delta: Delta) -> None:
        """Collect a delta of an answer that is sent in one piece."""
        delta = self._noted(delta)
        self._collected[delta.index].add(delta)
        self._of_prompts.add(delta)
        if self._body.logprobs:
            self._logprobs[delta.index].extend(content=[*map(self._logprob, asked_logprobs(delta, self._body))])

    def whole(self, usage: TokenCounts) -> ChatCompletion:
        """Return the collected answer in one piece."""
        return ChatCompletion(
            id=self._answer.id,
            created=self._answer.created,
            model=self._answer.model,
            choices=[self._choice(index, self._collected[index]) for index in sorted(self._collected)],
            usage=self._usage(usage),
            system_fingerprint=self._fingerprint,
            service_tier=self._answer.service_tier,
            prompt_token_ids=self._prompt_token_ids,
            prompt_logprobs=self._prompt_logprobs,
        )

    @property
    def _prompt_logprobs(self) -> PromptLogprobList | None:
        if self._body.prompt_logprobs is None:
            return None
        return self._of_prompts.written(0)

    @property
    def _prompt_token_ids(self) -> list[int] | UnsetType:
        return self._answer.prompt_token_ids[0] if self._body.return_token_ids else UNSET

    def _noted(self, delta: Delta) -> Delta:
        """Count the tokens and the thought's tokens, and note which choices call tools. Return the visible part of the
        delta.
        """
        self._thought_tokens += delta.thought_tokens
        self._num_tokens += len(delta.token_ids)
        if delta.calls:
            self._calling.add(delta.index)
        return delta if self._body.shows_thought or not delta.thought else msgspec.structs.replace(delta, thought="")

    def _usage(self, usage: TokenCounts) -> UsageObject:
        written = usage_object(usage)
        written.completion_tokens_details = CompletionTokensDetails(self._thought_tokens)
        return written

    def _finish_reason(self, index: int, reason: FinishReason | None) -> ChatFinishReason | None:
        """Return `tool_calls` for an answer that chose to call. If the request names the tool, the reason stays
        `stop`.
        """
        chose = index in self._calling and not chat_choice(self._body.tool_choice).one
        return "tool_calls" if reason == "stop" and chose else reason

    def _choice(self, index: int, choice: CollectedChoice) -> ChatChoice:
        return ChatChoice(
            index=index,
            message=self._message(choice),
            logprobs=ChatLogprobs(**self._logprobs[index].written()) if self._body.logprobs else None,
            finish_reason=self._finish_reason(index, choice.finish_reason),
            token_ids=choice.token_ids if self._body.return_token_ids else UNSET,
        )

    def _chunk(self, *choices: ChatChunkChoice) -> ChatChunk:
        return ChatChunk(
            id=self._answer.id,
            created=self._answer.created,
            model=self._answer.model,
            system_fingerprint=self._fingerprint,
            service_tier=self._answer.service_tier,
            choices=list(choices),
            usage=usage_of_chunk(self._body, self._answer, self._num_tokens),
        )

    def _token_ids(self, delta: Delta) -> list[int] | UnsetType:
        return list(delta.token_ids) if self._body.return_token_ids else UNSET

    def _logprob(self, one: TokenLogprob) -> ChatLogprob:
        return ChatLogprob(
            token=spelled(one.token, self._body),
            logprob=one.logprob,
            bytes=list(one.token.bytes),
            top_logprobs=[
                TopLogprob(token=spelled(token, self._body), logprob=logprob, bytes=list(token.bytes))
                for token, logprob in one.top
            ],
        )

    def _chat_delta(self, delta: Delta) -> ChatDelta:
        made = ChatDelta()
        if delta.text or not (delta.thought or delta.calls):
            made.content = delta.text
        if delta.thought:
            made.reasoning_content = made.reasoning = delta.thought
        if delta.calls:  # clients read one entry of a call per chunk
            made.tool_calls = [self._call_delta(delta.index, call) for call in join_calls(delta.calls)]
        return made

    def _call_delta(self, choice: int, call: CallDelta) -> ToolCallDelta:
        made = ToolCallDelta(index=call.index)
        if call.id is not None and call.name is not None:
            made.id, made.type = call.id, "function"
            if self._is_custom(call.name):
                made.type, self._inputs[choice, call.index] = "custom", InputReader()
        if (reader := self._inputs.get((choice, call.index))) is not None:
            made.custom = CalledCustom(name=call.name or UNSET, input=reader.push(call.arguments))
        else:
            made.function = CalledFunctionDelta(name=call.name or UNSET, arguments=call.arguments)
        return made

    def _message(self, choice: CollectedChoice) -> AssistantMessage:
        text, thought = self._echo + "".join(choice.texts), "".join(choice.thoughts)
        calls = [self._call(call) for call in join_calls(choice.calls)]
        return AssistantMessage(
            content=(text.rstrip() or None) if calls else text,
            reasoning_content=thought or UNSET,
            reasoning=thought or UNSET,
            tool_calls=calls or UNSET,
        )

    def _call(self, call: CallDelta) -> ToolCall:
        id, name = call.id or "", call.name or ""
        if self._is_custom(name):
            return ToolCall(id=id, type="custom", custom=CalledCustom(name=name, input=input_of(call.arguments)))
        return ToolCall(id=id, function=CalledFunction(name=name, arguments=call.arguments))

    def _is_custom(self, name: str) -> bool:
        tool = self._tools.find(name)
        return tool is not None and tool.kind == "custom"
