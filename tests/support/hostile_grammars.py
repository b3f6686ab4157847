"""200 schemas, expressions and grammars that mean harm: each is refused by name, or followed within bounds.

`python tests/support/hostile_grammars.py` prints what becomes of each, with its processor time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from loramux.constraints.formats import AnswerFormat, Choice, Grammar, JsonSchema, Regex


def nested(depth: int, leaf: dict[str, Any]) -> dict[str, Any]:
    for _ in range(depth):
        leaf = {"type": "object", "properties": {"a": leaf}, "required": ["a"], "additionalProperties": False}
    return leaf


def deep_text(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


def ring(size: int) -> dict[str, Any]:
    definitions = {f"d{i}": {"$ref": f"#/$defs/d{(i + 1) % size}"} for i in range(size)}
    return {"$ref": "#/$defs/d0", "$defs": definitions}


def tree(width: int) -> dict[str, Any]:
    """Every node has many children, each of the whole kind again."""
    node = {"type": "object", "properties": {f"c{i}": {"$ref": "#/$defs/n"} for i in range(width)}}
    return {"$ref": "#/$defs/n", "$defs": {"n": node}}


def rules(count: int, fan: int) -> str:
    body = [f"r{i}: " + " | ".join(f'"{j}" r{(i * fan + j + 1) % count}' for j in range(fan)) for i in range(count)]
    return "\n".join(["start: r0", *body, 'r0x: "x"'])


def schemas() -> Iterator[tuple[str, Any]]:
    for depth in (50, 100, 120, 127):
        yield f"nested objects {depth}", nested(depth, {"type": "string"})
    for depth in (200, 2000, 20_000):
        yield f"deep text {depth}", deep_text(depth)
    for count in (1000, 5000, 9000):
        yield f"enum {count}", {"enum": [f"value {i * 7919 % 100_003}" for i in range(count)]}
        yield f"enum of numbers {count}", {"enum": list(range(count))}
        yield f"properties {count // 10}", {"type": "object", "properties": {f"p{i}": {} for i in range(count // 10)}}
        yield (
            f"required {count // 10}",
            {
                "type": "object",
                "properties": {f"p{i}": {"type": "string"} for i in range(count // 10)},
                "required": [f"p{i}" for i in range(count // 10)],
            },
        )
    yield "properties 4000", {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(4000)}}
    for size in (1, 2, 100, 2000):
        yield f"ring of references {size}", ring(size)
    for width in (2, 50, 1000):
        yield f"tree of references {width}", tree(width)
    for target in (
        "http://169.254.169.254/",
        "https://example.com/s.json",
        "file:///etc/passwd",
        "#/nowhere",
        "other#/a",
    ):
        yield f"reference {target}", {"$ref": target}
    for length in (1000, 100_000, 10_000_000, 2**31, 2**63):
        yield f"minLength {length}", {"type": "string", "minLength": length}
        yield f"maxLength {length}", {"type": "string", "maxLength": length}
        yield f"minItems {length}", {"type": "array", "items": {"type": "integer"}, "minItems": length}
        yield f"maxItems {length}", {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": length}
        yield f"minProperties {length}", {"type": "object", "minProperties": length}
    for pattern in (
        "(a|a)*b",
        "(x+x+)+y",
        "^(([a-z])+.)+[A-Z]([a-z])+$",
        "(.*){50}",
        "[ab]*a[ab]{25}",
        "(?=a)b",
        r"(a)\1",
    ):
        yield f"pattern {pattern}", {"type": "string", "pattern": pattern}
        yield (
            f"two patterns {pattern}",
            {
                "type": "object",
                "patternProperties": {pattern: {"type": "integer"}, f".*{pattern}": {"type": "string"}},
            },
        )
    yield "1,000 patterns", {"type": "object", "patternProperties": {f"^.*{i}.*$": {} for i in range(1000)}}
    for number in (1e-300, 7919, 999_999_937, 1e300):
        yield f"multipleOf {number}", {"type": "integer", "multipleOf": number}
        yield f"range {number}", {"type": "number", "minimum": -number, "maximum": number, "multipleOf": 0.0001}
    for word in ("anyOf", "oneOf", "allOf"):
        for count in (50, 2000):
            parts = [{"type": "object", "properties": {f"p{i}": {"const": i}}} for i in range(count)]
            yield f"{word} {count}", {word: parts}
        product = [{word: [{"properties": {f"p{i}": {"const": j}}} for j in range(9)]} for i in range(9)]
        yield f"product of {word}", {"allOf": product}
        yield f"itself in {word}", {word: [{"$ref": "#"}, {"type": "null"}]}
    for word in ("not", "if", "dependentSchemas", "unevaluatedItems", "contains", "propertyNames"):
        yield f"keyword {word}", {"type": "object", word: {"type": "string"}}
    yield "options", {"type": "object", "x-guidance": {"whitespace_pattern": "(.*){1000}", "lenient": True}}
    yield "no schema", 7
    yield "types", {"type": ["object", "array", "string", "colour"]}


def expressions() -> Iterator[tuple[str, str]]:
    for repeat in (1000, 100_000, 2**31):
        for unit in ("a", ".", "[^x]", "(ab|cd)", r"\p{L}"):
            yield f"{unit} repeated {repeat}", f"{unit}{{{repeat}}}"
    yield "nested repeats", "((((a{1,50}){1,50}){1,50}){1,50}){1,50}"
    yield "nested stars", "(((((a*)*)*)*)*)*b"
    yield "dots", ".*" * 300
    yield "counted dots", "(.{0,1000}){0,1000}"
    yield "product", "(.*a.{20}){30}"
    yield "parentheses", "(" * 9000 + "a" + ")" * 9000
    yield "alternatives", "|".join(f"(.*{i}.*)" for i in range(300))
    yield "classes", "".join(rf"\p{{{name}}}{{1,200}}" for name in ("L", "Han", "Greek", "Cyrillic", "Arabic"))
    yield "classes without", r"[^\p{Han}\p{L}]{5000}"
    yield "bytes", r"(?-u:\xff)+"
    yield "unbalanced", "((("
    yield "look-behind", "(?<!a)b"
    yield "backreference", r"(\w+) \1"
    yield "empty class", "[^\\s\\S]"
    yield "nothing", ""


def grammars() -> Iterator[tuple[str, str]]:
    for count, fan in ((50, 3), (1000, 2), (5000, 1), (3000, 5)):
        yield f"rules {count} x {fan}", rules(count, fan)
    yield (
        "alternatives of rules",
        "start: "
        + " | ".join(f"r{i}" for i in range(5000))
        + "\n"
        + "\n".join(f'r{i}: "x{i}" r{(i + 1) % 5000}' for i in range(5000)),
    )
    yield "itself", "start: start"
    yield "itself or nothing", 'start: start start | ""'
    yield "ambiguous", 'start: s\ns: s s | s s s | "a" | ""'
    yield "very ambiguous", 'start: e\ne: e e e | e e | "a" | "b" e "c" | ""'
    yield "left and right", 'start: start "a" start | "b"'
    yield "repeated rules", 'start: ("a" | "b"){1,3000} /x+/{2000}'
    yield "repeated literal", 'start: "a"{1,1000000}'
    yield "repeats of repeats", 'start: (("a"{1,100}){1,100}){1,100}'
    yield "parentheses", "start: " + "(" * 20_000 + '"a"' + ")" * 20_000
    yield "intersection", "start: A\nA: /.*a.{30}/ & /.*b.{30}/ & /.*c.{30}/ & ~/.*d.{30}/"
    yield "schemas in a loop", 'start: %json {"type":"object"} start | ""'
    yield "a thousand schemas", "start: " + " ".join('%json {"type":"object"}' for _ in range(1000))
    yield "a long literal", f'start: "{"x" * 200_000}"'
    yield "not a grammar", "}{ \x00 start"
    yield "GBNF in a loop", "root ::= root root | root"
    yield "GBNF parentheses", "root ::= " + "(" * 9000 + '"a"' + ")" * 9000
    yield "import", 'start: NUMBER\n%import common.NUMBER\n%include "/etc/passwd"'
    yield "other tokens", "start: <[99999999]> | <|no_such_token|>"


def choices() -> Iterator[tuple[str, list[str]]]:
    yield "many", [f"choice {i * 7919 % 100_003}" for i in range(9999)]
    yield "long", ["x" * 100_000, "y" * 100_000]
    yield "prefixes", ["a" * i for i in range(1, 600)]
    yield "quotes", ['"', "\\", '\\"', "/", "\n", "\x00", "%json {}", "<|eos|>"]
    yield "empty", [""]


def corpus() -> list[tuple[str, AnswerFormat]]:
    made: list[tuple[str, AnswerFormat]] = []
    made += [(f"schema: {name}", JsonSchema(schema)) for name, schema in schemas()]
    made += [(f"regex: {name}", Regex(pattern)) for name, pattern in expressions()]
    made += [(f"grammar: {name}", Grammar(text)) for name, text in grammars()]
    made += [(f"choice: {name}", Choice(texts)) for name, texts in choices()]
    lenient = [(f"not strict: {name}", JsonSchema(schema, strict=False)) for name, schema in schemas()]
    return (made + lenient)[:200]


def main() -> None:
    import time

    import msgspec
    from tiny_base import byte_tokenizer

    from loramux.common.sandbox.sandbox import Sandbox, SandboxError
    from loramux.constraints.grammars import TrialJob, TrialResult, TrialSetup
    from loramux.serving.formats import TRIAL_LIMITS

    tokenizer = byte_tokenizer().backend_tokenizer.to_str()
    setup = TrialSetup(tokenizer=tokenizer, vocab_size=260, eos_token_ids=(256,))
    sandbox = Sandbox("loramux.constraints.grammars", msgspec.json.encode(setup))
    for name, format in corpus():
        began = time.perf_counter()
        try:
            done = sandbox.run(msgspec.json.encode(TrialJob(format=format)), TRIAL_LIMITS)
            result = msgspec.json.decode(done.value, type=TrialResult)
            outcome, used = result.refusal or "accepted", done.usage.cpu_seconds
        except SandboxError as error:
            outcome, used = f"ended: {error!r}", TRIAL_LIMITS.cpu_seconds
        print(f"{time.perf_counter() - began:7.3f} s {used:6.3f} cpu  {name:45} {outcome[:90]}")
    sandbox.close()


if __name__ == "__main__":
    main()
