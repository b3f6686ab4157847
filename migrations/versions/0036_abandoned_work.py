"""work of requests whose clients left counts against budgets; batches: when their output files expire"""

import sqlalchemy as sa
from alembic import op

revision = "0036"
down_revision = "0035"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.add_column("batches", sa.Column("output_seconds", BIG, nullable=True))
    op.add_column("budget_spendings", sa.Column("abandoned", BIG, nullable=False, server_default="0"))


def downgrade() -> None:
    op.drop_column("budget_spendings", "abandoned")
    op.drop_column("batches", "output_seconds")
