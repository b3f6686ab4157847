"""judges: tenants that may use them, and their keys of evaluations that are under way"""

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("tenants", sa.Column("allow_judges", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.add_column("evaluations", sa.Column("judge_key", sa.LargeBinary(), nullable=True))


def downgrade() -> None:
    op.drop_column("evaluations", "judge_key")
    op.drop_column("tenants", "allow_judges")
