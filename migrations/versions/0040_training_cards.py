"""the fine-tuning job that has made a revision"""

import sqlalchemy as sa
from alembic import op

revision = "0040"
down_revision = "0039"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("revisions", sa.Column("training", sa.Text(), nullable=True))


def downgrade() -> None:
    op.drop_column("revisions", "training")
