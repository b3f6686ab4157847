"""POST /v1/responses: the request. Nothing is kept between requests, so each has its whole conversation in `input`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from loramux.constraints.tools import ToolUse
from loramux.serving.checks import canonical_tags
from loramux.serving.errors import InvalidRequest
from loramux.serving.messages import AskedFormat, ChatOptions, Conversation, GenerationRequest
from loramux_api.bodies import Body, Unsupported
from loramux_api.schemas.conversation import (
    MAX_MESSAGES,
    MAX_TOOLS,
    ConversationBuilder,
    FunctionChoice,
    FunctionDefinition,
    FunctionName,
    NamedToolChoice,
    Part,
    ToolDefinition,
    caller_variables,
    json_size,
    read_text,
    renamed_fields,
    required,
    tool_use,
)
from loramux_api.schemas.sampling import (
    MAX_USER_LENGTH,
    Int64,
    JsonSchemaFormat,
    Penalty,
    Positive,
    RepetitionPenalty,
    ResponseFormat,
    SamplingBody,
    StopString,
    TopLogprobs,
    asked_format,
    left_out,
    sampling_params,
)

FIELDS = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "response_format.type": "text.format.type",
    "response_format.json_schema": "text.format.schema",
    "logprobs": "top_logprobs",
}
"""The names of a chat's fields here."""
LOGPROBS = "message.output_text.logprobs"
_STATELESS = "nothing is kept between requests; send the whole conversation as 'input'."


class InputItem(msgspec.Struct):
    """A turn, a thought, a call or its result. Items of an answer can be sent back as they are: other fields of theirs
    are ignored.
    """

    type: str = "message"
    """`message`, `reasoning`, `function_call`, `custom_tool_call`, or an output of one of these."""
    role: str | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: Any = None
    """A call's arguments: JSON, written as a text."""
    input: str | None = None
    """The input of a custom tool's call."""
    output: str | list[Part] | None = None
    """A call's result."""


class ResponseTool(msgspec.Struct):
    """A function that the answer may call."""

    type: str
    name: FunctionName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """The JSON schema of its arguments; absent: it takes none."""
    strict: bool | None = None
    """True refuses a schema with a keyword that cannot be enforced; otherwise such a keyword is left out."""


class ChosenTool(msgspec.Struct):
    """One of the tools."""

    type: str
    name: str


class ResponseToolChoice(msgspec.Struct):
    """One function that must be called, or the tools that may be."""

    type: str
    """`function` or `allowed_tools`."""
    name: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[ChosenTool], Meta(max_length=MAX_TOOLS)] | None = None


class TextFormat(msgspec.Struct):
    """The format of the answer's text."""

    type: str
    """`text`, `json_object` or `json_schema`."""
    name: Annotated[str, Meta(max_length=512)] | None = None
    """Accepted and without effect."""
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    """True refuses a schema with a keyword that cannot be enforced; otherwise such a keyword is left out."""
    description: str | None = None
    """Accepted and without effect."""


class TextConfig(Body, kw_only=True):
    """The answer's text."""

    format: TextFormat | None = None

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        "verbosity": Unsupported("the model decides how much it writes.", (None, "medium")),
    }


class ReasoningConfig(Body, kw_only=True):
    """The thought before the answer. It is given whole, as the content of a `reasoning` item, and never summarized."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    """How much the model thinks, where its chat template knows a variable for it; `none` switches thinking off."""

    ignored: ClassVar[frozenset[str]] = frozenset({"summary", "generate_summary", "context"})
    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        "mode": Unsupported("models have one mode of thinking.", (None, "standard")),
    }


class ResponseStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Options of a stream; allowed only with `stream`."""

    include_obfuscation: bool | None = None
    """Accepted and without effect: events are never padded."""


class ResponseBody(Body, kw_only=True):
    """OpenAI's fields, and vLLM's names of sampling parameters that OpenAI does not have. Null is as good as absent."""

    model: str
    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_MESSAGES)]
    """A text, or the items of a conversation."""
    instructions: str | None = None
    """A system turn before the input."""
    max_output_tokens: Positive | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Int64 | None = None
    repetition_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=16)] | None = None
    tools: Annotated[list[ResponseTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    """`auto` (the default), `none`, `required`, one function, or the tools that are allowed."""
    parallel_tool_calls: bool | None = None
    """False: at most one call an answer."""
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: list[str] | None = None
    """`message.output_text.logprobs` adds log probabilities; the others are of features that this server lacks."""
    top_logprobs: TopLogprobs | None = None
    """Alternatives to each token; with `include` of `message.output_text.logprobs`."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template."""
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    metadata: dict[str, str] | None = None
    """Up to 16 tags by which the bill can be divided."""
    user: Annotated[str, Meta(max_length=MAX_USER_LENGTH)] | None = None
    """The caller's name for its end user. One user always gets the same revision of an alias that has several."""
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    """How urgent the request is, and at which price; auto is the same as default. 403 where your plan lacks it."""

    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            "max_tool_calls",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "safety_identifier",
        }
    )
    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        "background": Unsupported("send the request to /v1/batches, or wait for its answer.", (None, False)),
        "context_management": Unsupported("prompts are never cut; send a shorter 'input'.", (None, [])),
        "conversation": Unsupported(_STATELESS),
        "moderation": Unsupported("answers are not moderated."),
        "previous_response_id": Unsupported(_STATELESS),
        "prompt": Unsupported("prompts are not stored here; send 'instructions' and 'input'."),
        "store": Unsupported(
            "answers are not stored and cannot be retrieved; leave 'store' out, or send false.", (None, False)
        ),
        "truncation": Unsupported("prompts are never cut; send a shorter 'input'.", (None, "disabled")),
    }
    nested: ClassVar[Mapping[str, type[Body]]] = {"text": TextConfig, "reasoning": ReasoningConfig}


def to_request(body: ResponseBody) -> GenerationRequest:
    """Return the request as the gateway takes it. Raises InvalidRequest."""
    with renamed_fields(FIELDS):
        if body.stream_options is not None and not body.stream:
            raise InvalidRequest("'stream_options' is only allowed when 'stream' is true.", field="stream_options")
        shared = _shared(body)
        with_logprobs = LOGPROBS in (body.include or [])
        format = asked_format(shared)
        return GenerationRequest(
            kind="resp_",
            model=body.model,
            is_streamed=bool(body.stream),
            prompts=(_conversation(body),),
            sampling=sampling_params(shared, (body.top_logprobs or 0) if with_logprobs else None),
            left_out=left_out(shared),
            max_tokens=body.max_output_tokens,
            stop=shared.stops,
            chat=_options(body),
            format=AskedFormat(format.format, "text.format") if format else None,
            user=body.user or None,
            tags=canonical_tags(body.metadata),
            service_tier=shared.chosen_tier,
        )


def _shared(body: ResponseBody) -> SamplingBody:
    """Return the fields that all endpoints share, under their common names."""
    return SamplingBody(
        model=body.model,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        seed=body.seed,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        stop=body.stop,
        response_format=_response_format(body.text.format if body.text else None),
        service_tier=body.service_tier,
    )


def _response_format(asked: TextFormat | None) -> ResponseFormat | None:
    if asked is None:
        return None
    schema = None
    if asked.schema is not None:
        schema = JsonSchemaFormat(name=asked.name or "", schema=asked.schema, strict=asked.strict)
    return ResponseFormat(type=asked.type, json_schema=schema)


def _options(body: ResponseBody) -> ChatOptions:
    """Return what the chat template and the answer are told besides the items. Raises InvalidRequest."""
    template = caller_variables(body.chat_template_kwargs)
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or [])]
    use = _tool_use(tools, body)
    if use is not None:
        template["tools"] = msgspec.to_builtins(tools)
    effort = body.reasoning.effort if body.reasoning else None
    return ChatOptions(template=template, size=json_size(template), tools=use, effort=effort)


def _tool_use(tools: list[ToolDefinition], body: ResponseBody) -> ToolUse | None:
    parallel, choice = body.parallel_tool_calls is not False, body.tool_choice
    if not isinstance(choice, ResponseToolChoice):
        return tool_use(tools, choice, parallel=parallel)
    match choice:
        case ResponseToolChoice(type="function", name=str(name)):
            named = NamedToolChoice(type="function", function=FunctionChoice(name=name))
            return tool_use(tools, named, parallel=parallel)
        case ResponseToolChoice(type="allowed_tools", tools=list(allowed)):
            names = {tool.name for tool in allowed if tool.type == "function"}
            if unknown := sorted(names - {tool.function.name for tool in tools}):
                message = f"'tool_choice' names '{unknown[0]}', and 'tools' has no function of that name."
                raise InvalidRequest(message, field="tool_choice", code="invalid_value")
            chosen = [tool for tool in tools if tool.function.name in names]
            return tool_use(chosen, choice.mode, parallel=parallel)
    raise InvalidRequest(
        "'tool_choice' is none, auto, required, a function {type: function, name}, or {type: allowed_tools, tools}.",
        field="tool_choice",
        code="invalid_value",
    )


def _tool(tool: ResponseTool, where: str) -> ToolDefinition:
    if tool.type != "function":
        raise InvalidRequest(
            f"'{where}' is of the type '{tool.type[:40]}', and this server has no tools of its own: send functions.",
            field=where,
            code="unsupported_parameter",
        )
    function = FunctionDefinition(
        name=required(tool, "name", where),
        description=tool.description,
        parameters=tool.parameters,
        strict=tool.strict,
    )
    return ToolDefinition(type="function", function=function)


def _conversation(body: ResponseBody) -> Conversation:
    turns = ConversationBuilder()
    if body.instructions:
        turns.add_instructions(body.instructions)
    if isinstance(body.input, str):
        turns.add_turn("user", body.input)
    else:
        for i, item in enumerate(body.input):
            _add(turns, item, f"input[{i}]")
    return turns.conversation()


def _add(turns: ConversationBuilder, item: InputItem, where: str) -> None:
    """Add an item to the conversation. Raises InvalidRequest."""
    match item.type:
        case "message":
            _add_message(turns, item, where)
        case "reasoning":
            if item.content:  # one that another server has encrypted, or only summarized, says nothing here
                turns.add_thought(read_text(item.content, f"{where}.content"))
        case "function_call":
            turns.add_call(required(item, "call_id", where), required(item, "name", where), item.arguments)
        case "custom_tool_call":
            given = {"input": item.input or ""}
            turns.add_call(required(item, "call_id", where), required(item, "name", where), given)
        case "function_call_output" | "custom_tool_call_output":
            turns.add_result(required(item, "call_id", where), read_text(item.output, f"{where}.output"))
        case "item_reference":
            raise InvalidRequest(
                f"'{where}' refers to an item of an earlier answer, and answers are not stored: send the item itself "
                "(clients do so with store=false).",
                field=where,
                code="unsupported_parameter",
            )
        case other:
            raise InvalidRequest(
                f"Invalid value for '{where}.type': '{other[:40]}'. This server reads message, reasoning, "
                "function_call, custom_tool_call, and their outputs.",
                field=f"{where}.type",
                code="invalid_value",
            )


def _add_message(turns: ConversationBuilder, item: InputItem, where: str) -> None:
    role = required(item, "role", where)
    content = item.content if role == "assistant" else required(item, "content", where)
    text = read_text(content, f"{where}.content")
    match role:
        case "system" | "developer":
            turns.add_instructions(text)
        case "user":
            turns.add_turn("user", text)
        case "assistant":
            turns.add_text(text, begins_turn=True)
        case role:
            raise InvalidRequest(
                f"Invalid value for '{where}.role': '{role[:40]}'. This server reads system, developer, user and "
                "assistant; the result of a call is an item of the type function_call_output.",
                field=f"{where}.role",
                code="invalid_value",
            )
