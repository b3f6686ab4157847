"""upload sessions, their files and the files' parts"""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0009"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "uploads",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("adapter", sa.Text(), nullable=False),
        sa.Column("promote", sa.Boolean(), nullable=False),
        sa.Column("source", sa.Text(), nullable=True),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("server_id", sa.Text(), nullable=True),
        sa.Column("attempts", BIG, nullable=False),
        sa.Column("revision", BIG, nullable=True),
        sa.Column("digest", sa.Text(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("report", sa.Text(), nullable=True),
        sa.Column("created_at", BIG, nullable=False),
        sa.Column("expires_at", BIG, nullable=False),
        sa.Column("finished_at", BIG, nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_uploads"),
        sa.UniqueConstraint("tenant_id", "id", name="uq_uploads_tenant_id_id"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_uploads_tenant_id"),
        sa.CheckConstraint(
            "state IN ('uploading', 'validating', 'ready', 'rejected', 'expired')", name=op.f("ck_uploads_state")
        ),
        sa.CheckConstraint("(state = 'ready') = (revision IS NOT NULL)", name=op.f("ck_uploads_revision")),
    )
    op.create_index("ix_uploads_tenant_id_created_at", "uploads", ["tenant_id", "created_at"])
    op.create_index("ix_uploads_state_expires_at", "uploads", ["state", "expires_at"])
    create_files()
    create_pieces()


def downgrade() -> None:
    for table in ("upload_pieces", "upload_files", "uploads"):
        op.drop_table(table)


def create_files() -> None:
    op.create_table(
        "upload_files",
        sa.Column("upload_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("size", BIG, nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("received", BIG, nullable=False),
        sa.PrimaryKeyConstraint("upload_id", "name", name="pk_upload_files"),
        sa.ForeignKeyConstraint(
            ["tenant_id", "upload_id"],
            ["uploads.tenant_id", "uploads.id"],
            name="fk_upload_files_tenant_id_upload_id",
            ondelete="CASCADE",
        ),
        sa.CheckConstraint("received BETWEEN 0 AND size", name=op.f("ck_upload_files_received")),
    )


def create_pieces() -> None:
    op.create_table(
        "upload_pieces",
        sa.Column("upload_id", sa.Text(), nullable=False),
        sa.Column("file", sa.Text(), nullable=False),
        sa.Column("start", BIG, autoincrement=False, nullable=False),
        sa.Column("size", BIG, nullable=False),
        sa.Column("object", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("upload_id", "file", "start", name="pk_upload_pieces"),
        sa.ForeignKeyConstraint(
            ["upload_id", "file"],
            ["upload_files.upload_id", "upload_files.name"],
            name="fk_upload_pieces_upload_id_file",
            ondelete="CASCADE",
        ),
        sa.CheckConstraint("size > 0", name=op.f("ck_upload_pieces_size")),
    )
