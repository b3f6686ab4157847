"""console sessions: browsers that are signed in, and links that sign one in"""

import sqlalchemy as sa
from alembic import op

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "console_sessions",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("mac", sa.LargeBinary(), nullable=False),
        *(sa.Column(name, sa.Text(), nullable=False) for name in ("kind", "tenant_id", "holder", "project_id")),
        sa.Column("is_operator", sa.Boolean(), nullable=False),
        sa.Column("viewed", sa.Text(), nullable=False),
        *(sa.Column(name, BIG, nullable=False) for name in ("created_at", "used_at", "expires_at")),
        sa.PrimaryKeyConstraint("id", name="pk_console_sessions"),
        sa.UniqueConstraint("mac", name="uq_console_sessions_mac"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_console_sessions_tenant_id"),
        sa.ForeignKeyConstraint(
            ["tenant_id", "project_id"],
            ["projects.tenant_id", "projects.id"],
            name="fk_console_sessions_tenant_id_project_id",
        ),
    )
    op.create_index("ix_console_sessions_holder", "console_sessions", ["holder"])


def downgrade() -> None:
    op.drop_table("console_sessions")
