"""Reduce JSON schemas to the parts that grammars can enforce: resolve references, and leave out other parts, which are
named by their path.

Every part of a schema is tried separately, so that a failing part removes only itself: a pattern with a look-ahead, a
bound that a double cannot hold, a reference to nothing. A strict schema is refused instead, with the path of the part.

`References` and `kinds` only look at the schema and compile nothing. The writer of a grammar and the reader of an
answer both use them to decide the form of a value, and therefore agree.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

from llguidance import LLMatcher

Schema = dict[str, Any] | bool
Path = tuple[str, ...]

KINDS = frozenset({"string", "number", "boolean", "null", "object", "array"})
"""Types of JSON values; an integer counts as a number."""
EXACT = 1 << 53
"""Largest integer up to which every integer is exact as a double; llguidance's bounds are doubles."""
MAX_DEPTH = 100
"""Maximum number of levels of a schema."""
MAX_PARTS = 50_000
"""Maximum number of schemas within a schema."""

OF_NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
OF_TEXTS = frozenset({"minLength", "maxLength", "pattern", "format"})
OF_LISTS = frozenset({"items", "prefixItems", "additionalItems", "minItems", "maxItems"})
OF_OBJECTS = frozenset(
    {"properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties"}
)
OF_ANY = frozenset({"type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref"})
UNENFORCED = frozenset(
    {"not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems"}
    | {"dependencies", "dependentRequired", "dependentSchemas", "unevaluatedProperties", "unevaluatedItems"}
    | {"$dynamicRef", "$recursiveRef"}
)
"""Keywords that constrain a value and that no grammar here can enforce. Any name outside the known keywords is
ignored.
"""
TRIED = OF_NUMBERS | OF_TEXTS | {"minItems", "maxItems", "minProperties", "maxProperties", "type"}
"""Keywords that contain no schemas and that llguidance may refuse because of their value."""

_LISTS, _MAPS, _ONES = ("anyOf", "oneOf", "allOf", "prefixItems"), ("properties", "patternProperties"), ("items",)
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")


def _is_type(value: Any) -> bool:
    kinds = value if isinstance(value, list) else [value]
    return bool(kinds) and all(isinstance(kind, str) and kind in KINDS | {"integer"} for kind in kinds)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= EXACT


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31


_SHAPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "type": (_is_type, "is no type of JSON"),
    "enum": (lambda value: isinstance(value, list) and bool(value), "is no list of values"),
    "required": (
        lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
        "is no list of names",
    ),
    "pattern": (lambda value: isinstance(value, str), "is no text"),
    "format": (lambda value: isinstance(value, str), "is no text"),
    **{name: (_is_count, "is no count") for name in _COUNTS},
    **{name: (_is_number, "is no number that can be held exactly (up to 2^53)") for name in OF_NUMBERS},
    **{name: (lambda value: isinstance(value, dict), "is no object of schemas") for name in _MAPS},
    **{name: (lambda value: isinstance(value, list) and bool(value), "is no list of schemas") for name in _LISTS},
    "items": (lambda value: isinstance(value, dict | bool | list), "is no schema"),
    "additionalItems": (lambda value: isinstance(value, dict | bool), "is no schema"),
    "additionalProperties": (lambda value: isinstance(value, dict | bool), "is no schema"),
}
"""Check of each keyword's value, and the message for a value that fails it."""


def has_shape(keyword: str, value: Any) -> bool:
    """Return whether the value of a keyword has the form that it must have."""
    return keyword not in _SHAPES or _SHAPES[keyword][0](value)


def fault(grammar: str) -> str | None:
    """Return the reason why llguidance cannot compile a grammar; None if it can compile it."""
    error = LLMatcher.validate_grammar(grammar)
    return None if not error or error.startswith("WARNING") else gist(error)


def gist(error: str) -> str:
    """Return the useful part of llguidance's error: its first line, and also the last line if it concerns a regular
    expression.
    """
    lines = [line.strip() for line in error.partition("<non-verbose/>")[0].strip().splitlines()]
    if not lines or lines[0] in ("NoExtension", "NoExtensionBias"):
        return "no answer satisfies it"
    first = lines[0].partition("failed to compile JSON schema: ")[2] or lines[0]
    details = [line.removeprefix("error: ") for line in lines[1:] if line.startswith("error: ")]
    return " ".join([first, *details])[:300]


def json_fault(schema: dict[str, Any]) -> str | None:
    """Return the reason why llguidance cannot enforce a schema; None if it can."""
    return fault(LLMatcher.grammar_from_json_schema(json.dumps(schema)))


class References:
    """The parts of a schema that its references name."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._named: dict[str, Any] | None = None

    def find(self, reference: Any) -> Any | None:
        """Return the part that `reference` names; None if this schema has no such part.

        `/$defs/X` is read as `#/$defs/X`, because some clients write it so.
        """
        if not isinstance(reference, str):
            return None
        own = self._root.get("$id") if isinstance(self._root, dict) else None
        if isinstance(own, str) and own and reference.startswith(own.removesuffix("#")):
            reference = "#" + reference.removeprefix(own.removesuffix("#")).removeprefix("#")
        if reference in ("#", "#/"):
            return self._root
        if reference.startswith(("#/", "/")):
            return self._at(reference.removeprefix("#").split("/")[1:])
        if self._named is None:
            self._named = dict(_names(self._root, MAX_DEPTH))
        return self._named.get(reference)

    def _at(self, steps: list[str]) -> Any | None:
        found = self._root
        for step in steps:
            name = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(found, list):
                found = found[int(name)] if name.isdecimal() and int(name) < len(found) else None
            else:
                found = found.get(name) if isinstance(found, dict) else None
        return found if isinstance(found, dict | bool) else None


def _names(part: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield each part of a schema that has an `$anchor` or an `$id`, with the reference that names it."""
    if depth and isinstance(part, dict):
        if isinstance(part.get("$anchor"), str):
            yield f"#{part['$anchor']}", part
        if isinstance(part.get("$id"), str):
            yield part["$id"], part
    if depth and isinstance(part, dict | list):
        for inner in part.values() if isinstance(part, dict) else part:
            yield from _names(inner, depth - 1)


def kind_of(value: Any) -> str:
    """Return the type of a JSON value."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list() | tuple():
            return "array"
        case _:
            return "object"


def is_of(value: Any, types: Any) -> bool:
    """Return whether a JSON value has one of `types`, which is the `type` of a schema."""
    names = types if isinstance(types, list) else [types]
    if "integer" in names and kind_of(value) == "number" and (isinstance(value, int) or value.is_integer()):
        return True
    return kind_of(value) in names


def kinds(schema: Any, references: References, seen: frozenset[int] = frozenset()) -> frozenset[str]:
    """Return the types that values of a schema may have. The result may contain types that the schema forbids, but it
    contains all types that the schema allows.
    """
    if not isinstance(schema, dict) or id(schema) in seen or len(seen) > MAX_DEPTH:
        return KINDS
    seen |= {id(schema)}
    found = KINDS
    if has_shape("type", schema.get("type")):
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        found &= {"number" if kind == "integer" else kind for kind in types}
    if "const" in schema:
        found &= {kind_of(schema["const"])}
    if has_shape("enum", schema.get("enum")):
        found &= {kind_of(value) for value in schema["enum"]}
    if (target := references.find(schema.get("$ref"))) is not None:
        found &= kinds(target, references, seen)
    for keyword in ("anyOf", "oneOf"):
        if has_shape(keyword, schema.get(keyword)):
            found &= frozenset().union(*(kinds(one, references, seen) for one in schema[keyword]))
    for one in schema["allOf"] if has_shape("allOf", schema.get("allOf")) else ():
        found &= kinds(one, references, seen)
    return found


class SchemaFault(ValueError):
    """A part of a schema that cannot be enforced or written."""

    def __init__(self, path: Path, reason: str) -> None:
        place = "/" + "/".join(step.replace("~", "~0").replace("/", "~1") for step in path)
        super().__init__(f"{place[:300]}: {reason}")


class Sieve:
    """Makes a schema that contains only parts that llguidance can hold, and only references into its own `$defs`."""

    def __init__(self, root: Any, *, strict: bool) -> None:
        self._references = References(root)
        self._strict = strict
        self._num_parts = 0
        self._names: dict[int, str] = {}
        """Names of the parts that are referred to, by the `id` of each part."""
        self.places: dict[str, Path] = {}
        """The first reference to each definition."""
        self._pending: list[tuple[str, Any]] = []
        self._exclusive: list[tuple[Path, list[Schema]]] = []
        """Alternatives of which a value may match only one."""

    def sift(self, root: Any) -> tuple[Schema, dict[str, Schema]]:
        """Return the schema without the parts that cannot be enforced, and its definitions. Raises SchemaFault."""
        schema = self._part(root, ())
        definitions: dict[str, Schema] = {}
        while self._pending:
            name, part = self._pending.pop()
            definitions[name] = self._part(part, self.places[name])
        for path, branches in self._exclusive if self._strict else ():
            if (reason := json_fault({"oneOf": branches, "$defs": definitions})) is not None:
                raise SchemaFault(path, reason)
        return schema, definitions

    def _leave_out(self, path: Path, reason: str) -> None:
        if self._strict:
            raise SchemaFault(path, reason)

    def _part(self, schema: Any, path: Path) -> Schema:
        self._num_parts += 1
        if len(path) > 2 * MAX_DEPTH or self._num_parts > MAX_PARTS:
            raise SchemaFault(path[:4], f"a schema has at most {MAX_DEPTH} levels and {MAX_PARTS} parts")
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            self._leave_out(path, "is no schema")
            return True
        found: dict[str, Any] = {}
        for keyword, value in self._shaped(schema, path).items():
            self._take(keyword, value, (*path, keyword), found)
        return self._tried(found, path)

    def _shaped(self, schema: dict[str, Any], path: Path) -> dict[str, Any]:
        """Return the keywords that constrain a value, without those whose value is malformed."""
        shaped = {}
        for keyword, value in schema.items():
            here = (*path, keyword)
            if keyword in UNENFORCED:
                if value is not (keyword.startswith("unevaluated")) and not (keyword == "uniqueItems" and not value):
                    self._leave_out(here, "cannot be enforced")
            elif not has_shape(keyword, value):
                self._leave_out(here, f"{json.dumps(value)[:80]} {_SHAPES[keyword][1]}")
            elif keyword in OF_ANY | OF_NUMBERS | OF_TEXTS | OF_LISTS | OF_OBJECTS:
                shaped[keyword] = value
        if "propertyNames" in schema:
            self._name_properties(schema["propertyNames"], shaped, (*path, "propertyNames"))
        return shaped

    def _name_properties(self, names: Any, shaped: dict[str, Any], path: Path) -> None:
        """Express `propertyNames` by other keywords, if that is possible."""
        if isinstance(names, dict) and (target := self._references.find(names.get("$ref"))) is not None:
            names = target
        says = {key: names[key] for key in names if key in OF_ANY | OF_TEXTS} if isinstance(names, dict) else {}
        if names is True or (isinstance(names, dict) and not says.keys() - {"type"} and says.get("type") != "null"):
            return
        is_alone = not shaped.keys() & {"properties", "patternProperties"}
        others = shaped.get("additionalProperties", True)
        texts = [says["const"]] if "const" in says else says.get("enum")
        if is_alone and isinstance(texts, list) and says.keys() <= {"type", "enum", "const"}:
            shaped |= {"properties": {text: others for text in texts if isinstance(text, str)}}
        elif is_alone and says.keys() <= {"type", "pattern"} and isinstance(says.get("pattern"), str):
            shaped |= {"patternProperties": {says["pattern"]: others}}
        elif is_alone and says.keys() <= {"type", "minLength", "maxLength"}:
            least, most = says.get("minLength", 0), says.get("maxLength", "")
            shaped |= {"patternProperties": {f"^[\\s\\S]{{{least},{most}}}$": others}}
        else:
            self._leave_out(path, "cannot be enforced")
            return
        shaped["additionalProperties"] = False

    def _take(self, keyword: str, value: Any, path: Path, found: dict[str, Any]) -> None:
        """Add a keyword to `found`, with the schemas in it."""
        if keyword == "$ref":
            if (target := self._references.find(value)) is None:
                self._leave_out(path, f"'{str(value)[:80]}' is no part of this schema")
            else:
                found[keyword] = f"#/$defs/{self._name(target, path)}"
        elif keyword in _LISTS or (keyword == "items" and isinstance(value, list)):
            parts = [self._part(one, (*path, str(place))) for place, one in enumerate(value)]
            if keyword == "oneOf":
                self._exclusive.append((path, parts))
                parts = [{"anyOf": parts}]
            keyword = "allOf" if keyword == "oneOf" else keyword
            found[keyword] = [*found.get(keyword, ()), *parts]
        elif keyword == "patternProperties":
            self._take_patterns(value, path, found)
        elif keyword == "properties":
            found[keyword] = {name: self._part(one, (*path, name)) for name, one in value.items()}
        elif keyword in ("items", "additionalItems", "additionalProperties"):
            found.setdefault(keyword, self._part(value, path))
        else:
            found[keyword] = value

    def _take_patterns(self, value: dict[str, Any], path: Path, found: dict[str, Any]) -> None:
        kept = {}
        for pattern, one in value.items():
            if (reason := json_fault({"patternProperties": {pattern: True}})) is None:
                kept[pattern] = self._part(one, (*path, pattern))
            else:
                self._leave_out((*path, pattern), reason)
        found |= {"patternProperties": kept} if kept else {}
        if len(kept) < len(value):
            found["additionalProperties"] = True  # the omitted pattern may allow any of these types

    def _name(self, target: Any, path: Path) -> str:
        if isinstance(target, bool):
            return self._names.get(target) or self._new(target, target, path)
        return self._names.get(id(target)) or self._new(id(target), target, path)

    def _new(self, key: int, target: Any, path: Path) -> str:
        name = self._names[key] = str(len(self._names))
        self.places[name] = path
        self._pending.append((name, target))
        return name

    def _tried(self, schema: dict[str, Any], path: Path) -> dict[str, Any]:
        """Return the schema with the keywords that llguidance accepts. If it refuses all of them together, try each
        separately.
        """
        own = {keyword: schema[keyword] for keyword in schema if keyword in TRIED}
        if own.keys() <= {"type"} or json_fault(own) is None:
            return schema
        kept: dict[str, Any] = {}
        for keyword in sorted(own, key=lambda name: name != "type"):
            if (reason := json_fault(kept | {keyword: own[keyword]})) is None:
                kept[keyword] = own[keyword]
            else:
                self._leave_out((*path, keyword), reason)
        return {keyword: schema[keyword] for keyword in schema if keyword in kept or keyword not in own}


_REFERENCE = re.compile(r"#/\$defs/(\d+)")


def references_in(part: Any) -> Iterator[str]:
    """Yield the names of the definitions that a sifted schema refers to."""
    if isinstance(part, dict):
        if isinstance(part.get("$ref"), str) and (match := _REFERENCE.fullmatch(part["$ref"])):
            yield match[1]
        for inner in part.values():
            yield from references_in(inner)
    elif isinstance(part, list):
        for inner in part:
            yield from references_in(inner)
