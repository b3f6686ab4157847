"""bases: revisions, uploads and what a request holds of a budget belong to a base, by its name"""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

OLD, NEW = "uq_revisions_adapter_id_digest", "uq_revisions_adapter_id_digest_base_model"

# Altering a table makes a new one in SQLite, and its trigger goes with the old one.
SQLITE_TRIGGER = """CREATE TRIGGER revisions_immutable
    BEFORE UPDATE OF id, tenant_id, adapter_id, number, digest, rank, size_bytes ON revisions
    BEGIN SELECT RAISE(ABORT, 'revisions are immutable'); END"""


def upgrade() -> None:
    op.add_column("uploads", sa.Column("base_model", sa.Text(), nullable=True))
    op.add_column("budget_holds", sa.Column("base_model", sa.Text(), nullable=False, server_default=sa.text("''")))
    with op.batch_alter_table("revisions") as revisions:
        revisions.add_column(sa.Column("base_model", sa.Text(), nullable=False, server_default=sa.text("''")))
        revisions.drop_constraint(OLD, type_="unique")
        revisions.create_unique_constraint(NEW, ["adapter_id", "digest", "base_model"])
    _restore_trigger()


def downgrade() -> None:
    twice = sa.text("SELECT 1 FROM revisions GROUP BY adapter_id, digest HAVING count(*) > 1")
    if op.get_bind().execute(twice).first():
        raise RuntimeError("an adapter has one content for two bases, which the older schema cannot hold")
    with op.batch_alter_table("revisions") as revisions:
        revisions.drop_constraint(NEW, type_="unique")
        revisions.drop_column("base_model")
        revisions.create_unique_constraint(OLD, ["adapter_id", "digest"])
    _restore_trigger()
    op.drop_column("budget_holds", "base_model")
    op.drop_column("uploads", "base_model")


def _restore_trigger() -> None:
    if op.get_bind().dialect.name == "sqlite":
        op.execute(SQLITE_TRIGGER)
