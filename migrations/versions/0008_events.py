"""events of adapters, and the webhooks that receive them"""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0005"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
PENDING = sa.text("state = 'pending'")
WITH_ADAPTER = sa.text("adapter_digest IS NOT NULL")


def upgrade() -> None:
    create_events()
    create_endpoints()
    create_deliveries()
    op.create_index(
        "ix_requests_adapter_digest_created_at",
        "requests",
        ["adapter_digest", "created_at"],
        sqlite_where=WITH_ADAPTER,
        postgresql_where=WITH_ADAPTER,
    )


def downgrade() -> None:
    op.drop_index("ix_requests_adapter_digest_created_at", "requests")
    for table in ("webhook_deliveries", "webhook_endpoints", "adapter_events"):
        op.drop_table(table)


def create_events() -> None:
    op.create_table(
        "adapter_events",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("adapter", sa.Text(), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("created_at", BIG, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_adapter_events"),
        sa.UniqueConstraint("tenant_id", "id", name="uq_adapter_events_tenant_id_id"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_adapter_events_tenant_id"),
    )
    op.create_index("ix_adapter_events_tenant_id_created_at", "adapter_events", ["tenant_id", "created_at"])
    op.create_index("ix_adapter_events_created_at", "adapter_events", ["created_at"])


def create_endpoints() -> None:
    op.create_table(
        "webhook_endpoints",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("events", sa.Text(), nullable=False),
        sa.Column("created_at", BIG, nullable=False),
        sa.Column("failures", BIG, nullable=False),
        sa.Column("failing_since", BIG, nullable=True),
        sa.Column("quiet_until", BIG, nullable=False),
        sa.Column("disabled_at", BIG, nullable=True),
        sa.Column("disabled_because", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_webhook_endpoints"),
        sa.UniqueConstraint("tenant_id", "id", name="uq_webhook_endpoints_tenant_id_id"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_webhook_endpoints_tenant_id"),
    )


def create_deliveries() -> None:
    op.create_table(
        "webhook_deliveries",
        sa.Column("endpoint_id", sa.Text(), nullable=False),
        sa.Column("event_id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("attempts", BIG, nullable=False),
        sa.Column("next_attempt_at", BIG, nullable=False),
        sa.Column("lease_until", BIG, nullable=False),
        sa.Column("status", BIG, nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("updated_at", BIG, nullable=False),
        sa.PrimaryKeyConstraint("endpoint_id", "event_id", name="pk_webhook_deliveries"),
        sa.ForeignKeyConstraint(
            ["tenant_id", "endpoint_id"],
            ["webhook_endpoints.tenant_id", "webhook_endpoints.id"],
            name="fk_webhook_deliveries_tenant_id_endpoint_id",
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id", "event_id"],
            ["adapter_events.tenant_id", "adapter_events.id"],
            name="fk_webhook_deliveries_tenant_id_event_id",
            ondelete="CASCADE",
        ),
        sa.CheckConstraint("state IN ('pending', 'delivered', 'failed')", name=op.f("ck_webhook_deliveries_state")),
    )
    op.create_index(
        "ix_webhook_deliveries_due",
        "webhook_deliveries",
        ["next_attempt_at"],
        sqlite_where=PENDING,
        postgresql_where=PENDING,
    )
    op.create_index("ix_webhook_deliveries_event_id", "webhook_deliveries", ["event_id"])
