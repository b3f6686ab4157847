"""tokens of images in the ledger and in its daily sums"""

from alembic import op

revision = "0046"
down_revision = "0045"
branch_labels = None
depends_on = None

LEDGER, DAYS = "ledger_entries", "daily_usage"
CHECK = (
    "kind = 'correction' OR (image_tokens BETWEEN 0 AND input_tokens - cached_tokens"
    " AND waived_image_tokens BETWEEN 0 AND waived_input_tokens - waived_cached_tokens)"
)


def upgrade() -> None:
    kind = "INTEGER" if op.get_bind().dialect.name == "sqlite" else "BIGINT"
    for table in (LEDGER, DAYS):
        op.execute(f"ALTER TABLE {table} ADD COLUMN image_tokens {kind} DEFAULT 0 NOT NULL")
    op.execute(f"ALTER TABLE {DAYS} ADD COLUMN waived_image_tokens {kind} DEFAULT 0 NOT NULL")
    # with the column, because SQLite adds no constraint to a table without making it anew
    op.execute(
        f"ALTER TABLE {LEDGER} ADD COLUMN waived_image_tokens {kind} DEFAULT 0 NOT NULL"
        f" CONSTRAINT ck_ledger_entries_images CHECK ({CHECK})"
    )


def downgrade() -> None:
    used = "SELECT 1 FROM ledger_entries WHERE image_tokens <> 0 OR waived_image_tokens <> 0"
    if op.get_bind().exec_driver_sql(used).first():
        raise RuntimeError("the ledger has tokens of images; restore the backup that was made before the upgrade")
    for table in (LEDGER, DAYS):
        for name in ("waived_image_tokens", "image_tokens"):
            op.execute(f"ALTER TABLE {table} DROP COLUMN {name}")
