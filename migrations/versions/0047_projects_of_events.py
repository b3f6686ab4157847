"""the project of a batch's or a fine-tuning job's event, and of the key that made a webhook"""

from alembic import op

revision = "0047"
down_revision = "0046"
branch_labels = None
depends_on = None

TABLES = ("adapter_events", "webhook_endpoints")


def upgrade() -> None:
    for table in TABLES:
        op.execute(f"ALTER TABLE {table} ADD COLUMN project_id TEXT")


def downgrade() -> None:
    for table in TABLES:
        op.execute(f"ALTER TABLE {table} DROP COLUMN project_id")
