"""the platform acts as "system", which older releases wrote as "house"."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

COLUMNS = (
    ("alias_versions", "changed_by"),
    ("adapter_pins", "pinned_by"),
    ("adapter_grants", "granted_by"),
    ("audit_entries", "actor"),
)
AUDITED = ("changed_by", "pinned_by", "granted_by")
"""Fields of the entities that the audit log shows before and after a change."""

SQLITE_TRIGGER = """CREATE TRIGGER audit_entries_no_update BEFORE UPDATE ON audit_entries
    BEGIN SELECT RAISE(ABORT, 'audit_entries is append-only'); END"""


def upgrade() -> None:
    rename_actor("house", "system")


def downgrade() -> None:
    rename_actor("system", "house")


def rename_actor(old: str, new: str) -> None:
    """Ids of keys and members have a prefix and an underscore, so neither word is anybody else's."""
    is_sqlite = op.get_bind().dialect.name == "sqlite"
    if is_sqlite:
        op.execute("DROP TRIGGER audit_entries_no_update")
    else:
        op.execute("ALTER TABLE audit_entries DISABLE TRIGGER audit_entries_append_only")
    for table, column in COLUMNS:
        change = sa.text(f"UPDATE {table} SET {column} = :new WHERE {column} = :old")  # noqa: S608  our own names
        op.get_bind().execute(change, {"old": old, "new": new})
    for field in AUDITED:
        for column in ("before", "after"):
            change = sa.text(
                f"UPDATE audit_entries SET {column} = replace({column}, :old, :new) "  # noqa: S608  our own names
                f"WHERE {column} LIKE :pattern"
            )
            texts = {"old": f'"{field}":"{old}"', "new": f'"{field}":"{new}"', "pattern": f'%"{field}":"{old}"%'}
            op.get_bind().execute(change, texts)
    if is_sqlite:
        op.execute(SQLITE_TRIGGER)
    else:
        op.execute("ALTER TABLE audit_entries ENABLE TRIGGER audit_entries_append_only")
