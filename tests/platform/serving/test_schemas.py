"""Schemas part by part: each is enforced, or left out alone, or refused by its path."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tiny_base import byte_tokenizer

from loramux.constraints.formats import Choice, JsonObject, JsonSchema, to_grammar, write_format
from loramux.constraints.grammars import ToolGrammar, TrialJob, TrialSetup
from loramux.constraints.notations import special_names
from loramux.constraints.schemas import References, kinds
from loramux.constraints.tools import STYLES, Tool, ToolUse, write_tools
from loramux.constraints.values import Spelling
from loramux.serving.calls import CallDelta, join_calls, scanner_of


@cache
def vocabulary() -> LLTokenizer:
    return LLTokenizer(byte_tokenizer().backend_tokenizer.to_str(), n_vocab=260, eos_token=256)


def allows(grammar: str, text: str) -> bool:
    matcher = LLMatcher(vocabulary(), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    data = list(text.encode())
    tokens = [byte_tokenizer().convert_tokens_to_ids(_BYTES[byte]) for byte in data] if data else []
    return matcher.try_consume_tokens(tokens) == len(data) and matcher.is_accepting()


def _byte_tokens() -> list[str]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return [character for _, character in sorted(bytes_to_unicode().items())]


_BYTES = _byte_tokens()


def of(schema: Any, *, strict: bool = False, spelling: Spelling | None = None) -> str:
    return write_format(JsonSchema(schema, strict), spelling or Spelling())


def of_tools(style: str, *tools: Tool, required: bool = True) -> str:
    return to_grammar(write_tools(ToolUse(tools=tools, is_required=required), STYLES[style], {}))


def member(schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"e": schema}, "required": ["e"], "additionalProperties": False}


# ---- numbers and escapes

LARGE = [1234567890123456789, 2**53 + 1, -(2**63), 2**64, 10**30]


@pytest.mark.parametrize("number", LARGE)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("keyword", ["enum", "const"])
def test_integers_beyond_2_53_are_written_with_all_digits(number: int, strict: bool, keyword: str) -> None:
    schema = member({"type": "integer", keyword: [number] if keyword == "enum" else number})
    grammar = of(schema, strict=strict)
    assert allows(grammar, f'{{"e":{number}}}')
    assert not allows(grammar, f'{{"e":{int(float(number)) if int(float(number)) != number else number + 1}}}')


@pytest.mark.parametrize("keyword", ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"])
def test_bounds_that_a_double_cannot_hold_are_left_out_or_refused(keyword: str) -> None:
    schema = member({"type": "integer", keyword: 2**53 + 1})
    assert allows(of(schema), '{"e":7}')
    with pytest.raises(
        ValueError, match=f"^/properties/e/{keyword}: {2**53 + 1} is no number that can be held exactly"
    ):
        of(schema, strict=True)


def test_bounds_next_to_one_that_is_left_out_are_kept() -> None:
    grammar = of(member({"type": "integer", "minimum": -(2**63), "maximum": 9}))
    assert (allows(grammar, '{"e":9}'), allows(grammar, '{"e":10}')) == (True, False)


BEYOND = 2**53 + 1
NEXT_TO_OTHERS: dict[str, tuple[Any, Any]] = {
    "/enum": ({"type": "integer", "enum": [BEYOND], "minimum": 0}, BEYOND),
    "/const": ({"const": BEYOND, "minimum": 0}, BEYOND),
    "/enum of an object": ({"enum": [{"k": [BEYOND]}], "minProperties": 1}, {"k": [BEYOND]}),
    "/prefixItems/0/const": ({"type": "array", "prefixItems": [{"const": BEYOND}]}, [BEYOND]),
    "/items/anyOf/1/enum": ({"type": "array", "maxItems": 999, "items": {"anyOf": [{}, {"enum": [BEYOND]}]}}, [BEYOND]),
    "/allOf/0/const": ({"allOf": [{"const": BEYOND}, {"minimum": 0}]}, BEYOND),
    "/properties/n/const": ({"minProperties": 1, "properties": {"n": {"const": BEYOND}}}, {"n": BEYOND}),
    "/properties/enum/const": ({"minProperties": 1, "properties": {"enum": {"const": BEYOND}}}, {"enum": BEYOND}),
    "/properties/properties/enum": (
        {"minProperties": 1, "properties": {"properties": {"enum": [BEYOND]}}},
        {"properties": BEYOND},
    ),
    "/patternProperties/^n/const": ({"patternProperties": {"^n": {"const": BEYOND}}}, {"n": BEYOND}),
    "/additionalProperties/const": ({"minProperties": 1, "additionalProperties": {"const": BEYOND}}, {"n": BEYOND}),
}
"""Schemas that llguidance writes whole, because of a keyword that has no rule here, and values of them."""


@pytest.mark.parametrize("path", NEXT_TO_OTHERS)
def test_integers_beyond_2_53_next_to_other_keywords_are_left_out_or_refused(path: str) -> None:
    schema, value = NEXT_TO_OTHERS[path]
    assert allows(of(member(schema)), json.dumps({"e": value}))
    place = re.escape(f"/properties/e{path.partition(' ')[0]}")
    with pytest.raises(ValueError, match=f"^{place}: holds a number beyond 2"):
        of(member(schema), strict=True)


def test_integers_beyond_2_53_of_a_definition_next_to_other_keywords_are_left_out_or_refused() -> None:
    one = {"minProperties": 1, "properties": {"n": {"$ref": "#/$defs/N"}}}
    schema = {**member(one), "$defs": {"N": {"const": BEYOND}}}
    assert allows(of(schema), json.dumps({"e": {"n": BEYOND}}))
    with pytest.raises(ValueError, match=r"^/properties/e/properties/n/[$]ref/const: holds a number beyond 2"):
        of(schema, strict=True)


def test_members_named_like_keywords_are_enforced_next_to_other_keywords() -> None:
    members = {"enum": {"type": "integer", "maximum": 5}, "const": {"enum": [1, 2**53]}}
    grammar = of(member({"minProperties": 1, "properties": members, "required": [*members]}), strict=True)
    assert allows(grammar, '{"e":{"enum":5,"const":1}}')
    assert not allows(grammar, '{"e":{"enum":6,"const":1}}')
    assert not allows(grammar, '{"e":{"enum":5,"const":2}}')


@pytest.mark.parametrize("text", ["\\ud83d\\ude00", "caf\\u00e9", "\\/", "\\u0041", "\x7f", "\\u0000", "é😀"])
@pytest.mark.parametrize("format", [JsonObject(), JsonSchema(member({"type": "string"})), JsonSchema(member({}))])
def test_texts_have_the_escapes_of_rfc_8259(text: str, format: JsonObject | JsonSchema) -> None:
    assert allows(write_format(format), f'{{"e": "{text}"}}')


@pytest.mark.parametrize("text", ["\\ud83d", "\\ude00", "\\ud83d\\u0041", "\\x41", "\t", "\\u12"])
def test_texts_that_are_no_text_of_unicode_are_not_allowed(text: str) -> None:
    assert not allows(of(member({"type": "string"})), f'{{"e":"{text}"}}')


def test_literals_and_names_may_be_escaped_as_json_dumps_does() -> None:
    grammar = of({"type": "object", "properties": {"é": {"enum": ["😀"]}}, "required": ["é"]}, strict=True)
    assert allows(grammar, json.dumps({"é": "😀"}))
    assert allows(grammar, json.dumps({"é": "😀"}, ensure_ascii=False))


def test_lengths_count_an_escape_as_one_character() -> None:
    grammar = of(member({"type": "string", "minLength": 1, "maxLength": 2}), strict=True)
    assert allows(grammar, '{"e":"\\ud83d\\ude00a"}')
    assert not allows(grammar, '{"e":"\\ud83d\\ude00ab"}')


# ---- white space


@pytest.mark.parametrize(
    ("text", "bounded", "free"),
    [
        ('{"e":1}', True, True),
        ('{"e": 1}', True, True),
        ('{\n  "e": 1\n}', True, True),
        ('{\r\n\t"e": 1\r\n}', True, True),
        ('{  "e":1}', False, True),
        ('{\n    "e": 1\n}', False, True),
        ('{\n\n"e":1}', False, True),
        ('{"e":1' + " " * 41 + "}", False, False),
    ],
)
@pytest.mark.parametrize("schema", [member({"type": "integer"}), {"allOf": [member({}), {"maxProperties": 1}]}])
def test_white_space_of_json_is_bounded_unless_it_is_set_free(
    text: str, bounded: bool, free: bool, schema: Any
) -> None:
    found = [allows(of(schema, spelling=Spelling(white_space=one)), text) for one in ("bounded", "free")]
    assert found == [bounded, free]


# ---- one part of a schema

UNENFORCEABLE = [
    ({"type": "string", "pattern": "^(?!x)[a-z]+$"}, "/pattern"),
    ({"type": "string", "pattern": "\\bfoo\\b", "maxLength": 9}, "/pattern"),
    ({"type": "string", "pattern": "^(a)\\1$"}, "/pattern"),
    ({"type": "string", "pattern": "^a\\Z"}, "/pattern"),
    ({"type": "string", "pattern": 7}, "/pattern"),
    ({"type": "string", "format": "no-such-format"}, "/format"),
    ({"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308}, "/minimum"),
    ({"type": "string", "minLength": "3"}, "/minLength"),
    ({"type": "string", "not": {"const": "x"}}, "/not"),
    ({"type": None}, "/type"),
    ({"type": "any"}, "/type"),
    ({"type": ["string", "str"]}, "/type"),
    ({"$ref": "https://example.com/x.json"}, "/$ref"),
    ({"$ref": "#/$defs/N"}, "/$ref"),
    ({"$ref": 7}, "/$ref"),
    ({"anyOf": [{"type": "string", "pattern": "(?=a)"}, {"type": "null"}]}, "/anyOf/0/pattern"),
    ({"enum": "ab"}, "/enum"),
    (7, ""),
]


@pytest.mark.parametrize(("part", "path"), UNENFORCEABLE)
def test_part_that_cannot_be_enforced_is_left_out_or_refused_by_its_path(part: Any, path: str) -> None:
    schema = {"type": "object", "properties": {"n": {"const": 5}, "e": part}, "required": ["n", "e"]}
    grammar = of(schema)
    assert allows(grammar, '{"n":5,"e":"foo"}') or allows(grammar, '{"n":5,"e":1}')
    assert not allows(grammar, '{"n":6,"e":"foo"}')
    with pytest.raises(ValueError, match=f"^/properties/e{path.replace('$', '[$]')}: "):
        of(schema, strict=True)
    tool = Tool(name="f", parameters=schema, strict=True)
    with pytest.raises(ValueError, match=f"^tool 'f', /properties/e{path.replace('$', '[$]')}: "):
        of_tools("hermes", tool)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("part", [part for part, _ in UNENFORCEABLE])
def test_tools_of_every_notation_are_served_without_the_part(style: str, part: Any) -> None:
    tool = Tool(name="f", parameters={"type": "object", "properties": {"e": part}})
    assert not LLMatcher(vocabulary(), of_tools(style, tool), log_level=0).is_error()


def test_pattern_of_names_that_is_left_out_forbids_no_name() -> None:
    schema = {"type": "object", "patternProperties": {"^(?!x)": {"type": "integer"}}, "additionalProperties": False}
    assert allows(of(schema), '{"a": "b"}')
    with pytest.raises(ValueError, match=r"^/patternProperties/\^\(\?!x\): "):
        of(schema, strict=True)


def test_other_keywords_of_a_text_are_kept_next_to_its_pattern() -> None:
    grammar = of(member({"type": "string", "pattern": "^(?!x)", "maxLength": 2}))
    assert (allows(grammar, '{"e":"ab"}'), allows(grammar, '{"e":"abc"}')) == (True, False)


@pytest.mark.parametrize("reference", ["#/$defs/X", "/$defs/X", "https://a.example/s.json#/$defs/X", "#x", "x.json"])
def test_references_into_the_schema_are_found_however_they_are_written(reference: str) -> None:
    definition = {"$anchor": "x", "$id": "x.json", "type": "integer"}
    schema = {"$id": "https://a.example/s.json", **member({"$ref": reference}), "$defs": {"X": definition}}
    grammar = of(schema, strict=True)
    assert (allows(grammar, '{"e":1}'), allows(grammar, '{"e":"a"}')) == (True, False)


def test_references_may_be_escaped_and_recursive() -> None:
    node = {"type": "object", "properties": {"x": {"$ref": "#/$defs/a~1b%20c"}}, "additionalProperties": False}
    grammar = of({"$ref": "#/$defs/a~1b%20c", "$defs": {"a/b c": node}}, strict=True)
    assert (allows(grammar, '{"x":{"x":{}}}'), allows(grammar, '{"x":{"x":1}}')) == (True, False)


@pytest.mark.parametrize(
    ("names", "right", "wrong"),
    [
        ({"type": "string"}, {"any": 1}, {"any": "text"}),
        ({"type": "string", "enum": ["a", "b"]}, {"b": 1}, {"c": 1}),
        ({"pattern": "^[a-z]+$"}, {"ab": 1}, {"A": 1}),
        ({"minLength": 2, "maxLength": 3}, {"abc": 1}, {"a": 1}),
        ({"$ref": "#/$defs/N"}, {"n": 1}, {"m": 1}),
    ],
)
def test_property_names_are_enforced_under_strict(names: Any, right: Any, wrong: Any) -> None:
    """zod 4 writes a record as `propertyNames` and `additionalProperties`."""
    schema = {"type": "object", "propertyNames": names, "additionalProperties": {"type": "integer"}}
    grammar = of({**schema, "$defs": {"N": {"const": "n"}}}, strict=True)
    assert (allows(grammar, json.dumps(right)), allows(grammar, json.dumps(wrong))) == (True, False)


def test_property_names_that_have_no_other_words_are_left_out_or_refused() -> None:
    schema = {**member({"type": "integer"}), "propertyNames": {"pattern": "^e"}}
    assert allows(of(schema), '{"e":1}')
    with pytest.raises(ValueError, match=r"^/propertyNames: "):
        of(schema, strict=True)


def test_schema_that_is_too_deep_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(120):
        schema = member(schema)
    with pytest.raises(ValueError, match="at most 100 levels"):
        of(schema)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}, 4, 6),
        ({"type": "array", "prefixItems": [{"const": 1}], "items": {"type": "string"}}, [1, "a"], [2]),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3}, [1, 2], [1]),
        ({"type": "array", "items": {"type": "integer"}, "maxItems": 1}, [1], [1, 2]),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 1}, [1], []),
        ({"type": "array", "items": {"type": "integer"}, "maxItems": 0}, [], [1]),
        ({"type": "object", "minProperties": 1, "additionalProperties": {"type": "null"}}, {"a": None}, {}),
        (
            {"type": "object", "patternProperties": {"^n": {"const": 1}}, "additionalProperties": False},
            {"n": 1},
            {"m": 1},
        ),
        ({"anyOf": [{"type": "string"}, {"type": "null"}], "type": ["string", "null"]}, None, 1),
        ({"enum": ["a", 1, None], "type": ["string", "null"]}, None, 1),
        ({"type": "string", "pattern": "^[A-Z]{2}$"}, "AB", "ab"),
        ({"enum": [{"k": [1, 2]}, [True]]}, {"k": [1, 2]}, {"k": [1]}),
    ],
)
def test_keywords_are_enforced(schema: Any, right: Any, wrong: Any, strict: bool) -> None:
    grammar = of(member(schema), strict=strict)
    assert (allows(grammar, json.dumps({"e": right})), allows(grammar, json.dumps({"e": wrong}))) == (True, False)


def test_type_of_a_value_is_followed_through_references_and_alternatives() -> None:
    root = {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}, {"type": "null"}]}, "b": {"enum": ["x", 2]}}}
    assert kinds({"$ref": "#/$defs/a"}, References(root)) == {"string", "number", "null"}
    assert kinds({"$ref": "#/$defs/none"}, References(root)) == kinds({}, References(root))


# ---- texts of tokens


def test_literal_with_the_text_of_a_token_is_not_forced_as_that_token() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<tool_call>"])
    setup = TrialSetup(tokenizer=tokenizer.backend_tokenizer.to_str(), vocab_size=len(tokenizer), eos_token_ids=(256,))
    spelling = setup.spelling()
    assert {"<tool_call>", "<|eos|>"} <= set(spelling.tokens)
    vocabulary = LLTokenizer(setup.tokenizer, n_vocab=len(tokenizer), eos_token=256)
    for text in ("<tool_call>", "a<|eos|>b"):
        grammar = of(member({"enum": [text]}), strict=True, spelling=spelling)
        for written in (text, text.replace("<", "\\u003c")):
            matcher = LLMatcher(vocabulary, grammar, log_level=0)
            for byte in f'{{"e":"{written}"}}'.encode():
                allowed = matcher.compute_bitmask()
                token = tokenizer.convert_tokens_to_ids(_BYTES[byte])
                assert allowed[token // 8] >> token % 8 & 1, written
                assert matcher.consume_token(token)
            assert matcher.is_accepting()


def test_choice_with_the_text_of_a_token_is_refused() -> None:
    with pytest.raises(ValueError, match="the choice 'a<s>' has the text of a token"):
        write_format(Choice(["b", "a<s>"]), Spelling(tokens=("<s>",)))


# ---- calls


@pytest.mark.parametrize("style", STYLES)
def test_call_that_a_text_begins_is_held_to_its_grammar(style: str) -> None:
    """If the mark of a call is not a separate token, a text that contains it is still a call."""
    chosen = STYLES[style]
    tool = Tool(name="f", parameters={"type": "object", "properties": {}, "additionalProperties": False})
    grammar = of_tools(style, tool, required=False)
    begin = chosen.begin or f" \n\x1c {chosen.first}"
    assert allows(grammar, "A text, and no call <")
    assert allows(grammar, "")
    assert not allows(grammar, f'{begin}{{"city": "Paris"')
    assert not allows(grammar, begin)


@pytest.mark.parametrize("style", ["pythonic", "qwen3_coder", "functiongemma", "gemma4"])
def test_tool_without_properties_takes_any_object(style: str) -> None:
    written = {
        "pythonic": "[f(city='Paris', days=[3])]",
        "qwen3_coder": "<tool_call><function=f><parameter=city>\nParis\n</parameter><parameter=days>\n[3]\n</parameter>"
        "</function></tool_call>",
        "functiongemma": "<start_function_call>call:f{city:<escape>Paris<escape>,days:[3]}<end_function_call>",
        "gemma4": '<|tool_call>call:f{city:<|"|>Paris<|"|>,days:[3]}<tool_call|>',
    }[style]
    tool = Tool(name="f", parameters={"type": "object"})
    assert allows(of_tools(style, tool), written)
    scanner = scanner_of(STYLES[style], ToolUse(tools=(tool,)))
    (call,) = scanner.push(written)
    assert json.loads(call.arguments) == {"city": "Paris", "days": [3]}


@pytest.mark.parametrize("style", STYLES)
def test_tool_that_cannot_be_compiled_takes_any_object_unless_it_is_strict(style: str) -> None:
    schema = {"type": "object", "properties": {"e": {"const": 5}}, "required": ["e"]}
    tools = (Tool(name="f", parameters=schema), Tool(name="g", parameters=schema, strict=True))
    job = TrialJob(tools=ToolGrammar(use=ToolUse(tools=tools, is_required=True), style=STYLES[style], special={}))
    assert job.loosened(lambda _: False) == job
    found = job.loosened()
    assert found.tools is not None
    loose, strict = found.tools.use.tools
    assert (loose.parameters, strict) == ({"properties": {"e": {"type": ["number"]}}}, tools[1])
    assert not LLMatcher(vocabulary(), found.write(Spelling()), log_level=0).is_error()


@pytest.mark.parametrize(
    "never", [{"allOf": [{"type": "string"}, {"type": "integer"}]}, {"type": "integer", "const": "a"}]
)
def test_contradiction_within_a_tool_leaves_the_request_whole(never: Any) -> None:
    tool = Tool(name="f", parameters={"type": "object", "properties": {"e": never, "n": {"type": "null"}}})
    assert allows(of_tools("hermes", tool), '<tool_call>{"name": "f", "arguments": {"n": null}}</tool_call>')


@pytest.mark.parametrize("style", STYLES)
def test_chunk_has_one_entry_for_each_call(style: str) -> None:
    """Clients add up by index: two entries of one index in a chunk overwrite each other."""
    chosen = STYLES[style]
    use = ToolUse(tools=(Tool(name="f"),))
    calls = {
        "json": f'{{"name": "f", "{chosen.arguments}": {{"a": 1}}}}',
        "bare": 'f[ARGS]{"a": 1}',
        "python": "f(a=1)",
        "xml": "<function=f><parameter=a>\n1\n</parameter></function>",
        "gemma": "call:f{a:1}",
    }
    text = chosen.begin + chosen.opening + chosen.separator.join([calls[chosen.notation]] * 2) + chosen.closing
    for cut in range(len(text)):
        scanner = scanner_of(chosen, use)
        chunks = [scanner.push(text[:cut]), scanner.push(text[cut:])]
        assert all(len({one.index for one in chunk}) == len(chunk) for chunk in chunks)
        whole = join_calls(one for chunk in chunks for one in chunk)
        assert [(one.name, json.loads(one.arguments)) for one in whole] == [("f", {"a": 1})] * 2


def test_entries_of_one_call_are_joined_in_the_order_of_calls() -> None:
    first = CallDelta(index=0, id="a", name="f", arguments='{"a"')
    news = join_calls([first, CallDelta(index=1, name="g"), CallDelta(index=0, arguments=": 1}")])
    assert [(one.index, one.id, one.name, one.arguments) for one in news] == [
        (0, "a", "f", '{"a": 1}'),
        (1, None, "g", ""),
    ]


UNWRITABLE = [
    ("gemma4", member({"const": '<|"|>'}), "/properties/e/const"),
    ("functiongemma", member({"enum": ["a<escape>"]}), "/properties/e/enum"),
    ("qwen3_coder", member({"const": "a\n</parameter>b"}), "/properties/e"),
    ("pythonic", {"properties": {"a=[": {}}, "required": ["a=["]}, "/properties/a=["),
    ("gemma4", {"properties": {" a": {}}, "required": [" a"]}, "/properties/ a"),
    ("qwen3_coder", {"properties": {"a>\nb": {}}, "required": ["a>\nb"]}, "/properties/a>\nb"),
]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("style", "parameters", "path"), UNWRITABLE)
def test_what_a_notation_cannot_write_is_refused(style: str, parameters: Any, path: str, strict: bool) -> None:
    with pytest.raises(ValueError, match="cannot be written in") as refused:
        of_tools(style, Tool(name="f", parameters=parameters, strict=strict))
    assert str(refused.value).startswith(f"tool 'f', {path}")


def test_names_that_a_reader_must_know_are_those_that_are_no_plain_keys() -> None:
    schema = {"properties": {"a b": {"properties": {"c:d": {}}}, "e": {"const": {"f,g": 1}}}}
    assert set(special_names(schema)) == {"a b", "c:d", "f,g"}


@pytest.mark.parametrize(
    ("schema", "content", "value"),
    [
        ({"type": "string"}, "12", "12"),
        ({"enum": ["12", "true"]}, "true", "true"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, '"null"', "null"),
        ({"type": ["string", "null"]}, "12", "12"),
        ({"type": ["string", "null"], "enum": ["null"]}, "null", "null"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "12 apples", "12 apples"),
        ({}, "[1]", [1]),
        ({}, '"[1]"', "[1]"),
    ],
)
def test_argument_in_xml_is_a_text_as_it_is_unless_its_schema_allows_what_it_looks_like(
    schema: Any, content: str, value: Any
) -> None:
    tool = Tool(name="f", parameters=member(schema))
    written = f"<tool_call><function=f><parameter=e>\n{content}\n</parameter></function></tool_call>"
    assert allows(of_tools("qwen3_coder", tool), written)
    (call,) = scanner_of(STYLES["qwen3_coder"], ToolUse(tools=(tool,))).push(written)
    assert json.loads(call.arguments) == {"e": value}


def test_mark_that_is_a_token_cannot_be_spelled_in_a_text() -> None:
    """A reader sees the text of tokens, and takes it for a call."""
    use = ToolUse(tools=(Tool(name="f"),))
    grammar = to_grammar(write_tools(use, STYLES["hermes"], {"<tool_call>": 257}))
    assert allows(grammar, "so <tool_call")
    assert not allows(grammar, "so <tool_call>")
