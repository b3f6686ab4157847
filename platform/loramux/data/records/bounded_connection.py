"""A connection to PostgreSQL on which no statement waits for ever.

A server that is frozen, or a proxy whose server is, keeps its connections open: its kernel acknowledges every packet,
so neither TCP nor `statement_timeout` ends the wait. Without a bound, one such wait in the transaction that opens
requests would hold every later request.
"""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Any, TypeVar

import psycopg
from psycopg.abc import PQGen

ANSWER_SECONDS = 120.0
"""Seconds after which a statement without an answer has failed. Each statement of a request takes milliseconds, and
waits at most 30 s for a lock; sums over a large ledger may take a minute."""

T = TypeVar("T")


class BoundedConnection(psycopg.AsyncConnection[Any]):
    """A connection that breaks if PostgreSQL does not answer a statement within ANSWER_SECONDS."""

    async def wait(self, gen: PQGen[T], *arguments: Any, **options: Any) -> T:
        """Return the result of a statement. Raises OperationalError if it does not come in time."""
        loop = asyncio.get_running_loop()
        ends = loop.call_later(ANSWER_SECONDS, self._break)
        try:
            return await super().wait(gen, *arguments, **options)
        except psycopg.OperationalError as error:
            if loop.time() >= ends.when():
                raise psycopg.OperationalError(f"it did not answer within {ANSWER_SECONDS:g} s") from error
            raise
        finally:
            ends.cancel()

    def _break(self) -> None:
        """Shut the socket down, as if the server had. A cancellation would ask the server to end the statement, and
        wait for this.
        """
        if not self.closed:
            with socket.socket(fileno=os.dup(self.pgconn.socket)) as own:
                own.shutdown(socket.SHUT_RDWR)
