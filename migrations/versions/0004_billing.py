"""billing: plans, prices, subscriptions, periods, invoices, and the progress of exports"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
APPEND_ONLY = ("plans", "prices", "subscriptions", "periods", "invoices")


def upgrade() -> None:
    create_prices()
    create_periods()
    create_sinks()
    for table in APPEND_ONLY:
        forbid_rewriting(table)


def downgrade() -> None:
    raise RuntimeError("invoices lose nothing by a command; restore the backup that was made before the upgrade")


def text(name: str, *, nullable: bool = False) -> sa.Column[str]:
    return sa.Column(name, sa.Text(), nullable=nullable)


def big(name: str, *, nullable: bool = False) -> sa.Column[int]:
    return sa.Column(name, BIG, nullable=nullable)


def create_prices() -> None:
    op.create_table(
        "plans",
        *map(text, ("id", "name", "currency")),
        *map(big, ("minimum", "created_at")),
        sa.PrimaryKeyConstraint("id", name="pk_plans"),
        sa.UniqueConstraint("name", name="uq_plans_name"),
        sa.CheckConstraint("minimum >= 0", name=op.f("ck_plans_minimum")),
    )
    op.create_table(
        "prices",
        *map(text, ("id", "plan_id", "meter", "base_model", "tier")),
        big("valid_from"),
        big("valid_until", nullable=True),
        big("per"),
        text("steps"),
        big("created_at"),
        sa.PrimaryKeyConstraint("id", name="pk_prices"),
        sa.ForeignKeyConstraint(["plan_id"], ["plans.id"], name="fk_prices_plan_id"),
        sa.UniqueConstraint(
            "plan_id",
            "meter",
            "base_model",
            "tier",
            "valid_from",
            name="uq_prices_plan_id_meter_base_model_tier_valid_from",
        ),
        sa.CheckConstraint("per >= 1", name=op.f("ck_prices_per")),
    )
    op.create_table(
        "subscriptions",
        text("tenant_id"),
        big("valid_from"),
        text("plan_id"),
        big("created_at"),
        sa.PrimaryKeyConstraint("tenant_id", "valid_from", name="pk_subscriptions"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_subscriptions_tenant_id"),
        sa.ForeignKeyConstraint(["plan_id"], ["plans.id"], name="fk_subscriptions_plan_id"),
    )


def create_periods() -> None:
    op.create_table(
        "periods",
        text("id"),
        *map(big, ("starts_at", "ends_at", "first_sequence", "last_sequence")),
        text("digest"),
        big("closed_at"),
        sa.PrimaryKeyConstraint("id", name="pk_periods"),
        sa.UniqueConstraint("first_sequence", "ends_at", name="uq_periods_first_sequence_ends_at"),
        sa.CheckConstraint("last_sequence >= first_sequence - 1", name=op.f("ck_periods_range")),
    )
    op.create_table(
        "invoices",
        *map(text, ("id", "tenant_id", "period_id", "currency")),
        big("total"),
        *map(text, ("document", "digest")),
        big("created_at"),
        sa.PrimaryKeyConstraint("id", name="pk_invoices"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_invoices_tenant_id"),
        sa.ForeignKeyConstraint(["period_id"], ["periods.id"], name="fk_invoices_period_id"),
    )
    op.create_index("ix_invoices_period_id", "invoices", ["period_id"])


def create_sinks() -> None:
    op.create_table(
        "sinks",
        text("name"),
        big("cursor"),
        big("trying_until", nullable=True),
        big("trying_since", nullable=True),
        text("lease_holder", nullable=True),
        big("lease_until"),
        sa.PrimaryKeyConstraint("name", name="pk_sinks"),
    )
    op.create_table(
        "parked_events",
        *map(text, ("sink", "event_id")),
        big("sequence"),
        text("reason"),
        big("parked_at"),
        sa.PrimaryKeyConstraint("sink", "event_id", name="pk_parked_events"),
    )


def forbid_rewriting(table: str) -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute(
            f"CREATE TRIGGER {table}_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON {table}"
            f" FOR EACH STATEMENT EXECUTE FUNCTION loramux_refuse('{table} is append-only')"
        )
        return
    for act in ("update", "delete"):
        op.execute(
            f"CREATE TRIGGER {table}_no_{act} BEFORE {act.upper()} ON {table}"
            f" BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END"
        )
