"""POST /v1/responses: the request. References to stored items are resolved before this module gets the request
(`stored_responses`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from loramux.common.sampling import given_numbers
from loramux.serving.checks import canonical_tags
from loramux.serving.errors import InvalidRequest
from loramux.serving.messages import AskedFormat, ChatOptions, Conversation, GenerationRequest
from loramux_api.bodies import Body, InferenceBody, Unsupported
from loramux_api.schemas.bounds import MAX_PARTS, Fields, ModelName, Name, Tags, Text
from loramux_api.schemas.chat import Effort
from loramux_api.schemas.conversation import (
    MAX_MESSAGES,
    ConversationBuilder,
    Parts,
    caller_variables,
    json_size,
    read_content,
    read_text,
    renamed_fields,
    required,
)
from loramux_api.schemas.sampling import (
    MAX_USER_LENGTH,
    Int64,
    JsonSchemaFormat,
    LogitBias,
    Positive,
    ResponseFormat,
    SamplingBody,
    StopString,
    StructuredOutputs,
    TopLogprobs,
    asked_format,
    left_out,
    sampling_params,
    taking_numbers,
)
from loramux_api.schemas.tools import (
    ALL,
    INPUT,
    MAX_TOOLS,
    SEARCH,
    Asked,
    CustomDefinition,
    CustomFormat,
    FunctionDefinition,
    OfferedTool,
    Toolbox,
    checked_name,
    ensure_hosted,
    flat_name,
    left_out_tools,
    offered_custom,
    offered_function,
    offered_search,
    one_tool,
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
"""Names in this API for a chat's fields."""
_OF_VLLM = (
    "cache_salt",
    "ec_transfer_params",
    "include_stop_str_in_output",
    "kv_transfer_params",
    "mm_processor_kwargs",
    "priority",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "vllm_xargs",
    "watermarking",
)
"""Fields of vLLM that are refused as in chats."""
LOGPROBS = "message.output_text.logprobs"
_WHOLE = "send the whole conversation as 'input'"
_CALLED = ("function", "custom")
_HOSTED = frozenset(
    {"web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call"}
    | {"mcp_call", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response"}
)
"""Types of items about tools that another vendor's servers have run."""


class InputItem(msgspec.Struct, omit_defaults=True):
    """A turn, a thought, a call or its result. Items of an answer can be sent back unchanged; their other fields are
    ignored.
    """

    type: Name = "message"
    """`message`, `reasoning`, `function_call`, `custom_tool_call`, `tool_search_call`, an output of one of these,
    `additional_tools` or `item_reference`.
    """
    id: Text | None = None
    """Id of a stored response's item if this item is a reference; otherwise the id has no effect."""
    role: Name | None = None
    content: Text | Parts | None = None
    call_id: Text | None = None
    name: Text | None = None
    arguments: Any = None
    """A call's arguments: JSON, written as a text."""
    input: Text | None = None
    """The input of a custom tool's call."""
    namespace: Text | None = None
    """The namespace of a called function."""
    output: Text | Parts | None = None
    """A call's result."""
    execution: Name | None = None
    tools: Annotated[list[ResponseTool], Meta(max_length=MAX_TOOLS)] | None = None
    """Tools that a search has found, or that are added; the answer may call them."""


class ResponseTool(msgspec.Struct, omit_defaults=True):
    """A tool that the answer may call."""

    type: Name | None = None
    """`function`, `custom`, `namespace` with some of both, or `tool_search`. Tools of other types are left out. Only
    the tools that another server has listed have no type.
    """
    name: Name | None = None
    description: Text | None = None
    parameters: Fields | None = None
    """The JSON schema of a function's arguments; absent: the function has no arguments."""
    strict: bool | None = None
    """True refuses a schema with a keyword that cannot be enforced; otherwise such a keyword is left out."""
    format: CustomFormat | None = None
    """Format of a custom tool's input."""
    tools: Annotated[list[ResponseTool], Meta(max_length=MAX_TOOLS)] | None = None
    """Tools of a namespace."""
    execution: Literal["server", "client"] | None = None
    """`client`: the caller searches for tools, and sends those that it finds. Any other search is left out."""


class ChosenTool(msgspec.Struct, omit_defaults=True):
    """A choice of one tool."""

    type: Name
    name: Name | None = None


class ResponseToolChoice(msgspec.Struct, omit_defaults=True):
    """One tool that must be called, or the tools that may be called."""

    type: Name
    """`function`, `custom` or `allowed_tools`."""
    name: Name | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[ChosenTool], Meta(max_length=MAX_TOOLS)] | None = None


class TextFormat(msgspec.Struct):
    """The format of the answer's text."""

    type: Name
    """`text`, `json_object` or `json_schema`."""
    name: Annotated[str, Meta(max_length=512)] | None = None
    """Accepted and without effect."""
    schema: Fields | None = None
    strict: bool | None = None
    """True refuses a schema with a keyword that cannot be enforced; otherwise such a keyword is left out."""
    description: Text | None = None
    """Accepted and without effect."""


class TextConfig(Body, kw_only=True):
    """Options of the answer's text."""

    format: TextFormat | None = None

    ignored: ClassVar[frozenset[str]] = frozenset({"verbosity"})


class ReasoningConfig(Body, kw_only=True):
    """The thought before the answer. The answer contains the whole thought as the content of a `reasoning` item, never
    a summary.
    """

    effort: Effort | None = None
    """Amount of thinking, if the chat template has a variable for it; `none` switches thinking off."""

    ignored: ClassVar[frozenset[str]] = frozenset({"summary", "generate_summary", "context", "mode"})


class ResponseStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Options of a stream; allowed only with `stream`."""

    include_obfuscation: bool | None = None
    """Accepted and without effect: events are never padded."""


@taking_numbers()
class ResponseBody(InferenceBody, kw_only=True):
    """OpenAI's fields, and vLLM's names for sampling parameters that OpenAI does not have. Null means the same as
    absent.
    """

    model: ModelName
    input: Text | Annotated[list[InputItem], Meta(max_length=MAX_MESSAGES)]
    """A text, or the items of a conversation; without any, an empty turn of the user's."""
    instructions: Text | None = None
    """A system turn before the input."""
    max_output_tokens: Positive | None = None
    seed: Int64 | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=16)] | None = None
    stop_token_ids: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=128)] | None = None
    ignore_eos: bool | None = None
    logit_bias: LogitBias | None = None
    """Biases by token id, which is written as a text."""
    structured_outputs: StructuredOutputs | None = None
    """Format of the answer's text, in vLLM's form."""
    tools: Annotated[list[ResponseTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    """`auto` (the default), `none`, `required`, one tool, or the tools that are allowed."""
    parallel_tool_calls: bool | None = None
    """False: at most one call per answer."""
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: Annotated[list[Name], Meta(max_length=MAX_PARTS)] | None = None
    """`message.output_text.logprobs` adds log probabilities; the other values belong to features that this server does
    not have.
    """
    top_logprobs: TopLogprobs | None = None
    """Alternatives to each token; with `include` of `message.output_text.logprobs`."""
    chat_template_kwargs: Fields | None = None
    """Variables for the chat template."""
    previous_response_id: Name | None = None
    """A stored response: its conversation is put before `input`, without its `instructions`."""
    store: bool | None = None
    """Store the response, so that later requests can refer to it and read it. If the field is left out, the response is
    stored if the server stores responses and the tenant does not have zero retention.
    """
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    metadata: Tags | None = None
    """Up to 16 tags by which the bill can be divided."""
    user: Annotated[str, Meta(max_length=MAX_USER_LENGTH)] | None = None
    """The caller's name for its end user. If an alias has several revisions, one user always gets the same revision."""
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    """Urgency and price of the request; auto is the same as default. The answer is 403 if your plan does not include
    the tier.
    """

    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            "access_programs",
            "background_options",
            "betas",
            "image",
            "max_tool_calls",
            "mm_payload",
            "personality",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "request_id",
            "return_mm_kwargs",
            "safety_identifier",
            "session_id",
        }
    )
    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        **{name: SamplingBody.unsupported[name] for name in _OF_VLLM},
        "enable_response_messages": Unsupported("ask POST /tokenize for the prompt.", (None, False)),
        "include_reasoning": Unsupported("leave the items of the type 'reasoning' unread.", (None, True)),
        "media_io_kwargs": Unsupported("this server reads and writes text.", (None, {})),
        "previous_input_messages": Unsupported(f"{_WHOLE}.", (None, [])),
        "background": Unsupported("send the request to /v1/batches, or wait for its answer.", (None, False)),
        "context_management": Unsupported("prompts are never cut; send a shorter 'input'.", (None, [])),
        "conversation": Unsupported(f"conversations are not objects here; {_WHOLE}, or 'previous_response_id'."),
        "moderation": Unsupported("answers are not moderated."),
        "multi_agent": Unsupported("this server runs no agents; run them in your client.", (None, {"enabled": False})),
        "prompt": Unsupported("prompts are not stored here; send 'instructions' and 'input'."),
        "truncation": Unsupported("prompts are never cut; send a shorter 'input'.", (None, "auto", "disabled")),
    }
    nested: ClassVar[Mapping[str, type[Body]]] = {"text": TextConfig, "reasoning": ReasoningConfig}

    def without_effect(self) -> Iterator[str]:
        """Yield the tools and items that are left out."""
        tools = self.tools or []
        yield from left_out_tools(_types(tools, "tools"), (tool.where for tool in _offered(tools, "tools")))
        items = enumerate(() if isinstance(self.input, str) else self.input)
        yield from left_out_tools(((f"input[{i}]", item.type) for i, item in items if item.type in _HOSTED), ())


def stateless_request(body: ResponseBody) -> GenerationRequest:
    """Return a request for which nothing is stored, and that refers to nothing. Raises InvalidRequest."""
    for field, value in (("previous_response_id", body.previous_response_id), ("store", body.store)):
        if value:
            raise InvalidRequest(
                f"'{field}' is not supported here: no response is stored, because this server stores none "
                f"(privacy.response_seconds), or because the request is a line of a batch. Leave it out, and {_WHOLE}.",
                field=field,
                code="unsupported_parameter",
            )
    return to_request(body)


def to_request(body: ResponseBody, history: Sequence[InputItem] = ()) -> GenerationRequest:
    """Return the request of the serving layer; `history` comes before its input. Raises InvalidRequest."""
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
            repeats_logprobs=with_logprobs,
            prompts=(_conversation(body, history),),
            sampling=sampling_params(shared, (body.top_logprobs or 0) if with_logprobs else None),
            left_out=left_out(shared),
            max_tokens=body.max_output_tokens,
            stop=shared.stops,
            chat=_options(body, history),
            format=_renamed_format(format),
            user=body.user or None,
            tags=canonical_tags(body.metadata),
            service_tier=shared.chosen_tier,
        )


def _renamed_format(format: AskedFormat | None) -> AskedFormat | None:
    if format is None or format.field != "response_format":
        return format
    return AskedFormat(format.format, "text.format")


def _shared(body: ResponseBody) -> SamplingBody:
    """Return the fields that all endpoints share, under their common names."""
    return SamplingBody(
        model=body.model,
        **given_numbers(body),
        seed=body.seed,
        stop=body.stop,
        stop_token_ids=body.stop_token_ids,
        ignore_eos=body.ignore_eos,
        logit_bias=body.logit_bias,
        structured_outputs=body.structured_outputs,
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


def _options(body: ResponseBody, history: Sequence[InputItem]) -> ChatOptions:
    """Return the body's variables of the chat template, its tools and its effort. Raises InvalidRequest."""
    template = caller_variables(body.chat_template_kwargs)
    tools = toolbox(body, history)
    use = tools.use(_asked(body.tool_choice), parallel=body.parallel_tool_calls is not False)
    if use is not None:
        template["tools"] = tools.template
    effort = body.reasoning.effort if body.reasoning else None
    return ChatOptions(template=template, size=json_size(template), tools=use, effort=effort)


def toolbox(body: ResponseBody, history: Sequence[InputItem] = ()) -> Toolbox:
    """Return the tools that can be offered: those of the request, and those that were found or added in the
    conversation. Raises InvalidRequest.
    """
    offered = list(_offered(body.tools or [], "tools"))
    known = {tool.function.name for tool in offered}
    for where, item in _items(body, history):
        for tool in _offered(item.tools or [], f"{where}.tools"):
            if tool.function.name not in known:
                known.add(tool.function.name)
                offered.append(tool)
    return Toolbox(offered)


def _items(body: ResponseBody, history: Sequence[InputItem]) -> Iterator[tuple[str, InputItem]]:
    """Yield the items of the conversation with their paths, without those about hosted tools."""
    for i, item in enumerate(history):
        yield f"previous_response_id[{i}]", item
    for i, item in enumerate(() if isinstance(body.input, str) else body.input):
        if item.type not in _HOSTED:
            yield f"input[{i}]", item


def _asked(choice: Literal["none", "auto", "required"] | ResponseToolChoice | None) -> Asked:
    match choice:
        case None:
            return ALL
        case "none" | "auto" | "required":
            return Asked(choice)
        case ResponseToolChoice(type="function" | "custom", name=str(name)):
            return one_tool(name)
        case ResponseToolChoice(type="allowed_tools", tools=list(allowed)):
            return Asked(choice.mode, frozenset(tool.name for tool in allowed if tool.type in _CALLED and tool.name))
    raise InvalidRequest(
        "'tool_choice' is none, auto, required, a tool {type: function or custom, name}, or {type: allowed_tools, "
        "tools}; this server has no tools of its own.",
        field="tool_choice",
        code="invalid_value",
    )


def _offered(tools: Iterable[ResponseTool], where: str, namespace: str | None = None) -> Iterator[OfferedTool]:
    """Yield the tools that can be offered, including those of namespaces. Raises InvalidRequest."""
    for i, tool in enumerate(tools):
        at = f"{where}[{i}]"
        match required(tool, "type", at):
            case "function":
                function = FunctionDefinition(_name(tool, at), tool.description, tool.parameters, tool.strict)
                yield offered_function(function, at, namespace)
            case "custom":
                yield offered_custom(CustomDefinition(_name(tool, at), tool.description, tool.format), at, namespace)
            case "namespace" if namespace is None:
                yield from _offered(tool.tools or [], f"{at}.tools", _name(tool, at))
            case "tool_search" if namespace is None and tool.execution == "client":
                yield offered_search(tool.description, tool.parameters, at)
            case other:
                ensure_hosted(other, at, ("function", "custom", "namespace"))


def _types(tools: Iterable[ResponseTool], where: str) -> Iterator[tuple[str, str]]:
    """Yield the path and the type of each tool. A namespace is replaced by its own tools."""
    for i, tool in enumerate(tools):
        if tool.type == "namespace":
            yield from _types(tool.tools or [], f"{where}[{i}].tools")
        else:
            yield f"{where}[{i}]", tool.type or ""


def _name(tool: ResponseTool, where: str) -> str:
    return checked_name(required(tool, "name", where), f"{where}.name")


def is_reference(item: InputItem) -> bool:
    """Return whether an item is a reference to an item of an earlier response. As with OpenAI, a reference may have no
    type.
    """
    return item.type == "item_reference" or (
        item.type == "message" and item.id is not None and item.role is None and item.content is None
    )


def _conversation(body: ResponseBody, history: Sequence[InputItem]) -> Conversation:
    turns = ConversationBuilder()
    if body.instructions:
        turns.add_instructions(body.instructions)
    for where, item in _items(body, history):
        _add(turns, item, where)
    if isinstance(body.input, str):
        turns.add_turn("user", body.input)
    elif not body.input:
        turns.add_turn("user", "")
    return turns.conversation()


def _add(turns: ConversationBuilder, item: InputItem, where: str) -> None:
    """Add an item to the conversation. Raises InvalidRequest."""
    if is_reference(item):
        raise InvalidRequest(
            f"'{where}' refers to an item of an earlier answer, and no answer is stored here: send the item itself "
            "(clients do so with store=false).",
            field=where,
            code="unsupported_parameter",
        )
    match item.type:
        case "message":
            _add_message(turns, item, where)
        case "reasoning":
            if (
                item.content
            ):  # an item that another server has encrypted, or only summarized, contains nothing for this one
                turns.add_thought(read_text(item.content, f"{where}.content"))
        case "function_call":
            turns.add_call(required(item, "call_id", where), _called(item, where), item.arguments)
        case "custom_tool_call":
            turns.add_call(required(item, "call_id", where), _called(item, where), {INPUT: item.input or ""})
        case "function_call_output" | "custom_tool_call_output":
            turns.add_result(required(item, "call_id", where), *read_content(item.output, f"{where}.output"))
        case "tool_search_call" | "tool_search_output" if item.call_id is None:
            pass  # another server has searched; the tools that it found are offered
        case "tool_search_call":
            turns.add_call(required(item, "call_id", where), SEARCH, item.arguments)
        case "tool_search_output":
            turns.add_result(required(item, "call_id", where), _found(item, where))
        case "additional_tools":
            pass
        case other:
            raise InvalidRequest(
                f"Invalid value for '{where}.type': '{other[:40]}'. This server reads message, reasoning, "
                "function_call, custom_tool_call, tool_search_call, their outputs, and additional_tools.",
                field=f"{where}.type",
                code="invalid_value",
            )


def _found(item: InputItem, where: str) -> str:
    """Return the result of a search: the model's names for the tools, which the template describes."""
    tools = [
        {"name": tool.function.name, "description": tool.function.description}
        for tool in _offered(item.tools or [], f"{where}.tools")
    ]
    return msgspec.json.encode(tools).decode()


def _called(item: InputItem, where: str) -> str:
    """Return the model's name for a called tool. Raises InvalidRequest."""
    name = required(item, "name", where)
    return name if item.namespace is None else flat_name(item.namespace, name, where)


def _add_message(turns: ConversationBuilder, item: InputItem, where: str) -> None:
    role = required(item, "role", where)
    content = item.content if role == "assistant" else required(item, "content", where)
    match role:
        case "system" | "developer":
            turns.add_instructions(*read_content(content, f"{where}.content"))
        case "user":
            turns.add_turn("user", *read_content(content, f"{where}.content"))
        case "assistant":
            turns.add_text(read_text(content, f"{where}.content"), begins_turn=True)
        case role:
            raise InvalidRequest(
                f"Invalid value for '{where}.role': '{role[:40]}'. This server reads system, developer, user and "
                "assistant; the result of a call is an item of the type function_call_output.",
                field=f"{where}.role",
                code="invalid_value",
            )
