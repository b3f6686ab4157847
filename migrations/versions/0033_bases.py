"""bases that operators added to running servers, or retired"""

import sqlalchemy as sa
from alembic import op

revision = "0033"
down_revision = "0032"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "bases",
        sa.Column("name", sa.Text(), nullable=False),
        *(sa.Column(name, sa.Text(), nullable=True) for name in ("settings", "successor")),
        sa.Column("retired_at", BIG, nullable=True),
        sa.Column("changed_at", BIG, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_bases"),
    )


def downgrade() -> None:
    op.drop_table("bases")
