"""Logs of every process: one line for each event, as JSON or as text, with the ids of the event's request.

Modules log with the standard library's `logging`; structlog formats the lines. A line has the fields of
`structlog.contextvars` (the request's id and trace id), which tasks of a request inherit. No line holds a tenant's
text: no prompt, no answer, no name of an adapter.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import Literal

import structlog

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
Format = Literal["auto", "json", "text"]
Level = Literal["debug", "info", "warning", "error"]


def configure(form: Format, level: Level, worker: int | None = None) -> None:
    """Send this process's logs to stderr. `auto`: text on a terminal, otherwise JSON. Lines name the server's `worker`,
    unless it is the only one.
    """

    def name_worker(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        return event if worker is None else {**event, "worker": worker}

    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        name_worker,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    is_text = form == "text" or (form == "auto" and sys.stderr.isatty())
    plain = structlog.dev.plain_traceback
    last: list[structlog.typing.Processor] = (
        [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)]
        if is_text
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    last.insert(0, structlog.stdlib.ProcessorFormatter.remove_processors_meta)
    handler = logging.StreamHandler()
    handler.addFilter(_is_no_cancellation)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=last))
    logging.basicConfig(handlers=[handler], force=True)
    set_level(level)


def _is_no_cancellation(record: logging.LogRecord) -> bool:
    """Return False for a cancelled task, which SQLAlchemy's pool logs as an error with a traceback."""
    return record.exc_info is None or not isinstance(record.exc_info[1], asyncio.CancelledError)


def set_level(level: Level) -> None:
    """Log this level and higher levels from now on. Lines of libraries are logged only from `warning` on."""
    logging.getLogger().setLevel(max(LEVELS[level], logging.WARNING))
    for package in ("loramux", "loramux_api", "loramux_adapters", "loramux_kernels"):
        logging.getLogger(package).setLevel(LEVELS[level])
