"""a check value of the pepper, so that a start without the right one is refused"""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Empty until the next start, which stores the value of the pepper that it finds."""
    op.create_table(
        "pepper_check",
        sa.Column("id", BIG, autoincrement=False, nullable=False),
        sa.Column("mac", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_pepper_check"),
        sa.CheckConstraint("id = 1", name=op.f("ck_pepper_check_single")),
    )


def downgrade() -> None:
    op.drop_table("pepper_check")
