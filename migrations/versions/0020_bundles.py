"""revisions have a bundle, and uploads name the files that they did not take"""

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("revisions", sa.Column("bundle", sa.Text(), nullable=True))
    op.add_column("uploads", sa.Column("ignored", sa.Text(), nullable=True))


def downgrade() -> None:
    op.drop_column("uploads", "ignored")
    op.drop_column("revisions", "bundle")
