"""shadows: requests that also run on a candidate revision"""

import sqlalchemy as sa
from alembic import op

revision = "0030"
down_revision = "0029"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
RUNNING = sa.text("ended_at IS NULL")


def upgrade() -> None:
    op.create_table(
        "shadows",
        *(sa.Column(name, sa.Text(), nullable=False) for name in ("id", "tenant_id", "adapter_id", "created_by")),
        sa.Column("keep_outputs", sa.Boolean(), nullable=False),
        sa.Column("ended_because", sa.Text(), nullable=True),
        *(
            sa.Column(name, BIG, nullable=False)
            for name in ("revision", "share", "max_tokens_per_day", "created_at", "day", "day_tokens")
        ),
        sa.Column("ended_at", BIG, nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_shadows"),
        sa.ForeignKeyConstraint(
            ["tenant_id", "adapter_id"],
            ["adapters.tenant_id", "adapters.id"],
            name="fk_shadows_tenant_id_adapter_id",
        ),
    )
    op.create_index("ix_shadows_adapter_id", "shadows", ["adapter_id", "created_at"])
    op.create_index(
        "ix_shadows_running", "shadows", ["adapter_id"], unique=True, sqlite_where=RUNNING, postgresql_where=RUNNING
    )
    op.create_table(
        "shadow_sums",
        sa.Column("shadow_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("value", BIG, nullable=False),
        sa.PrimaryKeyConstraint("shadow_id", "name", name="pk_shadow_sums"),
        sa.ForeignKeyConstraint(["shadow_id"], ["shadows.id"], name="fk_shadow_sums_shadow_id"),
    )


def downgrade() -> None:
    op.drop_table("shadow_sums")
    op.drop_table("shadows")
