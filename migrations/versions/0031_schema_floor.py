"""which older releases may use the database; keys that 0.1.0 makes beside this release begin their own lineage"""

import sqlalchemy as sa
from alembic import op

revision = "0031"
down_revision = "0030"
branch_labels = None
depends_on = None

# A server of 0.1.0 goes on while the database is migrated, and knows no lineage: see docs/operations/deploy.md.
# Version 0.3 may take the trigger and the default away.
OWN_LINEAGE = "UPDATE keys SET lineage = NEW.id WHERE id = NEW.id"
SQLITE = (f"CREATE TRIGGER keys_own_lineage AFTER INSERT ON keys WHEN NEW.lineage = '' BEGIN {OWN_LINEAGE}; END",)
POSTGRESQL = (
    "CREATE FUNCTION loramux_own_lineage() RETURNS trigger LANGUAGE plpgsql AS"
    " $$ BEGIN NEW.lineage := NEW.id; RETURN NEW; END $$",
    "CREATE TRIGGER keys_own_lineage BEFORE INSERT ON keys FOR EACH ROW WHEN (NEW.lineage = '')"
    " EXECUTE FUNCTION loramux_own_lineage()",
)


def upgrade() -> None:
    """The floor is this revision: releases before it do not look at a floor."""
    op.create_table("schema_floor", sa.Column("revision", sa.Text(), nullable=False, primary_key=True))
    op.execute("INSERT INTO schema_floor (revision) VALUES ('0031')")
    with op.batch_alter_table("keys") as keys:
        keys.alter_column("lineage", existing_type=sa.Text(), existing_nullable=False, server_default=sa.text("''"))
    for statement in POSTGRESQL if op.get_bind().dialect.name == "postgresql" else SQLITE:
        op.execute(statement)


def downgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP TRIGGER keys_own_lineage ON keys")
        op.execute("DROP FUNCTION loramux_own_lineage()")
    else:
        op.execute("DROP TRIGGER keys_own_lineage")
    with op.batch_alter_table("keys") as keys:
        keys.alter_column("lineage", existing_type=sa.Text(), existing_nullable=False, server_default=None)
    op.drop_table("schema_floor")
