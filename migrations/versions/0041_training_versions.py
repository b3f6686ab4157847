"""versions of adapters that trainers push"""

import sqlalchemy as sa
from alembic import op

revision = "0041"
down_revision = "0040"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "training_versions",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("series", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("number", BIG, nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("rank", BIG, nullable=False),
        sa.Column("size_bytes", BIG, nullable=False),
        sa.Column("base", sa.Text(), nullable=False),
        sa.Column("base_model", sa.Text(), nullable=False),
        sa.Column("pushed_by", sa.Text(), nullable=False),
        sa.Column("created_at", BIG, nullable=False),
        sa.Column("parity", sa.Text(), nullable=True),
        sa.Column("parity_detail", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_training_versions_tenant_id"),
        sa.PrimaryKeyConstraint("id", name="pk_training_versions"),
        sa.UniqueConstraint("tenant_id", "name", "number", name="uq_training_versions_tenant_id_name_number"),
    )
    op.create_index("ix_training_versions_digest", "training_versions", ["digest"])
    op.create_index("ix_training_versions_created_at", "training_versions", ["created_at"])


def downgrade() -> None:
    op.drop_table("training_versions")
