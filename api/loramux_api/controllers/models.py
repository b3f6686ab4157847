"""GET /v1/models."""

from __future__ import annotations

from litestar import Controller, get
from litestar.di import NamedDependency
from litestar.params import FromPath

from loramux.gateway import Platform
from loramux.registry import AdapterNotFound, ModelNotFound
from loramux.tenants import Principal
from loramux_api.auth import requires
from loramux_api.openapi import REFUSALS
from loramux_api.schemas.resources import SECOND, Model, ModelList


class ModelController(Controller):
    """What can stand in a request's `model`."""

    path = "/v1/models"
    tags = ("Models",)
    guards = (requires("read"),)

    @get(summary="List models", responses=REFUSALS)
    async def list_models(
        self, principal: NamedDependency[Principal], platform: NamedDependency[Platform]
    ) -> ModelList:
        """The base model, your own adapters and those shared with you, as far as your key may name them."""
        reading, base = platform.adapters.reading, _base(platform)
        models = [base] if principal.may_use(base.id) else []
        models += [_adapter(platform, info.name, info.created_at) for info in await reading.all(principal)]
        return ModelList(data=models + [_adapter(platform, *one) for one in await reading.granted(principal)])

    @get("/{name:path}", summary="Describe a model", responses=REFUSALS)
    async def get_model(
        self, name: FromPath[str], principal: NamedDependency[Principal], platform: NamedDependency[Platform]
    ) -> Model:
        """One model, by the name that the list gives it."""
        name = name.removeprefix("/")
        if name == platform.settings.model.served_model_name and principal.may_use(name):
            return _base(platform)
        granted = dict(await platform.adapters.reading.granted(principal))
        if name in granted:
            return _adapter(platform, name, granted[name])
        try:
            info = await platform.adapters.reading.get(principal, name)
        except AdapterNotFound:
            raise ModelNotFound(name) from None
        return _adapter(platform, info.name, info.created_at)


def _base(platform: Platform) -> Model:
    return Model(
        id=platform.settings.model.served_model_name,
        created=platform.started_at,
        owned_by="loramux",
        max_model_len=platform.completions.context,
    )


def _adapter(platform: Platform, name: str, created_at: int) -> Model:
    return Model(
        id=name,
        created=created_at // SECOND,
        owned_by=name.partition("/")[0],
        parent=platform.settings.model.served_model_name,
        max_model_len=platform.completions.context,
    )
