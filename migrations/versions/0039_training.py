"""fine-tuning jobs, their events and their checkpoints"""

import sqlalchemy as sa
from alembic import op

revision = "0039"
down_revision = "0038"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "training_jobs",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("base_model", sa.Text(), nullable=False),
        sa.Column("adapter_digest", sa.Text(), nullable=True),
        sa.Column("template_digest", sa.Text(), nullable=False),
        sa.Column("context", BIG, nullable=False),
        sa.Column("adapter", sa.Text(), nullable=False),
        sa.Column("training_file_id", sa.Text(), nullable=False),
        sa.Column("validation_file_id", sa.Text(), nullable=True),
        sa.Column("options", sa.Text(), nullable=False),
        sa.Column("tags", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("wanted", sa.Text(), nullable=True),
        sa.Column("server_id", sa.Text(), nullable=True),
        sa.Column("attempts", BIG, nullable=False),
        sa.Column("trainer_id", sa.Text(), nullable=True),
        sa.Column("trainer_attempts", BIG, nullable=False),
        sa.Column("request_id", sa.Text(), nullable=True),
        sa.Column("plan", sa.Text(), nullable=True),
        sa.Column("trained_tokens", BIG, nullable=False),
        sa.Column("outcome", sa.Text(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("result", sa.Text(), nullable=True),
        sa.Column("created_at", BIG, nullable=False),
        sa.Column("started_at", BIG, nullable=True),
        sa.Column("finished_at", BIG, nullable=True),
        sa.Column("estimated_finish", BIG, nullable=True),
        sa.CheckConstraint(
            "state IN ('validating_files', 'queued', 'running', 'paused', 'finishing',"
            " 'succeeded', 'failed', 'cancelled')",
            name="state",
        ),
        sa.CheckConstraint("wanted IN ('pause', 'cancel')", name="wanted"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_training_jobs_tenant_id"),
        sa.ForeignKeyConstraint(
            ["tenant_id", "project_id"],
            ["projects.tenant_id", "projects.id"],
            name="fk_training_jobs_tenant_id_project_id",
        ),
        sa.PrimaryKeyConstraint("id", name="pk_training_jobs"),
        sa.UniqueConstraint("tenant_id", "id", name="uq_training_jobs_tenant_id_id"),
    )
    op.create_index("ix_training_jobs_tenant_id_created_at", "training_jobs", ["tenant_id", "created_at"])
    op.create_index("ix_training_jobs_state", "training_jobs", ["state"])
    op.create_table(
        "training_events",
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("number", BIG, nullable=False),
        sa.Column("level", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("data", sa.Text(), nullable=True),
        sa.Column("created_at", BIG, nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["training_jobs.id"], name="fk_training_events_job_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "number", name="pk_training_events"),
    )
    op.create_table(
        "training_checkpoints",
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("step", BIG, nullable=False),
        sa.Column("files", sa.Text(), nullable=False),
        sa.Column("is_epoch", sa.Boolean(), nullable=False),
        sa.Column("trained_tokens", BIG, nullable=False),
        sa.Column("metrics", sa.Text(), nullable=False),
        sa.Column("result", sa.Text(), nullable=True),
        sa.Column("created_at", BIG, nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"], ["training_jobs.id"], name="fk_training_checkpoints_job_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_id", "step", name="pk_training_checkpoints"),
    )


def downgrade() -> None:
    op.drop_table("training_checkpoints")
    op.drop_table("training_events")
    op.drop_table("training_jobs")
