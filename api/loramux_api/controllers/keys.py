"""/v1/keys."""

from __future__ import annotations

from litestar import Controller, delete, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody

from loramux.tenants import Account
from loramux_api.auth import requires
from loramux_api.openapi import REFUSALS
from loramux_api.schemas.strict import StrictJSON
from loramux_api.schemas.tenancy import KeyBody, KeyObject, Listing, RotateBody, key_object


class KeyController(Controller):
    """The tenant's API keys. Nobody gives a key what it does not have itself."""

    path = "/v1/keys"
    tags = ("Keys",)
    guards = (requires("keys"),)

    @post(dto=StrictJSON[KeyBody], return_dto=None, summary="Make a key", responses=REFUSALS)
    async def create(self, data: JSONBody[KeyBody], account: NamedDependency[Account]) -> KeyObject:
        """A new key. Its secret is in `key`, this once: it is stored nowhere."""
        return key_object(*await account.keys.create(data.request()))

    @get(summary="List keys", responses=REFUSALS)
    async def list_keys(self, account: NamedDependency[Account]) -> Listing[KeyObject]:
        """All of the tenant's keys, revoked ones too, oldest first."""
        return Listing(data=[key_object(key) for key in await account.keys.all()])

    @post(
        "/{key_id:str}/rotate",
        dto=StrictJSON[RotateBody],
        return_dto=None,
        summary="Rotate a key",
        responses=REFUSALS,
    )
    async def rotate(
        self, key_id: FromPath[str], data: JSONBody[RotateBody], account: NamedDependency[Account]
    ) -> KeyObject:
        """A new key like the old one, which ends after `overlap_seconds`."""
        return key_object(*await account.keys.rotate(key_id, data.overlap_seconds))

    @delete("/{key_id:str}", status_code=200, summary="Revoke a key", responses=REFUSALS)
    async def revoke(self, key_id: FromPath[str], account: NamedDependency[Account]) -> KeyObject:
        """End a key, at once and for good."""
        return key_object(await account.keys.revoke(key_id))
