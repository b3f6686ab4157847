"""Every notation of calls: what the grammar lets a model write, the reader reads back as the same JSON."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from answer_pieces import read
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tiny_base import byte_tokenizer

from loramux.constraints.formats import to_grammar
from loramux.constraints.notations import argument_kinds, is_plain
from loramux.constraints.tools import STYLES, Tool, ToolStyle, ToolUse, write_tools
from loramux.serving.parts import AnswerReader, Dialect

JSON_STYLES = tuple(name for name in STYLES if STYLES[name].notation == "json")
OTHERS = tuple(name for name in STYLES if STYLES[name].notation != "json")


@dataclass(frozen=True)
class Node:
    """A value, a schema that allows it, and its members: those that the schema names, or a model does."""

    schema: Any
    value: Any
    members: tuple[Node, ...] = ()
    names: tuple[str, ...] = ()
    is_named: bool = True


# ---- values and their schemas

TEXTS = st.text(max_size=9) | st.sampled_from(
    [
        "null",
        "true",
        "12",
        "-1.5e3",
        "[1]",
        "{}",
        '"a"',
        "'",
        "\\",
        "x</parameter>y",
        "<tool_call>",
        "True",
        "None",
        "  12 ",
        "  [",
        "a\nb",
        "😀",
        "</function>",
        "a,b:c}",
        "\n",
        "\x7f",
        "/",
        "<esc",
        "<",
        '\'{"a": 1}',
        "\\ud83d",
        "nullable",
        "1 2",
        "\u2028",
    ]
)
NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,5}", fullmatch=True) | st.sampled_from(
    [
        "$filter",
        "a b",
        "a:b",
        "a,b",
        "a=b",
        "a>b",
        "@type",
        "xml:lang",
        "café",
        "a.b",
        "a-b",
        "a(b)",
        "{a}",
        "a]",
        '"',
        "x)",
        "}",
    ]
)
NUMBERS = st.integers() | st.sampled_from([2**53 + 1, 1234567890123456789, -(2**64), 10**30, 0.1, 1e300, -1.5])
SCALARS = st.none() | st.booleans() | NUMBERS | TEXTS
TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


def free(value: Any) -> Node:
    """A value of which no schema says anything."""
    if isinstance(value, dict):
        return Node({}, value, tuple(map(free, value.values())), tuple(value), is_named=False)
    return Node({}, value, tuple(map(free, value)) if isinstance(value, list) else ())


def fixed(value: Any) -> Node:
    """A value that a schema gives whole."""
    if isinstance(value, dict):
        return Node({"const": value}, value, tuple(map(fixed, value.values())), tuple(value))
    return Node({"const": value}, value, tuple(map(fixed, value)) if isinstance(value, list) else ())


FREE = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES | st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)


@st.composite
def scalars(draw: Any) -> Node:
    value = draw(SCALARS)
    kind = TYPES[type(value)]
    others = draw(st.lists(SCALARS, max_size=2))
    union = draw(st.lists(st.sampled_from(sorted(TYPES.values())), max_size=2))
    schema = draw(
        st.sampled_from(
            [
                {"type": kind},
                {"type": [kind, *union]},
                {"enum": [*others, value]},
                {"type": kind, "enum": [*others, value]},
                {"const": value},
                {"anyOf": [*({"type": one} for one in union), {"type": kind}]},
                {"oneOf": [*({"const": one} for one in others), {"const": value}]},
                {"$ref": f"#/$defs/{kind}"},
                {"allOf": [{"$ref": f"/$defs/{kind}"}], "description": "of it"},
            ]
        )
    )
    return Node(schema, value)


def lists_of(inner: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    def made(item: Node, count: int) -> Node:
        return Node({"type": "array", "items": item.schema, "maxItems": 4}, [item.value] * count, (item,) * count)

    return st.builds(made, inner, st.integers(0, 3))


def objects_of(inner: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    def made(members: dict[str, Node], absent: set[str], is_closed: bool) -> Node:
        schema = {
            "type": "object",
            "properties": {name: node.schema for name, node in members.items()},
            "required": [name for name in members if name not in absent],
            **({"additionalProperties": False} if is_closed else {}),
        }
        present = {name: node for name, node in members.items() if name not in absent}
        value = {name: node.value for name, node in present.items()}
        return Node(schema, value, tuple(present.values()), tuple(present))

    return st.builds(made, st.dictionaries(NAMES, inner, max_size=3), st.sets(NAMES, max_size=2), st.booleans())


def maps_of(inner: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    def made(names: list[str], item: Node) -> Node:
        schema = {"type": "object", "additionalProperties": item.schema}
        return Node(schema, dict.fromkeys(names, item.value), (item,) * len(names), tuple(names), is_named=False)

    return st.builds(made, st.lists(st.text(max_size=4), unique=True, max_size=2), inner)


NODES = st.recursive(
    scalars() | st.builds(free, FREE) | st.builds(fixed, FREE),
    lambda inner: lists_of(inner) | objects_of(inner) | maps_of(inner),
    max_leaves=5,
)
CALLS = st.lists(objects_of(NODES), min_size=1, max_size=2)
DEFINITIONS = {kind: {"type": kind} for kind in TYPES.values()}

# ---- as a model writes them


def json_text(text: str) -> str:
    """Return a text as JSON: as `json.dumps` does it for every other text, as JavaScript does it for the rest."""
    return json.dumps(text, ensure_ascii=len(text) % 2 == 0)


def spelled(node: Node, style: ToolStyle) -> str:
    if isinstance(node.value, dict):
        pairs = zip(node.names, node.members, strict=True)
        members = ", ".join(f"{key(name, style, node.is_named)}{spelled(member, style)}" for name, member in pairs)
        return f"{{{members}}}"
    if isinstance(node.value, list):
        return f"[{', '.join(spelled(member, style) for member in node.members)}]"
    if isinstance(node.value, str):
        return f"{style.mark}{node.value}{style.mark}" if style.mark else json_text(node.value)
    if style.notation == "python" and not isinstance(node.value, int | float):
        return "None"
    return repr(node.value) if style.notation == "python" and isinstance(node.value, bool) else json.dumps(node.value)


def key(name: str, style: ToolStyle, is_named: bool) -> str:
    if style.notation != "gemma":
        return f"{json_text(name)}: "
    return f"{name}:" if is_named or is_plain(name) else f"{style.mark}{name}{style.mark}:"


def element(name: str, node: Node, schema: Any, style: ToolStyle) -> str:
    kinds = argument_kinds(schema, name)
    is_text = isinstance(node.value, str) and (kinds == {"string"} or not looks_like_json(node.value, kinds))
    content = node.value if is_text else spelled(node, style)
    return f"<parameter={name}>\n{content}\n</parameter>\n"


def looks_like_json(text: str, kinds: frozenset[str]) -> bool:
    begun = text.lstrip(" \t\r\n")
    if begun.startswith(('"', *("[" for _ in kinds & {"array"}), *("{" for _ in kinds & {"object"}))):
        return True
    of_kind = {"null": "null", "boolean": "true|false", "number": r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?"}
    return any(re.fullmatch(of_kind[kind], begun.rstrip(" \t\r\n"), re.ASCII) for kind in kinds & of_kind.keys())


def call(name: str, node: Node, schema: Any, style: ToolStyle) -> str:
    pairs = list(zip(node.names, node.members, strict=True))
    match style.notation:
        case "json":
            return f'{{"name": "{name}", "{style.arguments}": {spelled(node, style)}}}'
        case "bare":
            return f"{name}[ARGS]{spelled(node, style)}"
        case "python":
            return f"{name}({', '.join(f'{one}={spelled(member, style)}' for one, member in pairs)})"
        case "xml":
            return f"\n<function={name}>\n{''.join(element(*pair, schema, style) for pair in pairs)}</function>\n"
        case _:
            return f"call:{name}{spelled(node, style)}"


@cache
def vocabulary() -> tuple[Any, LLTokenizer]:
    tokenizer = byte_tokenizer()
    return tokenizer, LLTokenizer(tokenizer.backend_tokenizer.to_str(), n_vocab=260, eos_token=256)


def is_unwritable(node: Node, style: ToolStyle) -> bool:
    """Return True if a value contains a mark of the notation, or a reader cannot find a name."""
    if isinstance(node.value, str):
        marks = {"gemma": style.mark, "xml": "\n</parameter>"}
        return marks.get(style.notation, "\0none") in node.value
    return any(is_unwritable(member, style) for member in node.members) or any(
        style.mark in name for name in node.names if style.mark
    )


def check_refusal(refusal: str) -> None:
    assert re.match(r"tool 'f\d', /properties/", refusal), refusal
    assert "cannot be written" in refusal, refusal


def check_round_trip(style: ToolStyle, nodes: list[Node]) -> None:
    schemas = [{**node.schema, "$defs": DEFINITIONS} for node in nodes]
    use = ToolUse(tools=tuple(Tool(name=f"f{i}", parameters=schema) for i, schema in enumerate(schemas)))
    try:
        lark = write_tools(use, style, {})
    except ValueError as refusal:
        check_refusal(str(refusal))
        return
    if any(is_unwritable(node, style) for node in nodes):
        return
    bodies = [call(f"f{i}", node, schemas[i], style) for i, node in enumerate(nodes)]
    text = style.begin + style.opening + style.separator.join(bodies) + style.closing
    tokenizer, of_grammar = vocabulary()
    matcher = LLMatcher(of_grammar, to_grammar(lark))
    assert not matcher.is_error(), matcher.get_error()
    data = text.encode()
    taken = matcher.try_consume_tokens(tokenizer.convert_tokens_to_ids([_BYTES[byte] for byte in data]))
    assert (taken, matcher.is_accepting()) == (len(data), True), (text, data[:taken].decode(errors="replace"))
    for pieces in ([text], list(text)):
        reader = AnswerReader(Dialect(style), in_thought=False, may_think=False, may_call=True, use=use)
        _, content, calls = read(reader, pieces)
        assert content == ""
        found = [(name, json.loads(arguments)) for name, arguments in calls.values()]
        assert [(name, repr(value)) for name, value in found] == [
            (f"f{i}", repr(node.value)) for i, node in enumerate(nodes)
        ], text


def _byte_tokens() -> list[str]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return [character for _, character in sorted(bytes_to_unicode().items())]


_BYTES = _byte_tokens()
RELAXED = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=120, **RELAXED)
@given(style=st.sampled_from(JSON_STYLES), nodes=CALLS)
def test_calls_in_json_are_allowed_and_read_back_as_the_same_value(style: str, nodes: list[Node]) -> None:
    check_round_trip(STYLES[style], nodes)


@pytest.mark.parametrize("style", OTHERS)
@settings(max_examples=80, **RELAXED)
@given(nodes=CALLS)
def test_calls_of_every_notation_are_allowed_and_read_back_as_the_same_value(style: str, nodes: list[Node]) -> None:
    check_round_trip(STYLES[style], nodes)


@pytest.mark.slow
@pytest.mark.parametrize("style", ["json", *OTHERS])
@settings(max_examples=20_000, **RELAXED)
@given(nodes=CALLS, number=st.integers(0, len(JSON_STYLES) - 1))
def test_20000_calls_of_every_notation_are_allowed_and_read_back(style: str, nodes: list[Node], number: int) -> None:
    check_round_trip(STYLES[JSON_STYLES[number] if style == "json" else style], nodes)
