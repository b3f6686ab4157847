"""Conversations in the form that all chat endpoints share.

OpenAI's Responses and Anthropic's Messages have a list of items or blocks; a chat template has turns. One turn of the
assistant holds its thought, its text and its calls, and the result of a call is a separate turn
(`ConversationBuilder`). Error messages name fields as the caller's API does (`renamed_fields`).

Clients send earlier answers back unchanged. Some of these answers were cut off: they have calls with half of their
arguments, empty texts, refusals, or thoughts. This server accepts every answer that it can send (`Part`, `read_text`,
`read_arguments`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from loramux.common.errors import LoramuxError
from loramux.serving.errors import InvalidRequest
from loramux.serving.messages import Conversation, ImageSource, Message, PlacedImage
from loramux.serving.tokenizer import join_turns
from loramux_api.schemas.bounds import MAX_PARTS, Name, Text

MAX_MESSAGES = 4096
RESERVED = frozenset(
    {
        *("messages", "conversation", "conversations", "tools", "documents", "chat_template", "tokenize"),
        *("add_generation_prompt", "continue_final_message", "return_assistant_tokens_mask", "return_dict"),
        *("return_tensors", "padding", "truncation", "max_length", "tokenizer_kwargs", "sanitize_control_tokens"),
        *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
        *("special_tokens", "additional_special_tokens", "extra_special_tokens", "self", "kwargs"),
    }
)
"""Names that `chat_template_kwargs` cannot set: parameters of transformers' rendering, and a model's special tokens."""


class CalledFunction(msgspec.Struct, kw_only=True):
    """A function, and its arguments as JSON."""

    name: str
    arguments: str


class CalledCustom(msgspec.Struct, kw_only=True):
    """A custom tool, and its input."""

    name: str | msgspec.UnsetType = msgspec.UNSET
    """Name of the tool; absent in the later parts of a streamed call."""
    input: str


class ToolCall(msgspec.Struct, kw_only=True):
    """A call that an answer makes, of a function or of a custom tool."""

    id: str
    type: Literal["function", "custom"] = "function"
    function: CalledFunction | msgspec.UnsetType = msgspec.UNSET
    custom: CalledCustom | msgspec.UnsetType = msgspec.UNSET


class SentFunction(msgspec.Struct):
    """A function in a call that is sent back."""

    name: Text | None = None
    arguments: Any = None
    """Arguments as JSON text, which may be cut off; an object is accepted too."""


class SentCustom(msgspec.Struct):
    """A custom tool in a call that is sent back."""

    name: Text | None = None
    input: Text | None = None


class SentCall(msgspec.Struct):
    """A call of an earlier answer, from this server or another, which the client sends back."""

    id: Text | None = None
    """Id of the call. The id may have any length, because some servers hide a thought in it."""
    type: Name | None = None
    function: SentFunction | None = None
    custom: SentCustom | None = None
    """Custom tool that is called instead of a function; its only argument is `input`."""


class CalledFunctionDelta(msgspec.Struct, kw_only=True):
    """New part of a call's function."""

    name: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str


class ToolCallDelta(msgspec.Struct, kw_only=True):
    """New part of a call: first its id and name, then the parts of its arguments."""

    index: int
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: Literal["function", "custom"] | msgspec.UnsetType = msgspec.UNSET
    function: CalledFunctionDelta | msgspec.UnsetType = msgspec.UNSET
    custom: CalledCustom | msgspec.UnsetType = msgspec.UNSET


_TEXTS = ("text", "input_text", "output_text", "reasoning_text", "summary_text")
THOUGHTS = ("thinking", "redacted_thinking", "reasoning")
"""Types of parts that are thoughts."""
IMAGES = frozenset({"image_url", "image_file", "input_image", "image"})
"""Types of parts that are images: of chats, of Assistants, of Responses, and of Messages."""
_MEDIA = frozenset({"input_audio", "audio_url", "audio", "input_video", "video_url", "video", "file", "input_file"})
"""Types of parts that are neither text nor images."""
DETAILS = ("auto", "low", "high", "original")
"""Values of `detail`: with `low`, an image takes few tokens; the others have no effect."""
MAX_ADDRESS = 8192
"""The longest address of an image, in characters."""
_DATA, _BASE64 = "data:", ";base64"


class SentImage(msgspec.Struct, omit_defaults=True):
    """An image: its address, a data URL, or a file of POST /v1/files."""

    url: Text | None = None
    file_id: Name | None = None
    detail: Name | None = None


class Part(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A part of a turn. Parts of an answer can be sent back unchanged; their other fields are ignored."""

    type: Name
    text: Text | None = None
    refusal: Text | None = None
    """The text of a part of the type `refusal`."""
    thinking: Any = None
    """The thought of a part of the type `thinking`: a text, or parts."""
    tool_name: Name | None = None
    """The tool that a part of the type `tool_reference` names."""
    image_url: Text | SentImage | None = None
    """The image of a part of the type `image_url` or `input_image`: an address or a data URL."""
    image_file: SentImage | None = None
    """The image of a part of the type `image_file`."""
    file_id: Name | None = None
    """The image of a part of the type `input_image`, as a file of POST /v1/files."""
    detail: Name | None = None
    """`low`: the image is resized to at most 256 tokens. `auto`, `high` and `original` have no effect."""


Parts = Annotated[list[Part], Meta(max_length=MAX_PARTS)]


def read_text(content: str | Sequence[Part] | None, where: str, between: str = "") -> str:
    """Return the text of a turn, or of a call's result. Raises InvalidRequest."""
    if content is None or isinstance(content, str):
        return content or ""
    return between.join(read_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def read_part(part: Part, where: str) -> str:
    """Return the text of a part. Raises InvalidRequest."""
    if part.type in _TEXTS and part.text is not None:
        return part.text
    if part.type == "refusal" and part.refusal is not None:
        return part.refusal
    if part.type == "tool_reference":
        return msgspec.json.encode({"type": part.type, "tool_name": required(part, "tool_name", where)}).decode()
    if part.type in _MEDIA | IMAGES:
        why = "images belong into a user's turn or a tool's result" if part.type in IMAGES else "it is not served"
        raise InvalidRequest(
            f"'{where}' is of the type '{part.type}', and this server reads text only here: {why}. Leave it out.",
            field=where,
            code="unsupported_parameter",
        )
    raise InvalidRequest(
        f"Invalid value for '{where}': this server reads texts, parts with a 'text'; got the type '{part.type[:40]}'.",
        field=where,
        code="invalid_value",
    )


class Content(NamedTuple):
    """The text of a turn, or of a call's result, with its images."""

    text: str
    images: tuple[PlacedImage, ...] = ()


def read_content(content: str | Sequence[Part] | None, where: str) -> Content:
    """Return the text and the images of a turn, or of a call's result. Raises InvalidRequest."""
    if content is None or isinstance(content, str):
        return Content(content or "")
    parts = ((part, f"{where}[{i}]") for i, part in enumerate(content))
    return placed(read_image(part, at) if part.type in IMAGES else read_part(part, at) for part, at in parts)


def placed(parts: Iterable[str | ImageSource], between: str = "") -> Content:
    """Return texts and images as one text with images. `between` is put between two texts."""
    texts, images, length, joins = list[str](), list[PlacedImage](), 0, ""
    for part in parts:
        if isinstance(part, str):
            texts += (joins, part)
            length, joins = length + len(joins) + len(part), between
        else:
            images.append(PlacedImage(length, part))
            joins = ""
    return Content("".join(texts), tuple(images))


def read_image(part: Part, where: str) -> ImageSource:
    """Return the image of a part. Raises InvalidRequest."""
    if part.type == "image_file":
        image = required(part, "image_file", where)
    elif part.file_id is not None:
        image = SentImage(file_id=part.file_id)
    else:
        image = required(part, "image_url", where)
    if isinstance(image, str):
        image = SentImage(url=image)
    return image_source(part.type, where, image.url, image.file_id, image.detail or part.detail)


def image_source(type: str, where: str, url: str | None, file_id: str | None, detail: str | None = None) -> ImageSource:
    """Return the image at an address, in a data URL, or in a file. Raises InvalidRequest."""
    if detail not in (None, *DETAILS):
        field = f"{where}.detail"
        raise InvalidRequest(f"Invalid value for '{field}': it is one of {', '.join(DETAILS)}.", field)
    is_small = detail == "low"
    if file_id is not None:
        return ImageSource("file", file_id, where, type, is_small)
    if not url:
        raise InvalidRequest(f"'{where}' holds no image: send its 'url' or 'file_id'.", where)
    if url[: len(_DATA)].lower() == _DATA:
        head, _, data = url.partition(",")
        if not head.rstrip().lower().endswith(_BASE64):
            raise InvalidRequest(f"'{where}' is no data URL of base64: data:image/png;base64,...", where)
        return ImageSource("data", data, where, type, is_small)
    if len(url) > MAX_ADDRESS:
        raise InvalidRequest(
            f"'{where}' has an address of more than {MAX_ADDRESS} characters. If it is the image itself, write "
            "data:image/png;base64, before its base64.",
            where,
        )
    return ImageSource("url", url, where, type, is_small)


def read_thought(*given: Any) -> str:
    """Return the first thought among the values that clients send back. Values that are not text, such as encrypted
    thoughts, are ignored.
    """
    for one in given:
        if isinstance(one, str) and one:
            return one
        if isinstance(one, list):
            texts = [item.get("thinking") or item.get("text") for item in one if isinstance(item, dict)]
            if any(isinstance(text, str) for text in texts):
                return "".join(text for text in texts if isinstance(text, str))
    return ""


def read_arguments(given: Any) -> dict[str, Any]:
    """Return the arguments of a call as an object: empty if they are not valid, for example because the call was cut
    off.

    Templates expect an object; some of them cannot read a text.
    """
    if isinstance(given, str):
        try:
            given = msgspec.json.decode(given)
        except (msgspec.DecodeError, RecursionError):
            return {}
    return given if isinstance(given, dict) else {}


class ConversationBuilder:
    """Collects parts in their order and joins the parts into turns."""

    def __init__(self) -> None:
        self._turns: list[Message] = []
        self._answer: _AssistantTurn | None = None
        """The assistant's turn to which the latest parts belong."""
        self._called: dict[str, str] = {}
        """Names of the called functions, by the ids of their calls."""

    def add_turn(self, role: str, text: str, images: tuple[PlacedImage, ...] = ()) -> None:
        """Add a turn of `role`."""
        self._end_answer()
        self._turns.append(Message(role, text, images=images))

    def add_instructions(self, text: str, images: tuple[PlacedImage, ...] = ()) -> None:
        """Add a system turn. At the beginning of a conversation the turn is joined to an existing system turn, because
        many templates accept only one.
        """
        self._end_answer()
        turn = Message("system", text, images=images)
        if len(self._turns) == 1 and self._turns[0].role == "system":
            turn = join_turns((self._turns.pop(), turn))
        self._turns.append(turn)

    def begin_answer(self) -> None:
        """Begin a turn of the assistant, which may stay empty."""
        self._end_answer()
        self._answer = _AssistantTurn()

    def add_thought(self, text: str) -> None:
        """Add a thought of the assistant. After a text or a call, it begins a new turn."""
        if self._answer is not None and (self._answer.texts or self._answer.calls):
            self._end_answer()
        self._open_answer().thoughts.append(text)

    def add_text(self, text: str, *, begins_turn: bool = False) -> None:
        """Add a text of the assistant to its turn. A text after a call begins a new turn."""
        if self._answer is not None and (self._answer.calls or (begins_turn and self._answer.texts)):
            self._end_answer()
        self._open_answer().texts.append(text)

    def add_call(self, id: str, name: str, arguments: Any) -> None:
        """Add a call of a function to the assistant's turn. For `arguments` see `read_arguments`."""
        self._called[id] = name
        self._open_answer().calls.append(call_fields(id, name, read_arguments(arguments)))

    def add_result(
        self, call_id: str, text: str, images: tuple[PlacedImage, ...] = (), name: str | None = None
    ) -> None:
        """Add the result of a call. `name` is the name of the function, if it is given."""
        self._end_answer()
        fields = {"tool_call_id": call_id}
        if found := name or self._called.get(call_id):
            fields["name"] = found
        self._turns.append(Message("tool", text, fields, json_size(fields), images))

    def conversation(self) -> Conversation:
        """Return the turns."""
        self._end_answer()
        return tuple(self._turns)

    def _open_answer(self) -> _AssistantTurn:
        if self._answer is None:
            self._answer = _AssistantTurn()
        return self._answer

    def _end_answer(self) -> None:
        if self._answer is not None:
            self._turns.append(self._answer.message())
            self._answer = None


class _AssistantTurn:
    def __init__(self) -> None:
        self.texts: list[str] = []
        self.thoughts: list[str] = []
        self.calls: list[dict[str, Any]] = []

    def message(self) -> Message:
        fields: dict[str, Any] = {}
        if self.calls:
            fields["tool_calls"] = self.calls
        if self.thoughts:
            fields["reasoning_content"] = "".join(self.thoughts)
        return Message("assistant", "".join(self.texts), fields, json_size(fields))


def call_fields(id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a call in the form of chat templates: its arguments are an object, not a text."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def required(part: msgspec.Struct, name: str, where: str) -> Any:
    """Return a field that parts of this kind need. Raises InvalidRequest if the field is absent."""
    value = getattr(part, name)
    if value is None or value is msgspec.UNSET:
        field = f"{where}.{name}"
        raise InvalidRequest(f"Missing required parameter: '{field}'.", field=field, code="missing_required_parameter")
    return value


def caller_variables(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return `chat_template_kwargs` as variables for the template. Raises InvalidRequest."""
    if reserved := sorted(RESERVED & (given or {}).keys()):
        field = f"chat_template_kwargs.{reserved[0]}"
        raise InvalidRequest(f"'{field}' is set by the server; leave it out.", field=field)
    return dict(given or {})


def json_size(value: Any) -> int:
    """Return the approximate number of characters of a value in a template."""
    return len(msgspec.json.encode(value)) if value else 0


@contextmanager
def renamed_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Use the endpoint's field names in errors: `names` maps a chat's field names to the endpoint's."""
    try:
        yield
    except LoramuxError as error:
        rename_fields(error, names)
        raise


def rename_fields(error: LoramuxError, names: Mapping[str, str]) -> None:
    """Use the endpoint's field names in an error, as `renamed_fields` does."""
    error.message = re.sub(r"'([\w.]+)(\[[^']*)?'", lambda found: _renamed(found, names), error.message)
    error.field = names.get(error.field or "", error.field)


def _renamed(found: re.Match[str], names: Mapping[str, str]) -> str:
    return f"'{names.get(found[1], found[1])}{found[2] or ''}'"
