"""lookups: a request records whether it holds anything of limits or budgets, or has an idempotency key"""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Mark older requests as possibly holding something, so that they are looked up."""
    for name in ("has_holds", "has_claim"):
        op.add_column("requests", sa.Column(name, sa.Boolean(), nullable=False, server_default=sa.true()))


def downgrade() -> None:
    for name in ("has_holds", "has_claim"):
        op.drop_column("requests", name)
