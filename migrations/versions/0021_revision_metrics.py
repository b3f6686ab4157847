"""metrics of revisions by the hour, and feedback on answers"""

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
COUNTED = (
    *("completed", "cancelled", "failed", "refused", "stop", "length", "abort"),
    *("prompt_tokens", "output_tokens", "decode_tokens", "decode_us"),
    *(f"first_token_{number}" for number in range(16)),
)


def upgrade() -> None:
    op.create_table(
        "revision_hours",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        *(sa.Column(name, BIG, nullable=False) for name in ("hour", *COUNTED)),
        sa.PrimaryKeyConstraint("tenant_id", "model", "hour", name="pk_revision_hours"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_revision_hours_tenant_id"),
    )
    op.create_index("ix_revision_hours_hour", "revision_hours", ["hour"])
    op.create_table(
        "request_feedback",
        *(sa.Column(name, sa.Text(), nullable=False) for name in ("request_id", "tenant_id", "model")),
        sa.Column("score", BIG, nullable=False),
        sa.Column("label", sa.Text(), nullable=True),
        sa.Column("created_at", BIG, nullable=False),
        sa.PrimaryKeyConstraint("request_id", name="pk_request_feedback"),
        sa.ForeignKeyConstraint(["request_id"], ["requests.id"], name="fk_request_feedback_request_id"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_request_feedback_tenant_id"),
    )
    op.create_index("ix_request_feedback_tenant_id_model", "request_feedback", ["tenant_id", "model", "created_at"])


def downgrade() -> None:
    op.drop_table("request_feedback")
    op.drop_table("revision_hours")
