"""uploads name the caller that handed them over to the checks"""

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("uploads", sa.Column("submitter", sa.Text(), nullable=True))


def downgrade() -> None:
    op.drop_column("uploads", "submitter")
