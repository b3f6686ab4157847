"""keys know the chain of rotations that they are in, and the keys or members that made them"""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Older keys begin their own chain: limits that a rotation has dropped since were noticed and set again, or not."""
    with op.batch_alter_table("keys") as keys:
        keys.add_column(sa.Column("lineage", sa.Text(), nullable=True))
    op.execute("UPDATE keys SET lineage = id")
    with op.batch_alter_table("keys") as keys:
        keys.alter_column("lineage", existing_type=sa.Text(), nullable=False)


def downgrade() -> None:
    with op.batch_alter_table("keys") as keys:
        keys.drop_column("lineage")
