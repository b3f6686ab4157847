"""Calls of tools: how models of each family write them, and the grammar of an answer that may hold some.

Most families write a call as a JSON object with the tool's name and its arguments, and differ in what stands around it:

    hermes    text <tool_call>{"name": ..., "arguments": {...}}</tool_call> <tool_call>...</tool_call>
    llama3    {"name": ..., "parameters": {...}}; {...}
    mistral   text [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]
    granite   text <|tool_call|>[{"name": ..., "arguments": {...}}, ...]
    phi4      text <|tool_call|>[{"name": ..., "arguments": {...}}, ...]<|/tool_call|>

Others have a notation of their own, which a `ValueWriter` writes:

    mistral_args     text [TOOL_CALLS]name[ARGS]{...}[TOOL_CALLS]...         Mistral, since tokenizer v11
    pythonic         [name(key="value", days=3, exact=True), ...]          Llama 3.2 and 4
    qwen3_coder      text <tool_call><function=name><parameter=city>Paris</parameter>...</function></tool_call>
    functiongemma    text <start_function_call>call:name{key:<escape>value<escape>, ...}<end_function_call>
    gemma4           text <|tool_call>call:name{city:<|"|>Paris<|"|>,days:3,exact:true}<tool_call|>

The grammar puts the name before the arguments, so that a reader knows the tool before its arguments come. These come in
the order of the schema. What a schema says of numbers, texts of Python and values within XML is enforced as in JSON; a
keyword beyond that is left out, or refused where the tool is `strict`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import msgspec

from loramux.constraints.formats import quote, write_json

Notation = Literal["json", "bare", "python", "xml", "gemma"]


class ToolStyle(msgspec.Struct, frozen=True, kw_only=True):
    """The texts around the calls of one family."""

    begin: str = ""
    """Before the first call; empty: the answer begins with it."""
    opening: str = ""
    separator: str
    closing: str = ""
    arguments: str = "arguments"
    """The key of a call's arguments."""
    notation: Notation = "json"
    """How a call is written; `bare`: its name, `middle`, and its arguments as JSON."""
    middle: str = ""
    mark: str = ""
    """Before and behind a text, in Gemma's notation."""
    id_characters: int = 24
    """Letters and digits of a call's id; Mistral's templates refuse any other number than 9."""

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts that may be tokens of their own, without brackets of JSON."""
        return tuple(text for text in (self.begin, self.middle, self.mark, self.closing.strip("]")) if text)

    @property
    def first(self) -> str:
        """The character that begins an answer of calls, where nothing stands before them."""
        return "[" if self.notation == "python" else "{"


STYLES: dict[str, ToolStyle] = {
    "hermes": ToolStyle(begin="<tool_call>", separator="</tool_call>\n<tool_call>", closing="</tool_call>"),
    "llama3": ToolStyle(separator=";", arguments="parameters"),
    "mistral": ToolStyle(begin="[TOOL_CALLS]", opening="[", separator=",", closing="]", id_characters=9),
    "granite": ToolStyle(begin="<|tool_call|>", opening="[", separator=",", closing="]"),
    "mistral_args": ToolStyle(
        begin="[TOOL_CALLS]", separator="[TOOL_CALLS]", middle="[ARGS]", notation="bare", id_characters=9
    ),
    "pythonic": ToolStyle(opening="[", separator=",", closing="]", notation="python"),
    "qwen3_coder": ToolStyle(
        begin="<tool_call>", separator="</tool_call>\n<tool_call>", closing="</tool_call>", notation="xml"
    ),
    "functiongemma": ToolStyle(
        begin="<start_function_call>",
        separator="<end_function_call><start_function_call>",
        closing="<end_function_call>",
        notation="gemma",
        mark="<escape>",
    ),
    "gemma4": ToolStyle(
        begin="<|tool_call>",
        separator="<tool_call|><|tool_call>",
        closing="<tool_call|>",
        notation="gemma",
        mark='<|"|>',
    ),
    "phi4": ToolStyle(begin="<|tool_call|>", opening="[", separator=",", closing="]<|/tool_call|>"),
}

_SIGNS: tuple[tuple[str, str], ...] = (
    ("[ARGS]", "mistral_args"),
    ("[TOOL_CALLS]", "mistral"),
    ("<start_function_call>", "functiongemma"),
    ("<|tool_call>", "gemma4"),
    ("<function=", "qwen3_coder"),
    ("<|/tool_call|>", "phi4"),
    ("<|tool_call|>", "granite"),
    ("<tool_call>", "hermes"),
    ("[func_name1(", "pythonic"),
    ('"parameters": ', "llama3"),
)
"""A text of a family's chat templates, and the family."""


def choose_style(template: str, chosen: str | None = None) -> ToolStyle | None:
    """Return how a model writes calls: as `chosen` (by a revision, or by the settings), or else as its template does.

    None where the template knows no tools.
    """
    if chosen is not None:
        return STYLES.get(chosen)
    if "tools" not in template:
        return None
    return next((STYLES[name] for sign, name in _SIGNS if sign in template), None)


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A function that an answer may call."""

    name: str
    parameters: dict[str, Any] | bool | None = None
    """The JSON schema of its arguments; None: it has none."""
    strict: bool = False
    """Refuse a schema with a keyword that cannot be enforced, instead of leaving that out."""


class ToolUse(msgspec.Struct, frozen=True, kw_only=True):
    """The tools that an answer may or must call."""

    tools: tuple[Tool, ...]
    is_required: bool = False
    """The answer is a call; otherwise it may be a text too."""
    is_parallel: bool = True
    """It may make several calls."""


def write_tools(use: ToolUse, style: ToolStyle, special: dict[str, int], content: str | None = None) -> str:
    """Write the Lark grammar of an answer with calls.

    `special`: token ids of the markers that have no text in a grammar. `content`: the grammar of an answer without a
    call (one %json); None: any text.
    """
    rules = [
        f"calls: {_text(style.opening)} call{_repeated(style, special) if use.is_parallel else ''} "
        f"{_marked(style.closing, special)}",
        "call: " + " | ".join(f"call_{number}" for number in range(len(use.tools))),
        "WS: /[ \\n\\r\\t]{1,40}/",
        "TEXT: /(.|\\n)*/",
    ]
    for number, tool in enumerate(use.tools):
        rules += _write_call(f"call_{number}", tool, style, special)
    begin = _marked(style.begin, special)
    if use.is_required:
        start = f"start: {begin} calls"
    elif content is not None:
        start = f"start: {content} | {begin} calls"
    elif not style.begin:
        start = f"start: calls | /([^\\{style.first}](.|\\n)*)?/"
    elif style.begin in special:
        start = f"start: TEXT | TEXT {begin} calls"
    else:
        rules.append(f"head[lazy]: TEXT {quote(style.begin)}")
        start = "start: TEXT | head calls"
    return "\n".join(["%llguidance {}", start, *rules])


def _write_call(rule: str, tool: Tool, style: ToolStyle, special: dict[str, int]) -> list[str]:
    """Write the rules of one tool's calls. Raises ValueError."""
    parameters = _object(tool.parameters)
    if style.notation in ("json", "bare"):
        arguments = f"arguments_{rule}: {write_json(parameters, strict=tool.strict)}"
        if style.notation == "bare":
            return [arguments, f"{rule}: {quote(tool.name)} {_marked(style.middle, special)} WS? arguments_{rule} WS?"]
        key, name = quote(quote(style.arguments)), quote(quote(tool.name))
        call = (
            f'{rule}: WS? "{{" WS? "\\"name\\"" WS? ":" WS? {name} WS? "," WS? {key} WS? ":" WS? '
            f'arguments_{rule} WS? "}}" WS?'
        )
        return [arguments, call]
    writer, begin, end = _notation(rule, tool, parameters, style, special)
    arguments = writer.arguments()
    return [*writer.rules, f"{rule}: WS? {quote(begin)} WS? {arguments} WS? {quote(end)} WS?"]


def _notation(
    rule: str, tool: Tool, parameters: dict[str, Any], style: ToolStyle, special: dict[str, int]
) -> tuple[ValueWriter, str, str]:
    """Return the writer of a tool's arguments, and the texts around them."""
    match style.notation:
        case "python":
            return PythonWriter(rule, parameters, strict=tool.strict), f"{tool.name}(", ")"
        case "xml":
            return XmlWriter(rule, parameters, strict=tool.strict), f"<function={tool.name}>", "</function>"
        case _:
            writer = GemmaWriter(rule, parameters, style.mark, special, strict=tool.strict)
            return writer, f"call:{tool.name}{{", "}"


def _object(parameters: dict[str, Any] | bool | None) -> dict[str, Any]:
    """Return the schema of a call's arguments, which are an object whatever it says."""
    if parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object"} | (parameters if isinstance(parameters, dict) else {})


def _repeated(style: ToolStyle, special: dict[str, int]) -> str:
    return f" ({_marked(style.separator, special)} call)*"


def _text(text: str) -> str:
    return f"WS? {quote(text)}" if text else ""


def _marked(text: str, special: dict[str, int]) -> str:
    """Write a text in which markers may be special tokens; blanks around them are free."""
    parts = [text]
    for marker, token_id in special.items():
        parts = [
            piece
            for part in parts
            for piece in ([part] if part.startswith("<[") else part.replace(marker, f"\0<[{token_id}]>\0").split("\0"))
        ]
    return " ".join(f"WS? {part}" if part.startswith("<[") else _text(part.strip()) for part in parts if part.strip())


SHAPES = frozenset({"type", "enum", "const", "anyOf", "oneOf", "$ref", "properties", "required", "items"})
NOTES = frozenset(
    {"title", "description", "default", "examples", "$defs", "definitions", "additionalProperties", "$schema"}
)
"""Keywords that say nothing of a value here: arguments that a schema does not name are never written."""
OF_NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
OF_TEXTS = frozenset({"minLength", "maxLength", "pattern", "format"})
MAX_DEPTH = 16


class ValueWriter:
    """Writes the rules of one tool's arguments."""

    literals: ClassVar[Mapping[bool | None, str]] = {True: "true", False: "false", None: "null"}

    def __init__(self, prefix: str, schema: dict[str, Any], *, strict: bool) -> None:
        self.rules: list[str] = []
        self._prefix = prefix
        self._root = schema
        self._strict = strict
        self._references: dict[str, str] = {}

    def arguments(self) -> str:
        """Return the expression of all arguments. Raises ValueError."""
        return self._members(self._root, 0)

    def _members(self, schema: dict[str, Any], depth: int) -> str:
        properties, required = schema.get("properties") or {}, schema.get("required") or []
        members = [(self.member(name, one, depth), name in required) for name, one in properties.items()]
        return self._separated(members)

    def member(self, name: str, schema: Any, depth: int) -> str:
        """Return the expression of one argument, or one member of an object."""
        raise NotImplementedError

    def text(self, schema: dict[str, Any]) -> str:
        """Return the expression of a text."""
        raise NotImplementedError

    def value(self, schema: Any, depth: int) -> str:
        """Return the expression of a value. Raises ValueError."""
        if depth > MAX_DEPTH:
            raise ValueError(f"a schema of arguments is nested more than {MAX_DEPTH} deep")
        if not isinstance(schema, dict) or not (schema.keys() - NOTES):
            return self._anything()
        if "$ref" in schema:
            return self._reference(str(schema["$ref"]), depth)
        if "const" in schema or "enum" in schema:
            return self._alternatives([self.literal(one) for one in schema.get("enum", [schema.get("const")])])
        if (several := schema.get("anyOf") or schema.get("oneOf")) is not None:
            return self._alternatives([self.value(one, depth + 1) for one in several])
        kinds = schema.get("type")
        if isinstance(kinds, list):
            return self._alternatives([self.value({**schema, "type": kind}, depth + 1) for kind in kinds])
        return self._of_type(kinds, schema, depth)

    def _of_type(self, kind: Any, schema: dict[str, Any], depth: int) -> str:
        if kind == "string":
            return self.text(schema)
        is_number = kind in ("integer", "number")
        self.check(schema, SHAPES | NOTES | OF_NUMBERS if is_number else SHAPES | NOTES)
        if is_number:
            return write_json({name: schema[name] for name in schema if name in OF_NUMBERS | {"type"}}, strict=False)
        if kind == "array":
            item = self._rule(self.value(schema.get("items", True), depth + 1))
            return f'"[" WS? ({item} (WS? "," WS? {item})*)? WS? "]"'
        if kind == "object" and schema.get("properties"):
            return f'"{{" WS? {self._members(schema, depth + 1)} WS? "}}"'
        literals = {"boolean": (True, False), "null": (None,)}.get(kind)
        return self._alternatives([self.literal(one) for one in literals]) if literals else self._anything()

    def check(self, schema: dict[str, Any], known: frozenset[str]) -> None:
        """Raise ValueError for a keyword that cannot be enforced, where the tool is strict."""
        unknown = sorted(schema.keys() - known)
        if self._strict and unknown:
            raise ValueError(f"'{unknown[0]}' cannot be enforced in the way that this model writes calls")

    def literal(self, value: Any) -> str:
        """Return the expression of one value of an enumeration."""
        if value is None or isinstance(value, bool):
            return quote(self.literals[value])
        return quote(json.dumps(value, ensure_ascii=False))

    def _reference(self, path: str, depth: int) -> str:
        if path not in self._references:
            rule = self._references[path] = f"{self._prefix}_ref{len(self._references)}"
            self.rules.append(f"{rule}: {self.value(self._find(path), depth + 1)}")
        return self._references[path]

    def _find(self, path: str) -> Any:
        found: Any = self._root
        for part in path.removeprefix("#").strip("/").split("/"):
            found = found.get(part) if isinstance(found, dict) else None
        if found is None:
            raise ValueError(f"the schema of arguments refers to '{path[:80]}', and has no such part")
        return found

    def _anything(self) -> str:
        name = f"{self._prefix}_any"
        if not any(rule.startswith(f"{name}:") for rule in self.rules):
            self.rules.append(f"{name}: {self._anything_but_lists(name)}")
        return name

    def _anything_but_lists(self, name: str) -> str:
        words = " | ".join(quote(word) for word in self.literals.values())
        lists = f'"[" WS? ({name} (WS? "," WS? {name})*)? WS? "]"'
        return f"{self.text({})} | {write_json({'type': 'number'}, strict=False)} | {words} | {lists}"

    def _alternatives(self, expressions: list[str]) -> str:
        return f"({' | '.join(expressions)})" if expressions else "/[^\\s\\S]/"

    def _rule(self, expression: str) -> str:
        name = f"{self._prefix}_r{len(self.rules)}"
        self.rules.append(f"{name}: {expression}")
        return name

    def _separated(self, members: list[tuple[str, bool]]) -> str:
        """Return the members in order, those that are required and any of the others, with commas between them."""
        rest, first = '""', '""'
        for expression, is_required in reversed(members):
            name = self._rule(expression)
            after = f'WS? "," WS? {name}'
            begins = f"{name} {rest}"
            first = self._rule(begins if is_required else f"{begins} | {first}")
            rest = self._rule(f"{after} {rest}" if is_required else f"({after})? {rest}")
        return first


class PythonWriter(ValueWriter):
    """Keyword arguments of a Python call; texts in either quotes."""

    literals: ClassVar[Mapping[bool | None, str]] = {True: "True", False: "False", None: "None"}

    def member(self, name: str, schema: Any, depth: int) -> str:
        """Return `name=value`, or a member of a dictionary."""
        key = f'{quote(name)} "="' if not depth else f'{quote(json.dumps(name))} WS? ":"'
        return f"{key} WS? {self.value(schema, depth + 1)}"

    def text(self, schema: dict[str, Any]) -> str:
        """Return a text in double quotes, or in single ones where nothing more is said of it."""
        self.check(schema, SHAPES | NOTES | OF_TEXTS)
        of_text = {name: schema[name] for name in schema if name in OF_TEXTS}
        double = write_json({"type": "string"} | of_text, strict=self._strict)
        return double if of_text else f"({double} | /'([^'\\\\\\n]|\\\\['\"\\\\nrt])*'/)"


class GemmaWriter(ValueWriter):
    """Members without quotes around their names; texts between two marks."""

    def __init__(
        self, prefix: str, schema: dict[str, Any], mark: str, special: dict[str, int], *, strict: bool
    ) -> None:
        super().__init__(prefix, schema, strict=strict)
        self._mark = mark
        self._special = special

    def member(self, name: str, schema: Any, depth: int) -> str:
        """Return `name:value`."""
        return f"{quote(name + ':')} {self.value(schema, depth + 1)}"

    def text(self, schema: dict[str, Any]) -> str:
        """Return a text between marks."""
        self.check(schema, SHAPES | NOTES)
        if self._mark in self._special:
            mark = f"<[{self._special[self._mark]}]>"
            return f"{mark} TEXT {mark}"
        self.rules.append(f"{self._prefix}_t{len(self.rules)}[lazy]: TEXT {quote(self._mark)}")
        return f"{quote(self._mark)} {self.rules[-1].partition('[')[0]}"

    def literal(self, value: Any) -> str:
        """Return one value of an enumeration."""
        if not isinstance(value, str):
            return super().literal(value)
        mark = f"<[{self._special[self._mark]}]>" if self._mark in self._special else quote(self._mark)
        return f"{mark} {quote(value)} {mark}"


class XmlWriter(ValueWriter):
    """An element for each argument; texts as they are, other values as JSON."""

    END = "\n</parameter>"

    def arguments(self) -> str:
        """Return the elements in the schema's order."""
        required = self._root.get("required") or []
        elements = []
        for name, schema in (self._root.get("properties") or {}).items():
            rule = self._rule(self._element(name, schema))
            elements.append(rule if name in required else f"({rule})?")
        return " ".join(elements)

    def _element(self, name: str, schema: Any) -> str:
        return f"{quote(f'<parameter={name}>' + chr(10))} {self._content(schema)} WS?"

    def _content(self, schema: Any) -> str:
        found = schema if isinstance(schema, dict) else {}
        texts = found.get("enum", [found["const"]] if "const" in found else None)
        if texts and all(isinstance(one, str) for one in texts):
            return f"{self._alternatives([quote(one) for one in texts])} {quote(self.END)}"
        if found.get("type") in (None, "string") and not found.keys() & {"$ref", "anyOf", "oneOf", "allOf"}:
            self.check(found, SHAPES | NOTES)
            self.rules.append(f"{self._prefix}_t{len(self.rules)}[lazy]: TEXT {quote(self.END)}")
            return self.rules[-1].partition("[")[0]
        definitions: dict[str, Any] = {
            name: self._root[name] for name in self._root if name in ("$defs", "definitions")
        }
        return f"{write_json({**definitions, **found}, strict=self._strict)} {quote(self.END)}"
