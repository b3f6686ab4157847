"""The address of a server without a path: the console for a browser, and a list of addresses for other clients."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Controller, Response, get, post
from litestar.datastructures import State
from litestar.di import NamedDependency
from litestar.params import JSONBody

from loramux.common.errors import LoramuxError
from loramux.common.identity import Principal
from loramux.common.jobs import ANYONE, run_blocking
from loramux.common.settings.file import Settings
from loramux.serving.service import CompletionService
from loramux_api.auth import requires
from loramux_api.bodies import AnyRequest, InferenceRequest
from loramux_api.controllers.lorax import LISTED, GenerateBody, answered, refused
from loramux_api.openapi import StreamingOperation

CONSOLE = "/console/"
NOT_BUILT = "The console's pages are not built: run `make console` in the checkout, or install a wheel."
OFF = "The console is off: console.enabled is false in the settings."


class Home(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Addresses of a server, relative to its own address."""

    service: str
    api: str
    console: str | None
    """Address of the console; null: `console_problem` gives the reason why there is no console."""
    console_problem: str = ""
    schema: str = ""
    """Address of the API's description; absent on the public port of a server with an internal one."""
    health: str = ""


class HomeController(Controller):
    """The root: a list of addresses, and the address that LoRAX's client uses."""

    path = "/"

    @get("/", include_in_schema=False)
    async def home(
        self, request: AnyRequest, state: State, settings: NamedDependency[Settings]
    ) -> Response[Home | None]:
        """Redirect a browser to the console if there is a console. Otherwise return the list of addresses."""
        is_built = await run_blocking(ANYONE, lambda: state.console_files.is_built)
        problem = "" if settings.console.enabled and is_built else NOT_BUILT if settings.console.enabled else OFF
        if not problem and "text/html" in request.headers.get("accept", ""):
            return Response(None, status_code=307, headers={"Location": CONSOLE, "Cache-Control": "no-store"})
        has_internal = settings.server.internal_port is not None
        return Response(
            Home(
                service="loramux",
                api="/v1",
                console=None if problem else CONSOLE,
                console_problem=problem,
                schema="" if has_internal else "/schema",
                health="" if has_internal else "/health/ready",
            )
        )

    @post(
        "/",
        operation_class=StreamingOperation,
        status_code=200,
        tags=("Inference",),
        guards=[requires("inference")],
        request_class=InferenceRequest,
        exception_handlers={LoramuxError: refused},
        summary="Continue a text, as LoRAX's Python client asks for it",
        responses=LISTED,
    )
    async def compatible(
        self,
        data: JSONBody[GenerateBody],
        request: AnyRequest,
        principal: NamedDependency[Principal],
        completions: NamedDependency[CompletionService],
        settings: NamedDependency[Settings],
    ) -> Response[Any]:
        """Generate as /generate does. An answer in one piece is inside a list."""
        whole = await answered(data, request, principal, completions, settings)
        if isinstance(whole.content, bytes):
            whole.content = b"[" + whole.content + b"]"
        return whole
