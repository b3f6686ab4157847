"""sums of the ledger by day; servers fill them in pieces"""

import sqlalchemy as sa
from alembic import op

revision = "0035"
down_revision = "0034"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
SEGMENT = ("first_sequence", "last_sequence", "first_day", "last_day", "earliest_subject")
NUMBERS = ("segment", "day", "created_day")
TEXTS = ("base_model", "tier", "project_id", "key_id", "model")
QUANTITIES = (
    "requests",
    "input_tokens",
    "cached_tokens",
    "output_tokens",
    "waived_input_tokens",
    "waived_cached_tokens",
    "waived_output_tokens",
    "adapter_load",
    "adapter_byte_seconds",
    "adapter_resident_byte_seconds",
)


def upgrade() -> None:
    op.create_table(
        "usage_segments",
        *(sa.Column(name, BIG, nullable=False) for name in SEGMENT),
        sa.PrimaryKeyConstraint("first_sequence", name="pk_usage_segments"),
        sa.CheckConstraint(
            "first_sequence <= last_sequence AND first_day <= last_day", name=op.f("ck_usage_segments_order")
        ),
    )
    op.create_table(
        "daily_usage",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        *(sa.Column(name, BIG, nullable=False) for name in NUMBERS),
        *(sa.Column(name, sa.Text(), nullable=False) for name in TEXTS),
        *(sa.Column(name, BIG, nullable=False) for name in QUANTITIES),
        sa.PrimaryKeyConstraint("tenant_id", *NUMBERS, *TEXTS, name="pk_daily_usage"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_daily_usage_tenant_id"),
        sqlite_with_rowid=False,
    )


def downgrade() -> None:
    op.drop_table("daily_usage")
    op.drop_table("usage_segments")
