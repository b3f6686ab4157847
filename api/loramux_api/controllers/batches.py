"""/v1/batches."""

from __future__ import annotations

from typing import Annotated

import msgspec
from litestar import Controller, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter

from loramux.batches import Batches
from loramux.tenants import Principal
from loramux_api.auth import requires
from loramux_api.openapi import REFUSALS
from loramux_api.schemas.batches import BatchBody, BatchObject, Cursored, batch_object, page_of
from loramux_api.schemas.strict import StrictJSON

MAX_PAGE = 100


class BatchController(Controller):
    """Files of requests that run when there is room, at the price of batches."""

    path = "/v1/batches"
    tags = ("Batches",)
    guards = (requires("inference"),)

    @post(dto=StrictJSON[BatchBody], return_dto=None, status_code=200, summary="Create a batch", responses=REFUSALS)
    async def create(
        self, data: JSONBody[BatchBody], principal: NamedDependency[Principal], batches: NamedDependency[Batches]
    ) -> BatchObject:
        """Run the lines of a file. They are checked first, and none runs where one is wrong."""
        made = await batches.create(principal, **msgspec.structs.asdict(data))
        return batch_object(made)

    @get(summary="List batches", responses=REFUSALS)
    async def list_batches(
        self,
        principal: NamedDependency[Principal],
        batches: NamedDependency[Batches],
        after: FromQuery[str | None] = None,
        limit: Annotated[int, QueryParameter(ge=1, le=MAX_PAGE)] = 20,
    ) -> Cursored[BatchObject]:
        """List your project's batches, newest first; `after` is the last id of the previous page."""
        found = await batches.before(principal, after, limit + 1)
        return page_of([batch_object(batch) for batch in found], limit, [batch.id for batch in found])

    @get("/{batch_id:str}", summary="Describe a batch", responses=REFUSALS)
    async def get_batch(
        self, batch_id: FromPath[str], principal: NamedDependency[Principal], batches: NamedDependency[Batches]
    ) -> BatchObject:
        """Describe a batch: its state, its counts, and at its end its files."""
        return batch_object(await batches.get(principal, batch_id))

    @post("/{batch_id:str}/cancel", status_code=200, summary="Cancel a batch", responses=REFUSALS)
    async def cancel(
        self, batch_id: FromPath[str], principal: NamedDependency[Principal], batches: NamedDependency[Batches]
    ) -> BatchObject:
        """Begin no further line. Running ones finish; answers so far are in the output file."""
        return batch_object(await batches.cancel(principal, batch_id))
