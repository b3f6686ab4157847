"""migrations of adapters between bases"""

import sqlalchemy as sa
from alembic import op

revision = "0034"
down_revision = "0033"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def _texts(*names: str, nullable: bool = False) -> list[sa.Column]:
    return [sa.Column(name, sa.Text(), nullable=nullable) for name in names]


def _numbers(*names: str, nullable: bool = False) -> list[sa.Column]:
    return [sa.Column(name, BIG, nullable=nullable) for name in names]


def upgrade() -> None:
    op.create_table(
        "base_migrations",
        *_texts("id", "source", "target", "created_by", "state"),
        *_texts("tenant", "adapter", "error", "server_id", nullable=True),
        *_numbers("evaluates", "attempts", "created_at"),
        *_numbers("finished_at", nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_base_migrations"),
        sa.CheckConstraint(
            "state IN ('running', 'completed', 'cancelled', 'failed')", name=op.f("ck_base_migrations_state")
        ),
    )
    op.create_index("ix_base_migrations_state", "base_migrations", ["state"])
    op.create_table(
        "base_migration_items",
        *_texts("migration_id", "tenant_id", "tenant_name", "adapter", "revision_id", "digest", "outcome"),
        *_texts("code", "reason", "evaluation_id", nullable=True),
        *_numbers("position", "number", "weight"),
        *_numbers("new_number", nullable=True),
        sa.PrimaryKeyConstraint("migration_id", "position", name="pk_base_migration_items"),
        sa.ForeignKeyConstraint(["migration_id"], ["base_migrations.id"], name="fk_base_migration_items_migration_id"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_base_migration_items_tenant_id"),
        sa.CheckConstraint(
            "outcome IN ('pending', 'evaluating', 'fits', 'needs_retraining', 'refused')",
            name=op.f("ck_base_migration_items_outcome"),
        ),
    )
    op.create_index("ix_base_migration_items_tenant_id", "base_migration_items", ["tenant_id"])


def downgrade() -> None:
    op.drop_table("base_migration_items")
    op.drop_table("base_migrations")
