"""POST /v1/messages and /v1/messages/count_tokens: the request, in Anthropic's shape."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from http import HTTPStatus
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from loramux.common.sampling import given_numbers
from loramux.constraints.formats import JsonSchema
from loramux.serving.errors import InvalidRequest, ServingError
from loramux.serving.messages import AskedFormat, ChatOptions, Conversation, GenerationRequest, ImageSource
from loramux_api.bodies import InferenceBody, Unsupported
from loramux_api.schemas.bounds import MAX_PARTS, Fields, ModelName, Name, Text
from loramux_api.schemas.conversation import (
    MAX_MESSAGES,
    Content,
    ConversationBuilder,
    Part,
    caller_variables,
    image_source,
    json_size,
    placed,
    read_part,
    read_thought,
    renamed_fields,
    required,
)
from loramux_api.schemas.sampling import (
    MAX_USER_LENGTH,
    Int64,
    Positive,
    SamplingBody,
    StopString,
    left_out,
    sampling_params,
    taking_numbers,
)
from loramux_api.schemas.tools import (
    ALL,
    MAX_TOOLS,
    Asked,
    FunctionDefinition,
    OfferedTool,
    Toolbox,
    checked_name,
    ensure_hosted,
    left_out_tools,
    offered_function,
    one_tool,
)

FIELDS = {"stop": "stop_sequences", "user": "metadata.user_id", "continue_final_message": "messages"}
"""Names in this API for a chat's fields."""
_TEXT_ONLY = "this server reads and writes text."
_KEEPING = ("clear_thinking_20251015",)
"""Edits that may keep everything."""


class ContentBlock(Part, kw_only=True):
    """A part of a turn: `text`, `thinking`, `tool_use` or `tool_result`, and `tool_reference` in a result."""

    id: Text | None = None
    name: Text | None = None
    input: Any = None
    """A call's arguments: an object."""
    tool_use_id: Text | None = None
    content: Text | Blocks | Fields | None = None
    """A call's result, or the text of a search result; an object only in results of another vendor's servers."""
    source: Text | BlockSource | None = None
    """A document's text, an image, or a search result's address."""
    title: Text | None = None
    """A document's or a search result's title."""
    context: Text | None = None
    """Words about a document."""


class BlockSource(msgspec.Struct):
    """The text of a document, or an image."""

    type: Name = ""
    """`text` or `content` of a document; `base64`, `url` or `file` of an image."""
    data: Text | None = None
    content: Text | Blocks | None = None
    url: Text | None = None
    file_id: Name | None = None
    """A file of POST /v1/files."""


Blocks = Annotated[list[ContentBlock], Meta(max_length=MAX_PARTS)]


class MessageParam(msgspec.Struct):
    """One turn."""

    role: Name
    """`user`, `assistant` or `system`."""
    content: Text | Blocks


class MessageTool(msgspec.Struct):
    """A tool that the answer may call."""

    name: Name | None = None
    type: Name | None = None
    """Absent or `custom`. A tool of another type that has no `input_schema` is one of Anthropic's own tools, and is
    left out.
    """
    description: Text | None = None
    input_schema: Fields | None = None
    """The JSON schema of the tool's arguments."""
    strict: bool | None = None
    """True refuses a schema with a keyword that cannot be enforced; otherwise such a keyword is left out."""


class MessageToolChoice(msgspec.Struct):
    """The model's choice among the tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    """The tool of the type `tool`."""
    disable_parallel_tool_use: bool | None = None
    """True: at most one call per answer."""


class ThinkingConfig(msgspec.Struct):
    """The thought before the answer. The thought's tokens count in `max_tokens`, and have no other bound."""

    type: Name
    """`enabled` or `disabled`. With any other value, the model's chat template decides."""
    budget_tokens: int | None = None
    """Accepted and without effect."""


class OutputFormat(msgspec.Struct):
    """The format of the answer's text."""

    type: Literal["json_schema"]
    schema: Fields


class OutputConfig(msgspec.Struct):
    """The format of the answer, and how much the model thinks."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class MessageMetadata(msgspec.Struct):
    """Names that the caller assigns to the request."""

    user_id: Annotated[str, Meta(max_length=MAX_USER_LENGTH)] | None = None
    """The caller's name for its end user. If an alias has several revisions, one user always gets the same one."""


class ContextManagement(msgspec.Struct):
    """Edits that Anthropic makes to the prompt before it is read."""

    edits: Annotated[list[Fields], Meta(max_length=MAX_PARTS)] | None = None
    """Edits of the context. Only edits that keep everything are accepted, because this server never cuts prompts."""


class Thread(msgspec.Struct):
    """A conversation that Anthropic stores."""

    type: Literal["create", "continue"]
    """`create` stores nothing and does not change the answer. `continue` gets 404 thread_not_found; clients then send
    the whole conversation.
    """


class PromptBody(InferenceBody, kw_only=True):
    """The prompt of an answer: a conversation and its tools."""

    model: ModelName
    messages: Annotated[list[MessageParam], Meta(min_length=1, max_length=MAX_MESSAGES)]
    """Turns of the conversation. If the last turn is the assistant's, the answer continues it."""
    system: Text | Annotated[list[ContentBlock], Meta(max_length=MAX_PARTS)] | None = None
    tools: Annotated[list[MessageTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: Fields | None = None
    """Variables for the chat template."""
    context_management: ContextManagement | None = None
    """Edits of the context, which are accepted if they remove no part of the prompt."""
    thread: Thread | None = None

    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            "betas",
            "billing_policy",
            "cache_control",
            "diagnostics",
            "fallback_credit_token",
            "fallbacks",
            "mm_payload",
            "return_mm_kwargs",
            "speed",
            "user_profile_id",
            "workspace_id",
        }
    )
    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        "cache_salt": SamplingBody.unsupported["cache_salt"],
        "compaction": Unsupported("prompts are never cut; send fewer messages."),
        "container": Unsupported("this server runs no code."),
        "ec_transfer_params": SamplingBody.unsupported["ec_transfer_params"],
        "inference_geo": Unsupported("requests are served where this server runs.", (None, "global")),
        "kv_transfer_params": SamplingBody.unsupported["kv_transfer_params"],
        "mcp_servers": Unsupported("this server has no tools of its own; send 'tools'.", (None, [])),
        "vllm_xargs": SamplingBody.unsupported["vllm_xargs"],
        "watermarking": SamplingBody.unsupported["watermarking"],
    }

    def without_effect(self) -> Iterator[str]:
        """Yield the tools and blocks that are left out."""
        types = ((f"tools[{i}]", tool.type or "custom") for i, tool in enumerate(self.tools or []))
        yield from left_out_tools(types, (tool.where for tool in _offered(self.tools or [])))
        blocks = (
            (f"messages[{i}].content[{j}]", block.type)
            for i, message in enumerate(self.messages)
            for j, block in enumerate(message.content if isinstance(message.content, list) else ())
        )
        yield from left_out_tools((one for one in blocks if _is_hosted(one[1])), ())


@taking_numbers(without=("presence_penalty", "frequency_penalty"))
class MessageBody(PromptBody, kw_only=True):
    """Anthropic's fields, and vLLM's names for sampling parameters that Anthropic does not have."""

    max_tokens: Positive
    """Maximum number of tokens of the answer. If the context ends earlier, the answer ends with
    `model_context_window_exceeded`.
    """
    seed: Int64 | None = None
    stop_sequences: Annotated[list[StopString], Meta(max_length=16)] | None = None
    stream: bool | None = None
    metadata: MessageMetadata | None = None
    service_tier: Literal["auto", "standard_only", "flex", "priority"] | None = None
    """Urgency and price of the request; auto means standard_only. The answer is 403 if your plan does not include the
    tier.
    """


class CountBody(PromptBody, kw_only=True):
    """The prompt whose tokens are counted."""


def to_request(body: MessageBody) -> GenerationRequest:
    """Return the request of the serving layer. Raises InvalidRequest."""
    with renamed_fields(renamed(body)):
        check_prompt(body)
        shared, turns = _shared(body), conversation(body)
        format = body.output_config.format if body.output_config else None
        return GenerationRequest(
            kind="msg_",
            model=body.model,
            is_streamed=bool(body.stream),
            prompts=(turns,),
            sampling=sampling_params(shared, None),
            left_out=left_out(shared),
            max_tokens=body.max_tokens,
            stop=tuple(body.stop_sequences or ()),
            chat=options(body, turns),
            format=AskedFormat(JsonSchema(format.schema), "output_config.format") if format else None,
            user=(body.metadata.user_id if body.metadata else None) or None,
            service_tier=shared.chosen_tier,
        )


def to_counted(body: CountBody) -> GenerationRequest:
    """Return a request whose prompt is counted. Raises InvalidRequest."""
    with renamed_fields(renamed(body)):
        check_prompt(body)
        turns = conversation(body)
        return GenerationRequest(
            kind="msg_",
            model=body.model,
            is_streamed=False,
            prompts=(turns,),
            sampling=sampling_params(SamplingBody(model=body.model), None),
            chat=options(body, turns),
        )


def renamed(body: PromptBody) -> Mapping[str, str]:
    """Return the names in this API for a chat's fields."""
    has_effort = body.output_config is not None and body.output_config.effort is not None
    return FIELDS | {"reasoning_effort": "output_config.effort" if has_effort else "thinking"}


def _shared(body: MessageBody) -> SamplingBody:
    """Return the fields that all endpoints share, under their common names."""
    return SamplingBody(
        model=body.model,
        **given_numbers(body),
        seed=body.seed,
        service_tier="default" if body.service_tier == "standard_only" else body.service_tier,
    )


def options(body: PromptBody, turns: Conversation) -> ChatOptions:
    """Return the options of the chat template and the answer, in addition to the messages. Raises InvalidRequest."""
    template = caller_variables(body.chat_template_kwargs)
    tools = Toolbox(list(_offered(body.tools or [])))
    choice = body.tool_choice
    use = tools.use(_asked(choice), parallel=not (choice and choice.disable_parallel_tool_use))
    if use is not None:
        template["tools"] = tools.template
    return ChatOptions(
        template=template,
        size=json_size(template),
        tools=use,
        effort=_effort(body),
        ending="open_message" if turns[-1].role == "assistant" else "generation_prompt",
    )


def check_prompt(body: PromptBody) -> None:
    """Refuse fields that would change the prompt, and fields whose content is stored on another server. Raises
    InvalidRequest, ThreadNotFound.
    """
    if body.thread is not None and body.thread.type == "continue":
        raise ThreadNotFound
    for i, edit in enumerate((body.context_management and body.context_management.edits) or []):
        if edit.get("type") not in _KEEPING or edit.get("keep") not in ("all", {"type": "all"}):
            where = f"context_management.edits[{i}]"
            raise InvalidRequest(
                f"'{where}' would cut the prompt, and prompts are never cut here: send fewer messages, or leave it "
                "out. Edits that keep everything are taken.",
                field=where,
                code="unsupported_parameter",
            )


class ThreadNotFound(ServingError):
    """The request continues a thread, but this server stores none."""

    code = "thread_not_found"
    status = HTTPStatus.NOT_FOUND

    def __init__(self) -> None:
        super().__init__("Threads are not stored here; send the whole conversation as 'messages'.", "thread")


def _effort(body: PromptBody) -> str | None:
    """Return how much the model should think; None: its template decides."""
    thinking = body.thinking.type if body.thinking else None
    if thinking == "disabled":
        return "none"
    if body.output_config is not None and body.output_config.effort is not None:
        return body.output_config.effort
    return "medium" if thinking == "enabled" else None


def _asked(choice: MessageToolChoice | None) -> Asked:
    match choice:
        case MessageToolChoice(type="tool", name=name):
            return one_tool(name or "")
        case MessageToolChoice(type="any"):
            return Asked("required")
        case MessageToolChoice(type="none"):
            return Asked("none")
    return ALL


def _offered(tools: Iterable[MessageTool]) -> Iterator[OfferedTool]:
    """Yield the tools that can be offered. Raises InvalidRequest."""
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        if tool.type not in (None, "custom") and tool.input_schema is None:
            ensure_hosted(tool.type, where, ("custom",))
            continue
        function = FunctionDefinition(
            name=checked_name(required(tool, "name", where), f"{where}.name"),
            description=tool.description,
            parameters=tool.input_schema,
            strict=tool.strict,
        )
        yield offered_function(function, where)


def conversation(body: PromptBody) -> Conversation:
    """Return the turns. Raises InvalidRequest."""
    turns = ConversationBuilder()
    if body.system:
        turns.add_instructions(_texts(body.system, "system"))
    for i, message in enumerate(body.messages):
        _add(turns, message, f"messages[{i}]")
    found = turns.conversation()
    if found[-1].role == "assistant" and "tool_calls" in found[-1].fields:
        raise InvalidRequest("'messages' ends with calls of tools; send their results behind them.", field="messages")
    is_empty = found[-1].role == "assistant" and not found[-1].content
    return found[:-1] if is_empty and len(found) > 1 else found  # nothing to continue: the answer begins a new turn


def _add(turns: ConversationBuilder, message: MessageParam, where: str) -> None:
    """Add a message to the conversation. Raises InvalidRequest."""
    match message.role:
        case "user":
            _add_user(turns, message.content, f"{where}.content")
        case "assistant":
            _add_assistant(turns, message.content, f"{where}.content")
        case "system":
            turns.add_instructions(_texts(message.content, f"{where}.content"))
        case role:
            raise InvalidRequest(
                f"Invalid value for '{where}.role': '{role[:40]}'. This server reads user, assistant and system.",
                field=f"{where}.role",
                code="invalid_value",
            )


def _add_user(turns: ConversationBuilder, content: str | list[ContentBlock], where: str) -> None:
    """Add results of calls, each as a separate turn, and then the text."""
    if isinstance(content, str):
        turns.add_turn("user", content)
        return
    parts = []
    for i, block in enumerate(content):
        if block.type == "tool_result":
            id = required(block, "tool_use_id", f"{where}[{i}]")
            turns.add_result(id, *_content(block.content, f"{where}[{i}].content"))
        else:
            parts.append(_text_or_image(block, f"{where}[{i}]"))
    if parts or not content:
        turns.add_turn("user", *placed(parts, "\n"))


def _add_assistant(turns: ConversationBuilder, content: str | list[ContentBlock], where: str) -> None:
    """Add a thought, a text and calls."""
    if isinstance(content, str):
        turns.add_text(content, begins_turn=True)
        return
    if all(_is_hosted(block.type) for block in content):
        turns.begin_answer()
    for i, block in enumerate(content):
        at = f"{where}[{i}]"
        match block.type:
            case hosted if _is_hosted(hosted):
                pass
            case "thinking" | "redacted_thinking":
                if thought := read_thought(block.thinking):
                    turns.add_thought(thought)
            case "tool_use":
                turns.add_call(required(block, "id", at), required(block, "name", at), block.input)
            case _:
                turns.add_text(_text(block, at))


def _is_hosted(type: str) -> bool:
    """Return whether a block is about a tool that another vendor's servers have run."""
    return type in ("server_tool_use", "mcp_tool_use") or type.endswith("_tool_result")


def _content(content: str | list[ContentBlock] | dict[str, Any] | None, where: str) -> Content:
    """Return the text and the images of a call's result. Raises InvalidRequest."""
    if not isinstance(content, list):
        return Content(_texts(content, where))
    return placed((_text_or_image(block, f"{where}[{i}]") for i, block in enumerate(content)), "\n")


def _text_or_image(block: ContentBlock, where: str) -> str | ImageSource:
    """Return a block's text, or its image. Raises InvalidRequest."""
    if block.type != "image":
        return _text(block, where)
    match required(block, "source", where):
        case BlockSource(type="base64", data=str(data)):
            return ImageSource("data", data, where, block.type)
        case BlockSource(type="url" | "file") as source:
            return image_source(block.type, where, source.url, source.file_id)
    raise InvalidRequest(
        f"Invalid value for '{where}.source': an image is {{type: base64, media_type, data}}, {{type: url, url}} or "
        "{type: file, file_id}.",
        field=f"{where}.source",
        code="invalid_value",
    )


def _texts(content: str | list[ContentBlock] | dict[str, Any] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, dict):
        raise InvalidRequest(
            f"Invalid value for '{where}': send a text, or a list of blocks.", field=where, code="invalid_value"
        )
    return "\n".join(_text(block, f"{where}[{i}]") for i, block in enumerate(content))


def _text(block: ContentBlock, where: str) -> str:
    """Return the text of a block. Raises InvalidRequest."""
    if block.type == "document":
        return _written(block, "document", _document(required(block, "source", where), f"{where}.source"))
    if block.type == "search_result":
        return _written(block, "search_result", _texts(required(block, "content", where), f"{where}.content"))
    return read_part(block, where)


def _document(source: str | BlockSource | None, where: str) -> str:
    """Return the text of a document. Raises InvalidRequest."""
    match source:
        case BlockSource(type="text", data=str(data)):
            return data
        case BlockSource(type="content", content=content) if content is not None:
            return _texts(content, f"{where}.content")
    kind = source.type if isinstance(source, BlockSource) else "address"
    raise InvalidRequest(
        f"Invalid value for '{where}': a document of the type '{kind[:40]}' cannot be read here; {_TEXT_ONLY} Send its "
        "text: {type: text, media_type: text/plain, data}.",
        field=where,
        code="invalid_value",
    )


def _written(block: ContentBlock, element: str, text: str) -> str:
    """Return a text with its title and source. The form is that of Anthropic's guides for documents in prompts."""
    source = block.source if isinstance(block.source, str) else None
    named = (("title", block.title), ("source", source), ("context", block.context))
    lines = [f"<{name}>{value}</{name}>" for name, value in named if value]
    return "\n".join([f"<{element}>", *lines, text, f"</{element}>"])
