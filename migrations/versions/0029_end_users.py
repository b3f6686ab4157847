"""end users: what a request's caller calls the user that it is for"""

import sqlalchemy as sa
from alembic import op

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for table in ("requests", "ledger_entries"):
        op.add_column(table, sa.Column("user_id", sa.Text(), nullable=True))


def downgrade() -> None:
    if op.get_bind().scalar(sa.text("SELECT EXISTS (SELECT 1 FROM ledger_entries WHERE user_id IS NOT NULL)")):
        raise RuntimeError("ledger entries have users, which their hashes cover; restore the backup before the upgrade")
    for table in ("ledger_entries", "requests"):
        op.drop_column(table, "user_id")
