"""Alembic's entry: runs on the connection that `records.schema.migrate` passes, or by hand on LORAMUX_RECORDS_URL."""

import os

from alembic import context
from sqlalchemy import Connection, create_engine

from loramux.data.records.database import parse_url
from loramux.data.records.schema import METADATA


def run(connection: Connection) -> None:
    """Run all steps in the connection's transaction, also on SQLite, so that no half migration is ever visible."""
    context.configure(
        connection=connection,
        target_metadata=METADATA,
        transactional_ddl=True,
        render_as_batch=connection.dialect.name == "sqlite",
    )
    with context.begin_transaction():
        context.run_migrations()


lent: Connection | None = context.config.attributes.get("connection")
if lent is not None:
    run(lent)
else:
    url = os.environ.get("LORAMUX_RECORDS_URL")
    if url is None:
        raise SystemExit("set LORAMUX_RECORDS_URL, for example sqlite:////tmp/dev.sqlite3 (or use `loramux migrate`)")
    with create_engine(parse_url(url)).begin() as connection:
        run(connection)
