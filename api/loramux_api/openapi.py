"""The description of the API at /schema, and the base classes of controllers, which put the errors into it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version

from litestar import Controller, openapi
from litestar.handlers import BaseRouteHandler, HTTPRouteHandler
from litestar.openapi import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin, SwaggerRenderPlugin
from litestar.openapi.spec import (
    Components,
    OpenAPIFormat,
    OpenAPIMediaType,
    OpenAPIResponse,
    OpenAPIType,
    Operation,
    RequestBody,
    Schema,
    SecurityScheme,
)

from loramux.common.bundle import SOURCES
from loramux.data.storage.blobs import CONFIG_FILE, WEIGHTS_FILE
from loramux_api.auth import requires
from loramux_api.problems import ErrorAnswer, ProblemDetails
from loramux_api.schemas.bounds import MAX_KEYS, MAX_NAME, MAX_PATH


@dataclass
class ResponseSpec(openapi.ResponseSpec):
    """The description of a response. Random examples of nested objects would make the document 46 MB large."""

    generate_examples: bool = False


REFUSALS = {
    400: ResponseSpec(ErrorAnswer, description="The request cannot be served as it stands; `param` names the field."),
    401: ResponseSpec(ErrorAnswer, description="There is no key, or it is not valid."),
    403: ResponseSpec(ErrorAnswer, description="The key or the member lacks the scope, or the tenant is suspended."),
    404: ResponseSpec(ErrorAnswer, description="It does not exist, or it is another tenant's."),
    409: ResponseSpec(ErrorAnswer, description="It exists already, is still needed, or still runs."),
    410: ResponseSpec(ErrorAnswer, description="Its base model is retired; the message names what to use instead."),
    412: ResponseSpec(ErrorAnswer, description="It was changed since you read it."),
    413: ResponseSpec(ErrorAnswer, description="The body is too large."),
    422: ResponseSpec(ErrorAnswer, description="The Idempotency-Key came with another request before."),
    429: ResponseSpec(ErrorAnswer, description="Over capacity, or over one of your limits: see Retry-After."),
    500: ResponseSpec(ErrorAnswer, description="A fault of the server; the message has the id to report."),
    503: ResponseSpec(ErrorAnswer, description="Not now: see Retry-After."),
}
"""Errors of every route that needs a key."""
PROBLEMS = {
    status: ResponseSpec(ProblemDetails, description=spec.description, media_type="application/problem+json")
    for status, spec in REFUSALS.items()
}
"""The same errors under /admin, in the format of RFC 9457."""
_FILE = Schema(type=OpenAPIType.STRING, format=OpenAPIFormat.BINARY)


class ApiController(Controller):
    """Routes that need a key. The document lists `errors` for each of these routes."""

    errors = REFUSALS

    def get_route_handlers(self) -> list[BaseRouteHandler]:
        """Add the errors to every route."""
        handlers = super().get_route_handlers()
        for handler in handlers:
            assert isinstance(handler, HTTPRouteHandler), "no route is a websocket"
            handler.responses = {**(handler.responses or {}), **self.errors}
        return handlers


class OperatorController(ApiController):
    """Routes that only operators may call."""

    tags = ("Admin",)
    guards = (requires("operator"),)
    errors = PROBLEMS


@dataclass
class UploadOperation(Operation):
    """The form of POST /v1/adapters. The form is streamed, so no argument of the handler declares it."""

    def __post_init__(self) -> None:
        form = Schema(
            type=OpenAPIType.OBJECT,
            required=["name", CONFIG_FILE, WEIGHTS_FILE],
            properties={
                "name": Schema(type=OpenAPIType.STRING, max_length=MAX_NAME),
                **dict.fromkeys((CONFIG_FILE, WEIGHTS_FILE, *SOURCES), _FILE),
            },
        )
        self.request_body = RequestBody(content={"multipart/form-data": OpenAPIMediaType(schema=form)}, required=True)


@dataclass
class LoadOperation(Operation):
    """The two bodies of POST /v1/load_lora_adapter: a form is streamed, so no argument of the handler declares them."""

    def __post_init__(self) -> None:
        text, flag = Schema(type=OpenAPIType.STRING, max_length=MAX_NAME), Schema(type=OpenAPIType.BOOLEAN)
        fields = {"lora_name": text, "base_model_name": text, "load_inplace": flag, "is_3d_lora_weight": flag}
        place = Schema(type=OpenAPIType.STRING, max_length=MAX_PATH)
        config = Schema(type=OpenAPIType.OBJECT, max_properties=MAX_KEYS)
        self.request_body = RequestBody(
            content={
                "application/json": OpenAPIMediaType(
                    schema=Schema(
                        type=OpenAPIType.OBJECT,
                        required=["lora_name", "lora_path"],
                        properties={**fields, "lora_path": place, "adapter_config": config},
                    )
                ),
                "multipart/form-data": OpenAPIMediaType(
                    schema=Schema(
                        type=OpenAPIType.OBJECT,
                        required=["lora_name", CONFIG_FILE, WEIGHTS_FILE],
                        properties={**fields, **dict.fromkeys((CONFIG_FILE, WEIGHTS_FILE, *SOURCES), _FILE)},
                    )
                ),
            },
            required=True,
        )


@dataclass
class PartOperation(Operation):
    """The raw body of PUT /v1/uploads/{id}/files/{name}. The body is also streamed."""

    def __post_init__(self) -> None:
        self.request_body = RequestBody(content={"application/octet-stream": OpenAPIMediaType(schema=_FILE)})


@dataclass
class StreamingOperation(Operation):
    """An operation whose answer is a JSON object or, with `stream`, server-sent events."""

    def __post_init__(self) -> None:
        answer = (self.responses or {}).get("200")
        if isinstance(answer, OpenAPIResponse) and answer.content is not None:
            events = OpenAPIMediaType(schema=Schema(type=OpenAPIType.OBJECT))  # schema of an event
            answer.content = {**answer.content, "text/event-stream": events}


def openapi_config() -> OpenAPIConfig:
    """Return the configuration of Swagger at /schema and of the document at /schema/openapi.json."""
    key = SecurityScheme(type="http", scheme="bearer", description="A key of your tenant, sk-lm-..., or an OIDC token.")
    return OpenAPIConfig(
        title="loramux",
        version=version("loramux"),
        description="Thousands of customers' LoRA fine-tunes behind one OpenAI-compatible API.",
        path="/schema",
        render_plugins=[SwaggerRenderPlugin(path="/"), JsonRenderPlugin()],
        components=Components(security_schemes={"key": key}),
        security=[{"key": []}],
        use_handler_docstrings=True,
    )
