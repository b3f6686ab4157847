"""batches: the expiry of their output files"""

import sqlalchemy as sa
from alembic import op

revision = "0036"
down_revision = "0035"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.add_column("batches", sa.Column("output_seconds", BIG, nullable=True))


def downgrade() -> None:
    op.drop_column("batches", "output_seconds")
