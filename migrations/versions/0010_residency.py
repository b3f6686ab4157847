"""residency: the time up to which a pin is billed"""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0007"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.add_column("adapter_pins", sa.Column("counted_until", BIG, nullable=True))


def downgrade() -> None:
    op.drop_column("adapter_pins", "counted_until")
