"""limits, budgets, their holds, alerts, and idempotency keys"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
UNDELIVERED = sa.text("delivered_at IS NULL")


def upgrade() -> None:
    create_limits()
    create_budgets()
    create_alerts()
    create_claims()


def downgrade() -> None:
    for table in ("idempotency_claims", "budget_alerts", "budget_holds", "budget_spendings", "budgets"):
        op.drop_table(table)
    for table in ("limit_holds", "limit_counters", "limits"):
        op.drop_table(table)


def create_limits() -> None:
    op.create_table(
        "limits",
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=True),
        sa.Column("value", BIG, nullable=False),
        sa.PrimaryKeyConstraint("subject", "name", name="pk_limits"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_limits_tenant_id"),
        sa.CheckConstraint("value >= 0", name=op.f("ck_limits_value")),
    )
    op.create_table(
        "limit_counters",
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("requests_free", BIG, nullable=False),
        sa.Column("requests_at", BIG, nullable=False),
        sa.Column("tokens_free", BIG, nullable=False),
        sa.Column("tokens_at", BIG, nullable=False),
        sa.Column("running", BIG, nullable=False),
        sa.PrimaryKeyConstraint("subject", name="pk_limit_counters"),
        sa.CheckConstraint("running >= 0", name=op.f("ck_limit_counters_running")),
    )
    op.create_table(
        "limit_holds",
        sa.Column("request_id", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("tokens", BIG, nullable=False),
        sa.PrimaryKeyConstraint("request_id", "subject", name="pk_limit_holds"),
    )


def create_budgets() -> None:
    op.create_table(
        "budgets",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("period", sa.Text(), nullable=False),
        sa.Column("amount", BIG, nullable=False),
        sa.Column("thresholds", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_budgets"),
        sa.UniqueConstraint("subject", "period", name="uq_budgets_subject_period"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_budgets_tenant_id"),
        sa.CheckConstraint("period IN ('day', 'month', 'total')", name=op.f("ck_budgets_period")),
        sa.CheckConstraint("amount >= 0", name=op.f("ck_budgets_amount")),
    )
    op.create_table(
        "budget_spendings",
        sa.Column("budget_id", sa.Text(), nullable=False),
        sa.Column("start", BIG, autoincrement=False, nullable=False),
        sa.Column("spent", BIG, nullable=False),
        sa.Column("held", BIG, nullable=False),
        sa.PrimaryKeyConstraint("budget_id", "start", name="pk_budget_spendings"),
        sa.ForeignKeyConstraint(
            ["budget_id"], ["budgets.id"], name="fk_budget_spendings_budget_id", ondelete="CASCADE"
        ),
        sa.CheckConstraint("spent >= 0 AND held >= 0", name=op.f("ck_budget_spendings_quantities")),
    )
    op.create_table(
        "budget_holds",
        sa.Column("request_id", sa.Text(), nullable=False),
        sa.Column("budget_id", sa.Text(), nullable=False),
        sa.Column("start", BIG, nullable=False),
        sa.Column("amount", BIG, nullable=False),
        sa.Column("tier", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("request_id", "budget_id", name="pk_budget_holds"),
        sa.ForeignKeyConstraint(["budget_id"], ["budgets.id"], name="fk_budget_holds_budget_id", ondelete="CASCADE"),
    )


def create_alerts() -> None:
    op.create_table(
        "budget_alerts",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("budget_id", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("period", sa.Text(), nullable=False),
        sa.Column("start", BIG, nullable=False),
        sa.Column("percent", BIG, nullable=False),
        sa.Column("amount", BIG, nullable=False),
        sa.Column("spent", BIG, nullable=False),
        sa.Column("created_at", BIG, nullable=False),
        sa.Column("delivered_at", BIG, nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_budget_alerts"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_budget_alerts_tenant_id"),
    )
    op.create_index(
        "ix_budget_alerts_undelivered",
        "budget_alerts",
        ["created_at"],
        sqlite_where=UNDELIVERED,
        postgresql_where=UNDELIVERED,
    )


def create_claims() -> None:
    op.create_table(
        "idempotency_claims",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("fingerprint", sa.Text(), nullable=False),
        sa.Column("request_id", sa.Text(), nullable=False),
        sa.Column("answer", sa.LargeBinary(), nullable=True),
        sa.Column("expires_at", BIG, nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "key_id", "name", name="pk_idempotency_claims"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_idempotency_claims_tenant_id"),
    )
    op.create_index("ix_idempotency_claims_request_id", "idempotency_claims", ["request_id"])
    op.create_index("ix_idempotency_claims_expires_at", "idempotency_claims", ["expires_at"])
