"""Calls in the notations of each family: read back as written, and held to the tools' schemas by a grammar."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from answer_pieces import cut, read
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tiny_base import byte_tokenizer
from tokenizers import AddedToken

from loramux.constraints.formats import to_grammar
from loramux.constraints.tools import STYLES, Tool, ToolUse, choose_style, write_tools
from loramux.serving.parts import AnswerReader, Dialect
from loramux.serving.tokenizer import Tokenizer

NOTATIONS = ("mistral_args", "pythonic", "qwen3_coder", "functiongemma", "gemma4")
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
        "exact": {"type": "boolean"},
        "unit": {"enum": ["C", "F"]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "where": {"$ref": "#/$defs/place"},
    },
    "required": ["city", "days"],
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"lat": {"type": "number"}, "note": {"type": ["string", "null"]}},
            "required": ["lat"],
        }
    },
}
USE = ToolUse(tools=(Tool(name="get_weather", parameters=SCHEMA), Tool(name="now")))
FULL = {
    "city": "Paris",
    "days": 3,
    "exact": True,
    "unit": "C",
    "tags": ["a", "b c"],
    "where": {"lat": -1.5, "note": None},
}
CALLS = [("get_weather", FULL), ("now", {}), ("get_weather", {"city": "'", "days": 7})]

# ---- as models write them


def python_literal(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)}: {python_literal(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(python_literal, value)) + "]"
    return repr(value) if value is None or isinstance(value, bool) else json.dumps(value, ensure_ascii=False)


def gemma_literal(value: Any, mark: str) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{gemma_literal(v, mark)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(gemma_literal(v, mark) for v in value) + "]"
    return f"{mark}{value}{mark}" if isinstance(value, str) else json.dumps(value)


def written_call(style: str, name: str, arguments: dict[str, Any]) -> str:
    match STYLES[style].notation:
        case "json":
            return json.dumps({"name": name, STYLES[style].arguments: arguments})
        case "bare":
            return f"{name}[ARGS]{json.dumps(arguments)}"
        case "python":
            return f"{name}({', '.join(f'{k}={python_literal(v)}' for k, v in arguments.items())})"
        case "xml":
            contents = {k: v if isinstance(v, str) else json.dumps(v) for k, v in arguments.items()}
            inner = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in contents.items())
            return f"\n<function={name}>\n{inner}</function>\n"
        case _:
            return f"call:{name}{gemma_literal(arguments, STYLES[style].mark)}"


def written(style: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    chosen = STYLES[style]
    bodies = [written_call(style, *call) for call in calls]
    return chosen.begin + chosen.opening + chosen.separator.join(bodies) + chosen.closing


def found(style: str, text: str, seed: int, use: ToolUse = USE) -> tuple[str, list[tuple[str, Any]]]:
    reader = AnswerReader(Dialect(STYLES[style]), in_thought=False, may_think=False, may_call=True, use=use)
    _, content, calls = read(reader, cut(text, seed))
    return content, [(name, json.loads(value)) for name, value in calls.values()]


# ---- reading

KEYS = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True)
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\n<|"), max_size=9).map(
    lambda text: text.strip("\x0b\r")
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=80, deadline=None)
@given(
    style=st.sampled_from(NOTATIONS),
    calls=st.lists(st.tuples(KEYS, st.dictionaries(KEYS, VALUES, max_size=3)), min_size=1, max_size=3),
    seed=st.integers(0, 99),
)
def test_calls_of_every_notation_are_read_as_they_were_written(style, calls, seed) -> None:
    """However an answer is cut into pieces, and whatever its arguments hold."""
    text = "I look. " if STYLES[style].begin else ""
    texts = [
        Tool(name=name, parameters={"properties": {k: {"type": "string"} for k, v in of.items() if isinstance(v, str)}})
        for name, of in calls
    ]
    if len({name for name, _ in calls}) < len(calls):
        return  # two tools of one name say different things of their arguments
    assert found(style, text + written(style, calls), seed, ToolUse(tools=tuple(texts))) == (text, calls)


def test_texts_in_single_quotes_are_read() -> None:
    calls = found("pythonic", "[f(a='it\\'s \"x\"', b=\"tab\\t\", c=('x', 1))]", 1)[1]
    assert calls == [("f", {"a": 'it\'s "x"', "b": "tab\t", "c": ["x", 1]})]


def test_argument_whose_schema_is_unknown_is_json_or_else_a_text() -> None:
    text = (
        "<tool_call><function=f><parameter=a>\n3\n</parameter><parameter=b>\nthree\n</parameter></function></tool_call>"
    )
    assert found("qwen3_coder", text, 1)[1] == [("f", {"a": 3, "b": "three"})]


def test_text_that_looks_like_a_number_stays_a_text() -> None:
    text = written("qwen3_coder", [("get_weather", {"city": "75001", "days": 1})])
    assert found("qwen3_coder", text, 1)[1][0][1] == {"city": "75001", "days": 1}


def test_call_ids_of_mistrals_templates_are_no_part_of_the_name() -> None:
    assert found("mistral_args", "[TOOL_CALLS]f[CALL_ID]abc123xyz[ARGS]{}", 1)[1] == [("f", {})]


@pytest.mark.parametrize("style", NOTATIONS)
@pytest.mark.parametrize("seed", range(3))
def test_unfinished_calls_give_out_what_is_certain(style: str, seed: int) -> None:
    whole = written(style, CALLS)
    reader = AnswerReader(Dialect(STYLES[style]), in_thought=False, may_think=False, may_call=True, use=USE)
    for piece in cut(whole[: len(whole) // 2], seed):
        reader.push(piece)
    reader.flush()  # it raises nothing


# ---- the grammar


@pytest.fixture(scope="module")
def vocabulary() -> tuple[Any, LLTokenizer]:
    tokenizer = byte_tokenizer()
    return tokenizer, LLTokenizer(tokenizer.backend_tokenizer.to_str(), n_vocab=260, eos_token=256)


def accepted(vocabulary: tuple[Any, LLTokenizer], style: str, text: str, use: ToolUse = USE) -> str:
    """The beginning of `text` that the grammar allows; all of it only if the answer may end there."""
    tokenizer, of_grammar = vocabulary
    matcher = LLMatcher(of_grammar, to_grammar(write_tools(use, STYLES[style], {})))
    assert not matcher.is_error(), matcher.get_error()
    data = tokenizer.encode(text, add_special_tokens=False)
    length = matcher.try_consume_tokens(data)
    return text if length == len(data) and matcher.is_accepting() else bytes(data[:length]).decode()


@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize("style", [name for name in STYLES if STYLES[name].begin])
def test_grammar_allows_a_marker_that_is_one_token(style: str, is_special: bool) -> None:
    """Qwen's `<tool_call>` is an added token that is not special; Mistral's `[TOOL_CALLS]` is special."""
    tokenizer = byte_tokenizer()
    markers = STYLES[style].markers
    tokenizer.add_tokens([AddedToken(marker, special=is_special, normalized=False) for marker in markers])
    of_grammar = LLTokenizer(tokenizer.backend_tokenizer.to_str(), n_vocab=len(tokenizer), eos_token=256)
    named = Tokenizer(tokenizer).grammar_tokens(markers)
    text = written(style, CALLS[:1])
    data = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.convert_tokens_to_ids(STYLES[style].begin) == data[0]
    for use in (USE, msgspec.structs.replace(USE, is_required=True)):
        matcher = LLMatcher(of_grammar, to_grammar(write_tools(use, STYLES[style], named)))
        assert matcher.try_consume_tokens(data) == len(data)
        assert matcher.is_accepting()


@pytest.mark.parametrize("style", NOTATIONS)
def test_grammar_allows_what_models_write(vocabulary: tuple[Any, LLTokenizer], style: str) -> None:
    text = "Let me see. " if STYLES[style].begin else ""
    assert accepted(vocabulary, style, text + written(style, CALLS)) == text + written(style, CALLS)
    assert accepted(vocabulary, style, "No call (at all).") == "No call (at all)."


@pytest.mark.parametrize("style", NOTATIONS)
@pytest.mark.parametrize(
    "arguments",
    [
        {"city": "Paris", "days": "three"},
        {"city": "Paris", "days": 9},
        {"days": 3},
        {"city": "Paris", "days": 3, "unit": "K"},
        {"city": "Paris", "days": 3, "exact": 1},
        {"city": "Paris", "days": 3, "where": {"note": None}},
        {"city": "Paris", "days": 3, "other": 1},
    ],
    ids=json.dumps,
)
def test_grammar_holds_arguments_to_the_schema(
    vocabulary: tuple[Any, LLTokenizer], style: str, arguments: dict[str, Any]
) -> None:
    wrong = written(style, [("get_weather", arguments)])
    if style == "mistral_args" and "other" in arguments:
        return  # plain JSON: the schema allows more
    assert accepted(vocabulary, style, wrong) != wrong


@pytest.mark.parametrize("style", NOTATIONS)
def test_tool_that_is_not_offered_cannot_be_called(vocabulary: tuple[Any, LLTokenizer], style: str) -> None:
    assert "get_news" not in accepted(vocabulary, style, written(style, [("get_news", {})]))


@pytest.mark.parametrize("style", NOTATIONS)
def test_required_call_begins_the_answer(vocabulary: tuple[Any, LLTokenizer], style: str) -> None:
    use = ToolUse(tools=USE.tools, is_required=True, is_parallel=False)
    one = written(style, CALLS[:1])
    assert accepted(vocabulary, style, one, use) == one
    assert accepted(vocabulary, style, "Well, " + one, use) == ""
    assert accepted(vocabulary, style, written(style, CALLS), use) != written(style, CALLS)


@pytest.mark.parametrize("style", ["qwen3_coder", "functiongemma"])
def test_strict_tool_with_a_keyword_that_cannot_be_enforced_is_refused(style: str) -> None:
    schema = {"type": "object", "properties": {"code": {"type": "string", "pattern": "^[A-Z]+$"}}, "required": ["code"]}
    lenient, strict = (ToolUse(tools=(Tool(name="f", parameters=schema, strict=strict),)) for strict in (False, True))
    assert write_tools(lenient, STYLES[style], {})
    with pytest.raises(ValueError, match="'pattern' cannot be enforced"):
        write_tools(strict, STYLES[style], {})


@pytest.mark.parametrize(
    ("template", "style"),
    [
        ("{{ tools }}[TOOL_CALLS]{{ name }}[ARGS]{{ args }}", "mistral_args"),
        ("{{ tools }} in the format of [func_name1(params_name1=params_value1...)]", "pythonic"),
        ("{{ tools }}<tool_call>\n<function={{ name }}>", "qwen3_coder"),
        ("{{ tools }}<start_function_call>call:{{ name }}", "functiongemma"),
        ("{{ tools }}<|tool_call>call:{{ name }}", "gemma4"),
    ],
)
def test_notation_is_recognised_by_the_template(template: str, style: str) -> None:
    assert choose_style(template) == STYLES[style]


@pytest.mark.parametrize("size", [1, 3, 500])
@pytest.mark.parametrize(
    ("style", "text", "is_call"),
    [
        ("llama3", '{"name": "Ann", "parameters": {"age": 3}}', False),  # of no tool's name
        ("llama3", '{"name": "now", "age": 3}', False),
        ("llama3", '{"name": "nowadays", "parameters": {}}', False),
        ("llama3", '{ "city": {"name": "now", "parameters": {}}}', False),
        ("llama3", '{"name": "now"}', False),
        ("llama3", "{}", False),
        ("llama3", '\n{ "name" :"now",\n"parameters": {}}', True),
        ("pythonic", '["now", 3]', False),
        ("pythonic", "[[now()]]", False),
        ("pythonic", "[ now()]", True),
    ],
)
def test_json_answer_next_to_tools_is_a_call_only_if_it_begins_as_one(
    style: str, text: str, is_call: bool, size: int
) -> None:
    """Models of these families write calls without a mark before them."""
    made = AnswerReader(
        Dialect(STYLES[style]), in_thought=False, may_think=False, may_call=True, use=USE, may_be_json=True
    )
    _, content, calls = read(made, [text[place : place + size] for place in range(0, len(text), size)])
    assert (content, [name for name, _ in calls.values()]) == (("", ["now"]) if is_call else (text, []))
