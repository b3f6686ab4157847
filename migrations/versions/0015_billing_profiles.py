"""tenants have billing addresses, and a plan of a month that is not closed can be taken back"""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
CLOSED = "OLD.valid_from < (SELECT COALESCE(MAX(ends_at), 0) FROM periods)"
REFUSAL = "subscriptions is append-only: the month is closed"


def upgrade() -> None:
    op.create_table(
        "billing_profiles",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("address", sa.Text(), nullable=False),
        sa.Column("tax_id", sa.Text(), nullable=True),
        sa.Column("tax_exempt", sa.Boolean(), nullable=False),
        sa.Column("updated_at", BIG, nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", name="pk_billing_profiles"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_billing_profiles_tenant_id"),
    )
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP TRIGGER subscriptions_append_only ON subscriptions")
        op.execute(
            "CREATE TRIGGER subscriptions_append_only BEFORE UPDATE OR TRUNCATE ON subscriptions"
            " FOR EACH STATEMENT EXECUTE FUNCTION loramux_refuse('subscriptions is append-only')"
        )
        op.execute(
            "CREATE FUNCTION loramux_refuse_closed_subscription() RETURNS trigger AS $$ BEGIN"
            f" IF {CLOSED} THEN RAISE EXCEPTION '{REFUSAL}' USING ERRCODE = 'integrity_constraint_violation'; END IF;"
            " RETURN OLD; END $$ LANGUAGE plpgsql"
        )
        op.execute(
            "CREATE TRIGGER subscriptions_closed BEFORE DELETE ON subscriptions"
            " FOR EACH ROW EXECUTE FUNCTION loramux_refuse_closed_subscription()"
        )
        return
    op.execute("DROP TRIGGER subscriptions_no_delete")
    op.execute(
        f"CREATE TRIGGER subscriptions_no_delete BEFORE DELETE ON subscriptions WHEN {CLOSED}"
        f" BEGIN SELECT RAISE(ABORT, '{REFUSAL}'); END"
    )


def downgrade() -> None:
    op.drop_table("billing_profiles")
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP TRIGGER subscriptions_closed ON subscriptions")
        op.execute("DROP FUNCTION loramux_refuse_closed_subscription()")
        op.execute("DROP TRIGGER subscriptions_append_only ON subscriptions")
        op.execute(
            "CREATE TRIGGER subscriptions_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON subscriptions"
            " FOR EACH STATEMENT EXECUTE FUNCTION loramux_refuse('subscriptions is append-only')"
        )
        return
    op.execute("DROP TRIGGER subscriptions_no_delete")
    op.execute(
        "CREATE TRIGGER subscriptions_no_delete BEFORE DELETE ON subscriptions"
        " BEGIN SELECT RAISE(ABORT, 'subscriptions is append-only'); END"
    )
