"""rank zero: a revision without any pair of matrices has the largest rank 0"""

from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

NAME = "ck_revisions_quantities"

# SQLite alters a table by making a new one, and the old table's trigger is lost.
SQLITE_TRIGGER = """CREATE TRIGGER revisions_immutable
    BEFORE UPDATE OF id, tenant_id, adapter_id, number, digest, rank, size_bytes ON revisions
    BEGIN SELECT RAISE(ABORT, 'revisions are immutable'); END"""


def upgrade() -> None:
    with op.batch_alter_table("revisions") as revisions:
        revisions.drop_constraint(op.f(NAME), type_="check")
        revisions.create_check_constraint(op.f(NAME), "number >= 1 AND rank >= 0 AND size_bytes >= 0")
    if op.get_bind().dialect.name == "sqlite":
        op.execute(SQLITE_TRIGGER)


def downgrade() -> None:
    raise RuntimeError("adapters without a rank have no place in the older schema; restore the backup from before")
