"""Generate the reference pages from the code: `python tools/reference.py docs`.

docs/settings.md comes from the settings' types and docstrings, docs/metrics.md from `metrics.FAMILIES`, and tables in
docs/models.md from `loramux_adapters.families` and `loramux.common.sampling`. The table of clients in
docs/compatibility.md comes from the results that the clients' own tests write, and that of ignored fields in
docs/no-effect.md from the bodies of the endpoints. These pages are in the repository, and a
test compares them with the code. docs/http.md comes from the OpenAPI document, and docs/commands.md from the help of
the command line. Both are made when the site is built (`make docs`).
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import click
import msgspec
from litestar import Litestar
from litestar.routes import HTTPRoute

from loramux.common.sampling import KINDS, NEUTRAL, PARAMETERS
from loramux.common.settings.file import Settings
from loramux_adapters import families as model_families
from loramux_api import vllm_metrics
from loramux_api.app import create_app
from loramux_api.bodies import Body
from loramux_api.cli.main import main
from loramux_api.metrics import FAMILIES
from loramux_api.openapi import REFUSALS

ADVANCED = {
    "engine": {"share_base_cache_between_projects", "num_threads", "step_timeout_s"},
    "scheduler": {
        "max_service_lead",
        "class_shares",
        "tenant_guaranteed_pages",
    },
    "adapters": {"max_loading", "max_vocabulary_bytes"},
}
"""Settings whose defaults suit nearly every deployment; they are listed last."""
HIDDEN = {"engine": {"in_process"}, "scheduler": {"max_lift", "affinity_window", "adapter_overhead_target"}}
"""Settings that only tests and measurements use. Settings files may have these settings, but no page lists them."""


def metrics_page() -> str:
    """Return docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "`GET /metrics` needs no key. Keep it, and `/health`, behind the load balancer. Grafana dashboards:",
        "`configs/dashboards`. This page is generated: `python tools/reference.py docs`.",
        "",
        "Alert rules with runbooks: [alerts](operations/alerts.md).",
        "",
        "With several workers (`server.workers`) one scrape has the metrics of all of them. Metrics without the label",
        "`engine` then have the label `worker`: aggregate them with `sum without (worker)`.",
        "",
        "| metric | type | labels | meaning |",
        "|---|---|---|---|",
    ]
    for family in FAMILIES:
        labels = ", ".join(family.labels) or "–"
        lines.append(f"| `{family.series}` | {family.kind} | {labels} | {family.help} |")
    lines += [
        "",
        "## Names of vLLM",
        "",
        "Dashboards for vLLM's server and routers that read its metrics, such as the endpoint picker of the Gateway",
        "API inference extension, work unchanged: these families have its names and labels (`model_name`: the base).",
        "",
        "| metric | type | the same as | meaning |",
        "|---|---|---|---|",
    ]
    series = {family.name: family.series for family in FAMILIES}
    for name, one in vllm_metrics.FAMILIES.items():
        suffix = "_total" if one.kind == "counter" else ""
        ours = f"`{series[one.ours]}`" if one.ours in series else one.ours
        lines.append(f"| `{vllm_metrics.PREFIX}{name}{suffix}` | {one.kind} | {ours} | {one.help} |")
    return "\n".join(lines) + "\n"


def settings_page() -> str:
    """Return docs/settings.md."""
    lines = [
        "# Settings",
        "",
        "One TOML file, read once at the start. `loramux init` writes one; `configs/` has examples. An unknown setting",
        "stops the server with a sentence that names it. Relative paths start at the file.",
        "This page is generated: `python tools/reference.py docs`.",
        "",
    ]
    advanced: list[str] = []
    for section in msgspec.structs.fields(Settings):
        struct, repeated = _struct_of(section.type)
        header = f"[[{section.name}]]" if repeated else f"[{section.name}]"
        unlisted, last = HIDDEN.get(section.name, set()), ADVANCED.get(section.name, set())
        rows = dict(_rows(struct))
        assert unlisted | last <= rows.keys(), f"{section.name} has no {(unlisted | last) - rows.keys()}"
        rows = {name: row for name, row in rows.items() if name not in unlisted}
        table = ["| setting | type | default | meaning |", "|---|---|---|---|"]
        lines += [f"## `{header}`", "", _first_paragraph(struct), "", *table]
        lines += [row for name, row in rows.items() if name not in last]
        lines.append("")
        advanced += [rows[name].replace("| `", f"| `{section.name}.", 1) for name in rows if name in last]
    lines += [
        "## Advanced",
        "",
        "The defaults suit nearly every deployment. [Scheduling](scheduling.md) explains the scheduler's.",
        "",
        "| setting | type | default | meaning |",
        "|---|---|---|---|",
        *advanced,
    ]
    return "\n".join(lines) + "\n"


def http_page() -> str:
    """Return docs/http.md: every operation, its fields and its answers."""
    document = _application().openapi_schema.to_schema()
    lines = [
        "# HTTP API",
        "",
        "A running server shows the same at `/schema`, where you can try calls, and as a document for generators at",
        "`/schema/openapi.json`. Send `Authorization: Bearer KEY`. Errors have OpenAI's format (`/admin`: RFC 9457).",
        "Lines of JSON have a media type of their own. For a generator that does not know it, such as",
        "openapi-python-client, set `content_type_overrides: {application/x-jsonl: text/plain}`.",
        "This page is generated: `python tools/reference.py docs`.",
        "",
    ]
    lines += ["| error | meaning |", "|---|---|"]
    lines += [f"| {status} | {_cell(spec.description)} |" for status, spec in REFUSALS.items()]
    lines.append("")
    by_tag: dict[str, list[str]] = {}
    for path, operations in sorted(document["paths"].items()):
        for method, operation in operations.items():
            by_tag.setdefault(operation["tags"][0], []).extend(_operation(method, path, operation, document))
    for tag, rows in sorted(by_tag.items()):
        lines += [f"## {tag}", "", *rows]
    return "\n".join(lines).rstrip() + "\n"


def _application() -> Litestar:
    return create_app(msgspec.convert({"model": {"path": "model", "served_model_name": "base"}}, Settings))


def _operation(method: str, path: str, operation: dict[str, Any], document: dict[str, Any]) -> list[str]:
    """Return one operation's section: parameters, the body's fields, and the answers."""
    lines = [f"### `{method.upper()} {path}`", "", f"**{operation['summary']}.**"]
    if operation.get("description"):
        lines[-1] += " " + " ".join(operation["description"].split("\n\n")[0].split())
    fields = [
        (one["name"], one["in"], one["schema"], one.get("description") or one["schema"].get("description", ""))
        for one in operation.get("parameters", ())
    ]
    for content in operation.get("requestBody", {}).get("content", {}).values():
        body = _resolved(content["schema"], document)
        required = set(body.get("required", ()))
        fields += [
            (name, "body, required" if name in required else "body", schema, schema.get("description", ""))
            for name, schema in body.get("properties", {}).items()
        ]
    if fields:
        lines += ["", "| field | in | type | meaning |", "|---|---|---|---|"]
        lines += [
            f"| `{name}` | {where} | {_schema_name(schema)} | {_cell(meaning)} |"
            for name, where, schema, meaning in fields
        ]
    success = [
        f"{status} ({_cell(one['description']).removesuffix('.')})"
        for status, one in operation["responses"].items()
        if status < "300"
    ]
    errors = [status for status in operation["responses"] if status >= "300"]
    return [*lines, "", f"Answers: {', '.join(success)}. Errors: {', '.join(errors) or 'none'}.", ""]


def _resolved(schema: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
    name = schema.get("$ref", "").rpartition("/")[2]
    return document["components"]["schemas"][name] if name else schema


def _schema_name(schema: dict[str, Any]) -> str:
    """Return a short name of a JSON schema: `list of string`."""
    for union in ("oneOf", "anyOf"):
        if union in schema:
            return " or ".join(dict.fromkeys(_schema_name(one) for one in schema[union] if one.get("type") != "null"))
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "enum" in schema:
        return ", ".join(f"`{one}`" for one in schema["enum"])
    kind = schema.get("type", "any")
    kinds = [one for one in (kind if isinstance(kind, list) else [kind]) if one != "null"]
    if kinds == ["array"]:
        return f"list of {_schema_name(schema.get('items', {}))}"
    return " or ".join(kinds)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def commands_page() -> str:
    """Return docs/commands.md: the help of every command."""
    lines = [
        "# Commands",
        "",
        "`loramux COMMAND --help` prints the same. This page is generated: `python tools/reference.py docs`.",
        "",
    ]
    root = click.Context(main, info_name="loramux")
    for name in main.list_commands(root):
        command = main.get_command(root, name)
        assert command is not None
        lines += _command(click.Context(command, info_name=name, parent=root))
    return "\n".join(lines).rstrip() + "\n"


def _command(context: click.Context) -> list[str]:
    """Return the sections of a command and of its subcommands."""
    command = context.command
    lines = [f"## {context.command_path}" if not isinstance(command, click.Group) else f"## {context.command_path} ..."]
    lines += ["", *_help_text(command), ""]
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            section = _command(click.Context(child, info_name=name, parent=context))
            lines += ["#" + section[0], *section[1:]]
        return lines
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    lines += [f"    {usage}", ""]
    records = [one for one in (parameter.get_help_record(context) for parameter in command.get_params(context)) if one]
    if records:
        lines += ["| option | meaning |", "|---|---|"]
        lines += [f"| `{_cell(option)}` | {_cell(meaning)} |" for option, meaning in records]
        lines.append("")
    return lines


def _help_text(command: click.Command) -> list[str]:
    """Return the help as Markdown. After click's marker \\b, the lines of a paragraph are kept, as a code block."""
    lines: list[str] = []
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        rows = paragraph.splitlines()
        if rows and rows[0].strip() == "\b":
            example = [row.strip() for row in rows[1:]]
            title = [example[0]] if example and example[0].endswith(":") else []
            lines += [*title, *([""] if title else []), *(f"    {row}" for row in example[len(title) :]), ""]
        else:
            lines += [" ".join(paragraph.split()), ""]
    return lines[:-1]


def families_table() -> str:
    """Return the table of model families in docs/models.md."""
    kinds: dict[str, tuple[list[str], list[str]]] = {}
    for family in model_families.FAMILIES.values():
        text = model_families.family_of_text(family.text_type or family.model_type)
        in_place = kinds.setdefault(family.kind, ([], []))
        in_place[0 if text.fuses_layers else 1].append(family.model_type)
    lines = [
        "| kind | `model_type`, with fused layers | `model_type`, with transformers' own layers |",
        "|---|---|---|",
        *(f"| {kind} | {', '.join(fused) or '–'} | {', '.join(own) or '–'} |" for kind, (fused, own) in kinds.items()),
    ]
    return "\n".join(lines) + "\n"


def heads_table() -> str:
    """Return the table of heads for multi-token prediction in docs/models.md."""
    by_location: dict[str, list[str]] = {}
    for family in model_families.FAMILIES.values():
        text = model_families.family_of_text(family.text_type or family.model_type)
        if text.multi_token is not None and text.multi_token.is_served:
            by_location.setdefault(text.multi_token.location, []).append(family.model_type)
    rows = (f"| {', '.join(names)} | `{location}` |" for location, names in by_location.items())
    return "\n".join(["| `model_type` | names of the head's tensors |", "|---|---|", *rows]) + "\n"


def encoders_table() -> str:
    """Return the table of encoders in docs/models.md."""
    lines = ["| `model_type` | a classifier reads | trained with an adapter |", "|---|---|---|"]
    for encoder in model_families.ENCODERS.values():
        read = f"the {'last' if encoder.classifies_last else 'first'} token's state" + (
            f", through the checkpoint's {encoder.transform}" if encoder.transform else ""
        )
        trained = f", then {encoder.activation}, then ".join(f"`{name}`" for name in encoder.head)
        mark = f" with `{encoder.marked_by}`" if encoder.marked_by else ""
        lines.append(f"| {encoder.model_type}{mark} | {read if encoder.head else 'vectors alone'} | {trained or '–'} |")
    return "\n".join(lines) + "\n"


def refused_table() -> str:
    """Return the table of refused model families in docs/models.md."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in model_families.NOT_SERVED.items():
        by_reason.setdefault(reason, []).append(name)
    rows = (f"| {', '.join(names)} | {reason} |" for reason, names in by_reason.items())
    return "\n".join(["| `model_type` | reason |", "|---|---|", *rows]) + "\n"


def sampling_table() -> str:
    """Return the table of sampling parameters in docs/models.md."""
    lines = ["| parameter | values | neutral | acts on | recommended by checkpoints |", "|---|---|---|---|---|"]
    for name, one in PARAMETERS.items():
        values = "token ids" if one.range is None else f"{one.range.ge:g} to {one.range.le:g}"
        if one.range is not None and name not in KINDS:
            values += " for each token"
        elif one.range is not None and KINDS[name] is int:
            values = _type_name(Annotated[int, one.range])
        neutral = " or ".join(f"`{_literal(one)}`" for one in (getattr(NEUTRAL, name), *one.other_neutrals))
        recommended = "yes" if one.recommended is not None else "–"
        lines.append(f"| `{name}` | {values} | {neutral} | {one.acts_on} | {recommended} |")
    return "\n".join(lines) + "\n"


def hints_table() -> str:
    """Return the table of fields in docs/no-effect.md that endpoints ignore."""
    fields: dict[str, set[str]] = {}
    for route in _application().routes:
        for handler in route.route_handlers if isinstance(route, HTTPRoute) else []:
            data = handler.parsed_data_field
            if data is not None and inspect.isclass(data.annotation) and issubclass(data.annotation, Body):
                for name in _ignored(data.annotation):
                    fields.setdefault(name, set()).add(route.path)
    by_paths: dict[tuple[str, ...], list[str]] = {}
    for name, paths in sorted(fields.items()):
        by_paths.setdefault(tuple(sorted(paths)), []).append(f"`{name}`")
    lines = ["| endpoints | fields |", "| -- | -- |"]
    for endpoints, names in sorted(by_paths.items()):
        lines.append(f"| {', '.join(f'`{path}`' for path in endpoints)} | {', '.join(names)} |")
    return "\n".join(lines) + "\n"


def _ignored(body: type[Body], path: str = "") -> Iterator[str]:
    yield from (f"{path}{name}" for name in body.ignored)
    for name, inner in body.nested.items():
        yield from _ignored(inner, f"{path}{name}.")


CLIENT_RESULTS = Path(__file__).parents[1] / "tests" / "api" / "real_clients" / "results.json"
CLIENT_STEPS = (
    "turn", "stream", "tools", "streamed tools", "JSON", "second turn", "cut stream", "busy", "wrong key", "too long",
)  # fmt: skip
"""Steps that have a column in the table of clients."""


def clients_table() -> str:
    """Return the table of real clients in docs/compatibility.md, whose results their own tests write."""
    columns = ["client", "version", "over", *CLIENT_STEPS, "more"]
    lines = [f"| {' | '.join(columns)} |", "| -- " * len(columns) + "|"]
    for client, found in json.loads(CLIENT_RESULTS.read_text()).items():
        for api, results in found["apis"].items():
            more = [f"{step}: {said}" for step, said in results.items() if step in CLIENT_STEPS and said[:3] == "ok,"]
            more += [f"{step}: {said}" for step, said in results.items() if step not in CLIENT_STEPS]
            cells = ["–" if step not in results else results[step].partition(",")[0] for step in CLIENT_STEPS]
            row = [client, found["version"], api, *cells, "; ".join(more) or "–"]
            lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def with_tables(page: str, text: str) -> str:
    """Return the text of a written page with new generated tables, each between two comments."""
    for name, write in TABLES.get(page, {}).items():
        begin, end = f"<!-- generated: {name} -->\n", "<!-- end -->"
        before, found, rest = text.partition(begin)
        _, ends, after = rest.partition(end)
        assert found, f"docs/{page} has no place for the table {name}"
        assert ends, f"docs/{page}: the place for the table {name} has no end"
        text = f"{before}{begin}\n{write()}\n{end}{after}"
    return text


PAGES = {"metrics.md": metrics_page, "settings.md": settings_page}
TABLES = {
    "models.md": {
        "families": families_table,
        "heads": heads_table,
        "encoders": encoders_table,
        "refused": refused_table,
        "sampling": sampling_table,
    },
    "compatibility.md": {"clients": clients_table},
    "no-effect.md": {"hints": hints_table},
}
"""Generated tables of pages that are written by hand, by page."""
SITE_PAGES = {"commands.md": commands_page, "http.md": http_page}


def _rows(struct: type[msgspec.Struct]) -> list[tuple[str, str]]:
    """Return each field's row, by its name."""
    source = ast.parse(inspect.getsource(struct)).body[0]
    assert isinstance(source, ast.ClassDef)
    docs = _attribute_docs(source)
    rows = []
    for field in msgspec.structs.fields(struct):
        default = "required" if field.required else f"`{_literal(_default(field))}`"
        rows.append(
            (field.name, f"| `{field.name}` | {_type_name(field.type)} | {default} | {docs.get(field.name, '')} |")
        )
    return rows


def _attribute_docs(source: ast.ClassDef) -> dict[str, str]:
    """Return the string after each annotated field, on one line."""
    docs = {}
    for statement, following in zip(source.body, source.body[1:], strict=False):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and isinstance(following.value.value, str)
        ):
            docs[statement.target.id] = " ".join(following.value.value.split()).replace("|", "\\|")
    return docs


def _default(field: msgspec.structs.FieldInfo) -> Any:
    return field.default if field.default is not msgspec.NODEFAULT else field.default_factory()


def _literal(value: Any) -> str:
    """Return the value as TOML writes it; `unset` for None."""
    if value is None:
        return "unset"
    if isinstance(value, msgspec.Struct):
        inner = ", ".join(
            f"{name} = {_literal(one)}" for name, one in msgspec.structs.asdict(value).items() if one is not None
        )
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, int) and not isinstance(value, bool) and value >= 10_000:
        return f"{value:_}"
    if isinstance(value, tuple):
        return json.dumps(list(value))
    return json.dumps(value)


def _type_name(kind: Any) -> str:
    """Return a short name with the limits: `integer, 1 to 65535`."""
    if hasattr(kind, "__metadata__"):
        return _type_name(kind.__origin__) + _limits(kind.__metadata__[0])
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (types.UnionType, Union):
        name = " or ".join(_type_name(one) for one in arguments if one is not type(None))
    elif origin is Literal:
        name = ", ".join(f"`{one}`" for one in arguments)
    elif origin in (tuple, list):
        name = f"list of {_type_name(arguments[0])}"
    elif isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        name = "table: " + ", ".join(field.name for field in msgspec.structs.fields(kind))
    else:
        name = {bool: "boolean", int: "integer", float: "number", str: "string"}.get(kind, "table")
    return name


def _limits(meta: msgspec.Meta) -> str:
    low = f"above {meta.gt}" if meta.gt is not None else None if meta.ge is None else f"{meta.ge}"
    high = meta.le if meta.le is not None else meta.lt
    if low is None:
        return "" if high is None else f", at most {high}"
    if high is not None:
        return f", {low} to {high}"
    return f", {low}" if meta.gt is not None else f", at least {low}"


def _struct_of(kind: Any) -> tuple[type[msgspec.Struct], bool]:
    if get_origin(kind) is tuple:
        return get_args(kind)[0], True
    return kind, False


def _first_paragraph(struct: type) -> str:
    return " ".join((struct.__doc__ or "").split("\n\n")[0].split())


if __name__ == "__main__":
    for page, write in {**PAGES, **SITE_PAGES}.items():
        (Path(sys.argv[1]) / page).write_text(write())
    for page in TABLES:
        path = Path(sys.argv[1]) / page
        path.write_text(with_tables(page, path.read_text()))
