"""files and batches"""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def text(name: str, *, nullable: bool = False) -> sa.Column[str]:
    return sa.Column(name, sa.Text(), nullable=nullable)


def big(name: str, *, nullable: bool = False) -> sa.Column[int]:
    return sa.Column(name, BIG, nullable=nullable)


def upgrade() -> None:
    op.create_table(
        "files",
        *map(text, ("id", "tenant_id", "project_id", "owner", "purpose", "filename")),
        *map(big, ("size", "created_at", "expires_at")),
        sa.PrimaryKeyConstraint("id", name="pk_files"),
        sa.UniqueConstraint("tenant_id", "id", name="uq_files_tenant_id_id"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_files_tenant_id"),
        sa.ForeignKeyConstraint(
            ["tenant_id", "project_id"], ["projects.tenant_id", "projects.id"], name="fk_files_tenant_id_project_id"
        ),
    )
    op.create_index("ix_files_tenant_id_created_at", "files", ["tenant_id", "created_at"])
    op.create_index("ix_files_expires_at", "files", ["expires_at"])
    op.create_table(
        "batches",
        *map(text, ("id", "tenant_id", "project_id", "owner", "endpoint", "input_file_id", "completion_window")),
        *map(text, ("tags", "state")),
        text("server_id", nullable=True),
        *map(big, ("attempts", "lines", "flushed", "completed", "failed")),
        *(text(name, nullable=True) for name in ("errors", "output_file_id", "error_file_id")),
        *map(big, ("created_at", "expires_at")),
        *(big(name, nullable=True) for name in ("in_progress_at", "finalizing_at", "cancelling_at", "finished_at")),
        sa.PrimaryKeyConstraint("id", name="pk_batches"),
        sa.UniqueConstraint("tenant_id", "id", name="uq_batches_tenant_id_id"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_batches_tenant_id"),
        sa.ForeignKeyConstraint(
            ["tenant_id", "project_id"], ["projects.tenant_id", "projects.id"], name="fk_batches_tenant_id_project_id"
        ),
        sa.CheckConstraint(
            "state IN ('validating', 'in_progress', 'finalizing', 'cancelling',"
            " 'completed', 'failed', 'expired', 'cancelled')",
            name=op.f("ck_batches_state"),
        ),
        sa.CheckConstraint("completed + failed = flushed AND flushed <= lines", name=op.f("ck_batches_counts")),
    )
    op.create_index("ix_batches_tenant_id_created_at", "batches", ["tenant_id", "created_at"])
    op.create_index("ix_batches_state", "batches", ["state"])
    op.create_table(
        "batch_chunks",
        text("batch_id"),
        big("start"),
        text("object"),
        sa.PrimaryKeyConstraint("batch_id", "start", name="pk_batch_chunks"),
        sa.ForeignKeyConstraint(["batch_id"], ["batches.id"], name="fk_batch_chunks_batch_id", ondelete="CASCADE"),
    )


def downgrade() -> None:
    op.drop_table("batch_chunks")
    op.drop_table("batches")
    op.drop_table("files")
