"""Errors of exports.

LoramuxError
└── ExportError   500  a file or a sink that cannot be written; the message is the operator's
"""

from __future__ import annotations

from http import HTTPStatus

from loramux.errors import LoramuxError


class ExportError(LoramuxError):
    """An export that fails; the message has the way out."""

    code = "export_failed"
    status = HTTPStatus.INTERNAL_SERVER_ERROR
