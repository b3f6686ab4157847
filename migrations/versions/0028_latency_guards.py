"""canary guards that compare the time to the first token"""

import sqlalchemy as sa
from alembic import op

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("canary_guards", sa.Column("first_token_seconds", sa.Double(), nullable=True))


def downgrade() -> None:
    op.drop_column("canary_guards", "first_token_seconds")
