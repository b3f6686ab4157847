"""Refusals of orders to engines.

LoramuxError(message, field)
└── FleetError
    ├── UnknownEngine   404  no engine has this name
    └── EngineBusy      409  it is being drained or restarted already
"""

from __future__ import annotations

from http import HTTPStatus

from loramux.errors import LoramuxError


class FleetError(LoramuxError):
    """Base of these refusals."""


class UnknownEngine(FleetError):
    """The message lists the engines."""

    code = "engine_not_found"
    status = HTTPStatus.NOT_FOUND


class EngineBusy(FleetError):
    """The message says of what."""

    code = "engine_busy"
    status = HTTPStatus.CONFLICT
