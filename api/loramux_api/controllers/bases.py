"""/admin/bases: base models that are added to running servers and retired, for operators."""

from __future__ import annotations

import msgspec
from litestar import Controller, get, post
from litestar.di import NamedDependency
from litestar.params import JSONBody

from loramux.gateway import Platform
from loramux.tenants import Tenants
from loramux_api.auth import requires
from loramux_api.openapi import PROBLEMS
from loramux_api.schemas.bases import BaseBody, BaseObject, RetireBody, base_object
from loramux_api.schemas.strict import StrictJSON
from loramux_api.schemas.tenancy import Listing


class AdminBaseController(Controller):
    """The base models of this server."""

    path = "/admin/bases"
    tags = ("Admin",)
    guards = (requires("operator"),)

    @get(summary="List base models", responses=PROBLEMS)
    async def list_bases(self, platform: NamedDependency[Platform]) -> Listing[BaseObject]:
        """List the base models of the settings file and those that were added, with their state on this server."""
        return Listing(data=[base_object(status) for status in platform.lifecycle.statuses()])

    @post(dto=StrictJSON[BaseBody], return_dto=None, status_code=202, summary="Add a base model", responses=PROBLEMS)
    async def add(
        self, data: JSONBody[BaseBody], platform: NamedDependency[Platform], operators: NamedDependency[Tenants]
    ) -> BaseObject:
        """Check a base model and start its engines on every server; the list shows when it serves.

        A retired base model is served again. Everything else is served meanwhile, and if it does not load.
        """
        return base_object(await platform.lifecycle.add(operators.changes, msgspec.to_builtins(data)))

    @post(
        "/retire",
        dto=StrictJSON[RetireBody],
        return_dto=None,
        status_code=202,
        summary="Retire a base model",
        responses=PROBLEMS,
    )
    async def retire(
        self, data: JSONBody[RetireBody], platform: NamedDependency[Platform], operators: NamedDependency[Tenants]
    ) -> BaseObject:
        """Take no more uploads for it and no more requests, and stop its engines once none runs.

        Requests to its adapters are answered 410 then, with what to use instead.
        """
        return base_object(
            await platform.lifecycle.retire(operators.changes, data.name, data.successor, force=data.force)
        )
