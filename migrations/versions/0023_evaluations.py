"""evaluations of revisions"""

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
TEXTS = ("id", "tenant_id", "project_id", "owner", "adapter", "models", "file_id", "batch_id", "grader", "state")


def upgrade() -> None:
    op.create_table(
        "evaluations",
        *(sa.Column(name, sa.Text(), nullable=False) for name in TEXTS),
        *(sa.Column(name, sa.Text(), nullable=True) for name in ("server_id", "result", "error")),
        *(sa.Column(name, BIG, nullable=False) for name in ("attempts", "created_at")),
        sa.Column("finished_at", BIG, nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_evaluations"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_evaluations_tenant_id"),
        sa.ForeignKeyConstraint(
            ["tenant_id", "project_id"],
            ["projects.tenant_id", "projects.id"],
            name="fk_evaluations_tenant_id_project_id",
        ),
        sa.CheckConstraint("state IN ('running', 'completed', 'failed')", name=op.f("ck_evaluations_state")),
    )
    op.create_index("ix_evaluations_tenant_id_adapter", "evaluations", ["tenant_id", "adapter", "created_at"])
    op.create_index("ix_evaluations_state", "evaluations", ["state"])


def downgrade() -> None:
    op.drop_table("evaluations")
