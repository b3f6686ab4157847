"""GET /v1/models: values that the caller may use as a request's `model`, with OpenAI's and Anthropic's fields."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Literal

import msgspec
from litestar import get
from litestar.di import NamedDependency
from litestar.params import QueryParameter

from loramux.catalog.registry.entities import CallableAdapter
from loramux.catalog.registry.errors import AdapterNotFound, ModelNotFound
from loramux.common.identity import Principal
from loramux.common.units import SECOND
from loramux.serving.adapters import AdapterService
from loramux.serving.bases import ServedBase, ServedBases
from loramux.serving.errors import InvalidRequest
from loramux_api.auth import requires
from loramux_api.openapi import ApiController
from loramux_api.parameters import TWO_DIRECTIONS, OptionalText, PathName
from loramux_api.schemas.batches import Cursored, page_of

Task = Literal["CAUSAL_LM", "FEATURE_EXTRACTION", "SEQ_CLS", "TOKEN_CLS"]
Modality = Literal["text", "image"]
Lifecycle = Literal["active", "deprecated", "retired"]


class Model(msgspec.Struct, kw_only=True):
    """The base model, or one of the caller's adapters."""

    id: str
    object: Literal["model"] = "model"
    type: Literal["model"] = "model"
    """Anthropic's name for `object`. Its clients read `display_name`, `created_at`, `lifecycle` and `max_input_tokens`
    too.
    """
    display_name: str
    created: int
    created_at: datetime
    lifecycle: Literal["active"] = "active"
    """Constant: models that are retired are not listed."""
    owned_by: str
    root: str
    """The base model itself, or the adapter's own name."""
    parent: str | None = None
    """Base model of an adapter."""
    max_model_len: int
    max_input_tokens: int
    """Another name of `max_model_len`."""
    tasks: list[Task] | None = None
    """Tasks of a base model, by PEFT's names: text, vectors (`FEATURE_EXTRACTION`) or classes (`SEQ_CLS`). null: of an
    adapter, whose task its description shows.
    """
    input_modalities: list[Modality]
    """Kinds of parts that a prompt may have; none while an adapter's base is not served."""


MAX_PAGE = 1000


class ModelController(ApiController):
    """Values that the caller may use as a request's `model`."""

    path = "/v1/models"
    tags = ("Models",)
    guards = (requires("read"),)

    @get(summary="List models")
    async def list_models(  # noqa: PLR0913, PLR0917 - one for each parameter of the query
        self,
        principal: NamedDependency[Principal],
        adapters: NamedDependency[AdapterService],
        bases: NamedDependency[ServedBases],
        started_at: NamedDependency[int],
        search: Annotated[str | None, QueryParameter(min_length=1, max_length=64)] = None,
        limit: Annotated[int | None, QueryParameter(ge=1, le=MAX_PAGE)] = None,
        after_id: OptionalText = None,
        before_id: OptionalText = None,
        lifecycles: Annotated[list[Lifecycle] | None, QueryParameter(name="lifecycle[]", max_items=3)] = None,
    ) -> Cursored[Model]:
        """List the models that your key may use: base models, your own adapters, and adapters shared with you.

        `search`: list only models whose name contains this text. `limit`: list at most this many models; without it,
        all. `after_id`: begin after this model, the `last_id` of the page before. `before_id`: list the models just
        before this model, the `first_id` of the page after. `lifecycle[]`: list only models in these stages; all are
        `active`.
        """
        if after_id is not None and before_id is not None:
            raise InvalidRequest(TWO_DIRECTIONS, field="before_id", code="invalid_value")
        if lifecycles and "active" not in lifecycles:
            return page_of([], 0, [])
        wanted = (search or "").lower()
        models = [_base(base, started_at) for name, base in bases.items() if principal.may_use(name)]
        most = None if limit is None or after_id is not None or before_id is not None else limit + 1
        found = await adapters.queries.callable(principal, wanted.rpartition("/")[2] or None, most)
        models += [_adapter(bases, one) for one in found]
        models = [one for one in models if wanted in one.id.lower()]
        if after_id is not None:
            place = next((i for i, one in enumerate(models) if one.id == after_id), len(models))
            models = models[place + 1 :]
        if before_id is not None:
            models = models[: next((i for i, one in enumerate(models) if one.id == before_id), 0)]
            kept = models[-limit:] if limit else models
            page = page_of(kept, len(kept), [one.id for one in kept])
            page.has_more = len(models) > len(kept)
            return page
        return page_of(models, limit or len(models), [one.id for one in models])

    @get("/{name:path}", summary="Describe a model")
    async def get_model(
        self,
        name: PathName,
        principal: NamedDependency[Principal],
        adapters: NamedDependency[AdapterService],
        bases: NamedDependency[ServedBases],
        started_at: NamedDependency[int],
    ) -> Model:
        """Return one model by the name in the list."""
        name = name.removeprefix("/")
        if (base := bases.get(name)) and principal.may_use(name):
            return _base(base, started_at)
        full = name if "/" in name else f"{principal.tenant_name}/{name}"
        for one in await adapters.queries.callable(principal, limit=0):
            if one.name == full:
                return _adapter(bases, one)
        try:
            info = await adapters.queries.get(principal, name)
        except AdapterNotFound:
            raise ModelNotFound(name) from None
        return _adapter(bases, CallableAdapter(name=info.name, created_at=info.created_at, base_model=info.base_model))


def _base(base: ServedBase, started_at: int) -> Model:
    task = base.bundle.task
    return Model(
        id=base.name,
        display_name=base.name,
        created=started_at,
        created_at=datetime.fromtimestamp(started_at, UTC),
        owned_by="loramux",
        root=base.name,
        max_model_len=base.context,
        max_input_tokens=base.context,
        tasks=["CAUSAL_LM", "FEATURE_EXTRACTION"] if task is None else [task],
        input_modalities=_modalities(base),
    )


def _adapter(bases: ServedBases, adapter: CallableAdapter) -> Model:
    base, created = bases.of_record(adapter.base_model), adapter.created_at // SECOND
    context = 0 if base is None else base.context
    return Model(
        id=adapter.name,
        display_name=adapter.name,
        created=created,
        created_at=datetime.fromtimestamp(created, UTC),
        owned_by=adapter.name.partition("/")[0],
        root=adapter.version or adapter.name,
        parent=adapter.base_model if base is None else base.name,
        max_model_len=context,
        max_input_tokens=context,
        input_modalities=[] if base is None else _modalities(base),
    )


def _modalities(base: ServedBase) -> list[Modality]:
    return ["text"] if base.images is None else ["text", "image"]
