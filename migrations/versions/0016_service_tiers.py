"""service tiers: those that a tier allows its requests to ask for"""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("tiers", sa.Column("service_tiers", sa.Text(), nullable=False, server_default="batch flex"))


def downgrade() -> None:
    op.drop_column("tiers", "service_tiers")
