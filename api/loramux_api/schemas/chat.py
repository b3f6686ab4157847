"""POST /v1/chat/completions, as OpenAI's clients expect it: the request, and the structs of its answers.

`to_request` reads a body; `controllers.chat` writes the answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from loramux.common.units import TokenCounts
from loramux.serving.checks import canonical_tags
from loramux.serving.errors import InvalidRequest
from loramux.serving.messages import ChatEnding, ChatOptions, Conversation, FinishReason, GenerationRequest
from loramux_api.bodies import Unsupported
from loramux_api.schemas.bounds import MAX_PARTS, Fields, Name, Text
from loramux_api.schemas.conversation import (
    MAX_MESSAGES,
    THOUGHTS,
    Content,
    ConversationBuilder,
    Part,
    Parts,
    SentCall,
    ToolCall,
    ToolCallDelta,
    caller_variables,
    json_size,
    read_content,
    read_text,
    read_thought,
    required,
)
from loramux_api.schemas.sampling import (
    MAX_TOP_LOGPROBS,
    Positive,
    SamplingBody,
    TopLogprobs,
    asked_format,
    left_out,
    sampling_params,
)
from loramux_api.schemas.tools import (
    MAX_TOOLS,
    NO_TOOLS,
    Toolbox,
    ToolChoice,
    ToolDefinition,
    chat_choice,
    chat_tools,
    left_out_tools,
)

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Accepted roles, with their names in chat templates."""
_NO_TOOLS = "send 'tools' and 'tool_choice'."
_TEXT_ONLY = "this server reads and writes text."


class ChatMessage(msgspec.Struct):
    """One turn. Fields that would change the meaning of an assistant's turn must be null or empty.

    Other fields are ignored, as by OpenAI's server, because clients add fields to answers before they send them back.
    """

    role: Name
    content: Text | Parts | None = None
    name: Text | None = None
    """Accepted and without effect, because chat templates have no names."""
    refusal: Text | None = None
    annotations: Annotated[list[Any], Meta(max_length=MAX_PARTS)] | None = None
    audio: Any = None
    function_call: Any = None
    tool_calls: Annotated[list[SentCall], Meta(max_length=MAX_MESSAGES)] | None = None
    """The calls that an assistant has made."""
    tool_call_id: Text | None = None
    """The call that a tool's message answers."""
    reasoning_content: Any = None
    """Thought of an assistant. Templates that repeat thoughts use it."""
    reasoning: Any = None
    """Another name of `reasoning_content`."""
    thinking: Any = None
    """Another name of `reasoning_content`."""
    thinking_blocks: Any = None
    """The thought as a list of Anthropic's blocks."""
    prefix: bool | None = None
    """True: the answer continues this message, if it is the last one. Clients of DeepSeek and Mistral send it."""
    partial: bool | None = None
    """Another name of `prefix`. Clients of Kimi and Qwen send it."""


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatReasoning(msgspec.Struct):
    """The thought before the answer. Other fields are ignored."""

    effort: Effort | None = None
    enabled: bool | None = None
    """False is the effort `none`."""
    exclude: bool | None = None
    """True leaves the thought out of the answer."""
    max_tokens: int | None = None
    """Accepted and without effect: a thought counts in the answer's tokens."""


class ChatThinking(msgspec.Struct):
    """The thought before the answer. Other fields are ignored."""

    type: Name | None = None
    """`disabled` switches the thought off. With `enabled` and any other value, the model's chat template decides."""
    budget_tokens: int | None = None
    """Accepted and without effect: a thought counts in the answer's tokens."""


class ChatBody(SamplingBody, kw_only=True):
    """OpenAI's fields, and vLLM's names for fields that OpenAI does not have."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Positive | None = None
    """Maximum number of tokens of the answer. This field overrides `max_tokens`, which has the same meaning."""
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Annotated[list[ToolDefinition], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    """`auto` (the default), `none`, `required`, one tool, or the tools that may be called (`allowed_tools`). `any` is
    Mistral's name for `required`.
    """
    parallel_tool_calls: bool | None = None
    """False: at most one call per answer."""
    reasoning_effort: Effort | None = None
    """Amount of thinking, if the chat template has a variable for it; `none` switches thinking off."""
    reasoning: ChatReasoning | None = None
    """The same setting as an object, as OpenRouter's clients send it."""
    thinking: ChatThinking | None = None
    """The same setting as a switch, as clients of DeepSeek, GLM and Kimi send it."""
    include_reasoning: bool | None = None
    """False leaves the thought out of the answer; its tokens are billed anyway."""
    enable_thinking: bool | None = None
    """The chat template's variable of this name."""
    chat_template_kwargs: Fields | None = None
    """Variables for the chat template."""
    add_generation_prompt: bool | None = None
    """False: the prompt ends with the last message, and the model decides which role speaks next."""
    continue_final_message: bool | None = None
    """True: the answer continues the last message; needs `add_generation_prompt` absent or false."""
    echo: bool | None = None
    """True: the answer repeats the last message, if it is the assistant's."""

    ignored: ClassVar[frozenset[str]] = SamplingBody.ignored | frozenset(
        {
            "prediction",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "safety_identifier",
            "verbosity",
        }
    )
    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        **SamplingBody.unsupported,
        "audio": Unsupported(_TEXT_ONLY),
        "chat_template": Unsupported("push it with the adapter: a revision brings its own template."),
        "documents": Unsupported("write them into a message.", (None, [])),
        "function_call": Unsupported(_NO_TOOLS, (None, "none")),
        "functions": Unsupported(_NO_TOOLS, (None, [])),
        "media_io_kwargs": Unsupported(_TEXT_ONLY, (None, {})),
        "modalities": Unsupported(_TEXT_ONLY, (None, ["text"])),
        "moderation": Unsupported("answers are not moderated."),
        "store": Unsupported("answers are not stored.", (None, False)),
        "web_search_options": Unsupported("this server does not search the web."),
    }

    def without_effect(self) -> Iterator[str]:
        """Yield the tools that are left out."""
        if self.tools:
            types = ((f"tools[{i}]", tool.type) for i, tool in enumerate(self.tools))
            yield from left_out_tools(types, (tool.where for tool in chat_tools(self.tools)))

    @property
    def shows_thought(self) -> bool:
        """Return whether the answer includes its thought."""
        return self.include_reasoning is not False and not (self.reasoning and self.reasoning.exclude)


def toolbox(body: ChatBody) -> Toolbox:
    """Return the tools that can be offered. Raises InvalidRequest."""
    return Toolbox(list(chat_tools(body.tools))) if body.tools else NO_TOOLS


def asked_effort(body: ChatBody) -> str | None:
    """Return how much the model should think; None: its template decides."""
    if body.reasoning_effort is not None:
        return body.reasoning_effort
    if body.reasoning is not None and (body.reasoning.effort is not None or body.reasoning.enabled is not None):
        switched = "none" if body.reasoning.enabled is False else "medium"
        return body.reasoning.effort or switched
    match body.thinking:
        case ChatThinking(type="disabled"):
            return "none"
        case ChatThinking(type="enabled"):
            return "medium"
    return None


def to_request(body: ChatBody) -> GenerationRequest:
    """Return the request of the serving layer. Raises InvalidRequest."""
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest(
            f"'top_logprobs' (0 to {MAX_TOP_LOGPROBS}) needs 'logprobs' to be true.", field="top_logprobs"
        )
    return GenerationRequest(
        kind="chatcmpl-",
        model=body.model,
        is_streamed=bool(body.stream),
        prompts=(_conversation(body.messages),),
        sampling=sampling_params(body, (body.top_logprobs or 0) if body.logprobs else None),
        left_out=left_out(body),
        max_tokens=body.max_completion_tokens or body.max_tokens,
        n=body.n or 1,
        stop=body.stops,
        chat=_options(body),
        truncation=body.truncation,
        format=asked_format(body),
        user=body.user or None,
        tags=canonical_tags(body.metadata),
        service_tier=body.chosen_tier,
    )


def echoed_text(body: ChatBody) -> str:
    """Return the text at the beginning of the answer: the text of the last message if `echo` is set."""
    last = body.messages[-1]
    return (
        _content(last, f"messages[{len(body.messages) - 1}].content").text
        if body.echo and last.role == "assistant"
        else ""
    )


def _options(body: ChatBody) -> ChatOptions:
    """Return the options of the chat template and the answer, in addition to the messages. Raises InvalidRequest."""
    template = caller_variables(body.chat_template_kwargs)
    if body.enable_thinking is not None:
        template["enable_thinking"] = body.enable_thinking
    use = None
    if body.tools or body.tool_choice is not None:
        tools = toolbox(body)
        use = tools.use(chat_choice(body.tool_choice), parallel=body.parallel_tool_calls is not False)
        if use is not None:
            template["tools"] = tools.template
    return ChatOptions(
        template=template,
        size=json_size(template),
        tools=use,
        effort=asked_effort(body),
        ending=_ending(body),
        add_special_tokens=bool(body.add_special_tokens),
    )


def _ending(body: ChatBody) -> ChatEnding:
    """Return the end of the prompt. Raises InvalidRequest."""
    last = body.messages[-1]
    if last.role == "assistant" and (last.prefix or last.partial) and last.content:
        return "open_message"
    if not body.continue_final_message:
        return "message" if body.add_generation_prompt is False else "generation_prompt"
    if body.add_generation_prompt:
        raise InvalidRequest(
            "Cannot set both 'continue_final_message' and 'add_generation_prompt' to true; leave one out.",
            field="continue_final_message",
        )
    return "open_message"


def _conversation(messages: list[ChatMessage]) -> Conversation:
    turns = ConversationBuilder()
    for i, message in enumerate(messages):
        _add(turns, message, f"messages[{i}]")
    return turns.conversation()


def _add(turns: ConversationBuilder, message: ChatMessage, where: str) -> None:
    """Add a message to the conversation. Raises InvalidRequest."""
    if message.role not in ROLES:
        raise InvalidRequest(
            f"Invalid value for '{where}.role': '{message.role[:40]}'. This server reads the roles {', '.join(ROLES)}.",
            field=f"{where}.role",
            code="invalid_value",
        )
    for name in ("function_call", "audio"):
        if getattr(message, name):
            raise InvalidRequest(
                f"'{where}.{name}' is not supported: {_TEXT_ONLY if name == 'audio' else _NO_TOOLS}",
                field=f"{where}.{name}",
                code="unsupported_parameter",
            )
    if message.role == "assistant":
        _add_answer(turns, message, where)
        return
    if message.tool_calls:
        raise InvalidRequest(f"'{where}.tool_calls' belongs to an assistant's message.", field=f"{where}.tool_calls")
    content = _content(message, f"{where}.content")
    if message.role == "tool":
        # Trainers name the function, as chat templates do, and some servers give all calls an empty id.
        if message.tool_call_id is None and not message.name:
            field = f"{where}.tool_call_id"
            message_ = f"Missing required parameter: '{field}'; it is the id of the call that this message answers."
            raise InvalidRequest(message_, field=field, code="missing_required_parameter")
        turns.add_result(message.tool_call_id or "", *content, message.name)
    else:
        turns.add_turn(ROLES[message.role], *content)


def _add_answer(turns: ConversationBuilder, message: ChatMessage, where: str) -> None:
    """Add an assistant's message, which may be cut off anywhere. Raises InvalidRequest."""
    turns.begin_answer()
    of_parts = "".join(read_thought(part.thinking, part.text) for part in _thoughts(message))
    fields = (message.reasoning_content, message.reasoning, message.thinking, message.thinking_blocks)
    if thought := read_thought(*fields, of_parts):
        turns.add_thought(thought)
    turns.add_text(_content(message, f"{where}.content").text)
    for i, call in enumerate(message.tool_calls or ()):
        at = f"{where}.tool_calls[{i}]"
        if call.custom is not None:
            name = required(call.custom, "name", f"{at}.custom")
            turns.add_call(call.id or "", name, {"input": call.custom.input or ""})
            continue
        function = required(call, "function", at)
        turns.add_call(call.id or "", required(function, "name", f"{at}.function"), function.arguments)


def _thoughts(message: ChatMessage) -> list[Part]:
    content = message.content if isinstance(message.content, list) else []
    return [part for part in content if message.role == "assistant" and part.type in THOUGHTS]


def _content(message: ChatMessage, where: str) -> Content:
    """Return a message's text, and its images if the user or a tool sends it. Raises InvalidRequest."""
    if message.content is None and message.role not in ("assistant", "tool"):
        raise InvalidRequest(f"'{where}' is missing; send a text, even if it is empty.", field=where)
    if not isinstance(message.content, list):
        return Content(message.content or message.refusal or "")
    if message.role in ("user", "tool"):
        return read_content(message.content, where)
    thoughts = _thoughts(message)
    return Content(read_text([part for part in message.content if part not in thoughts], where))


ChatFinishReason = FinishReason | Literal["tool_calls"]
"""Reason of an answer's end. `tool_calls`: the answer ends with calls that the model chose to make."""


class PromptTokensDetails(msgspec.Struct):
    """Part of the prompt's tokens."""

    cached_tokens: int
    """Number of tokens whose KV was reused."""
    image_tokens: int | UnsetType = UNSET
    """Number of tokens of images, without those among `cached_tokens`; absent if there is none."""


class CompletionTokensDetails(msgspec.Struct):
    """Part of the answer's tokens."""

    reasoning_tokens: int
    """Number of tokens of the thought before the answer's text."""


class PromptLogprobEntry(msgspec.Struct):
    """A token at a position of the prompt, with vLLM's field names."""

    logprob: float | None
    rank: int
    decoded_token: str


PromptLogprobList = list[dict[str, PromptLogprobEntry] | None]
"""For each token of the prompt, the token itself and the most likely tokens, by id; null for the first token."""


class UsageObject(msgspec.Struct):
    """Tokens that are charged."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class TopLogprob(msgspec.Struct):
    """A token that was likely at this position."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct):
    """A generated token."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Logprobs of an answer, one entry per token."""

    content: list[ChatLogprob]
    refusal: None = None


class AssistantMessage(msgspec.Struct, kw_only=True):
    """The whole answer."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    """The thought before the text, if the model thinks."""
    reasoning: str | UnsetType = UNSET
    """The same text under vLLM's name."""
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """One of the n answers of a request."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    """A whole answer."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    """The resolved model: `tenant/adapter@3`, or the base model's name."""
    choices: list[ChatChoice]
    usage: UsageObject
    system_fingerprint: str
    service_tier: str
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobList | None = None


class ChatDelta(msgspec.Struct, kw_only=True):
    """New part of a choice in a chunk."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    refusal: UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    """The same text under vLLM's name."""
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """A choice's part of a chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    service_tier: str
    choices: list[ChatChunkChoice]
    usage: UsageObject | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


def usage_object(usage: TokenCounts) -> UsageObject:
    """Write the charged tokens in OpenAI's form."""
    return UsageObject(
        prompt_tokens=usage.prompt,
        completion_tokens=usage.output,
        total_tokens=usage.total,
        prompt_tokens_details=PromptTokensDetails(usage.cached, usage.image or UNSET),
    )
