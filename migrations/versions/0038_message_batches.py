"""batches: the number of lines that were not run"""

import sqlalchemy as sa
from alembic import op

revision = "0038"
down_revision = "0037"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.add_column("batches", sa.Column("not_run", BIG, nullable=False, server_default="0"))


def downgrade() -> None:
    op.drop_column("batches", "not_run")
