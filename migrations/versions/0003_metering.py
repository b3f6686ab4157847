"""metering: columns of requests and ledger entries for the bill, and the engines' own counts"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
COUNTED_BEFORE = "server_before_0003"
"""Server id for the engines before this migration, which stored no counts: the billed tokens serve as their counts."""

QUANTITIES = (
    "waived_input_tokens",
    "waived_cached_tokens",
    "waived_output_tokens",
    "adapter_load",
    "adapter_byte_seconds",
    "adapter_resident_byte_seconds",
)


def upgrade() -> None:
    is_sqlite = op.get_bind().dialect.name == "sqlite"
    extend_requests()
    if is_sqlite:
        for name in SQLITE_TRIGGERS:
            op.execute(f"DROP TRIGGER {name}")
    extend_ledger()
    for statement in SQLITE_TRIGGERS.values() if is_sqlite else POSTGRESQL_GAP_CHECK:
        op.execute(statement)
    count_engines()
    for name in ("deleted_at", "counted_until"):
        op.add_column("revisions", sa.Column(name, BIG, nullable=True))


def downgrade() -> None:
    raise RuntimeError("a ledger loses nothing by a command; restore the backup that was made before the upgrade")


def extend_requests() -> None:
    for name in ("base_model", "tier", "tags"):
        op.add_column("requests", sa.Column(name, sa.Text(), nullable=False, server_default=""))


def extend_ledger() -> None:
    with op.batch_alter_table("ledger_entries") as ledger:
        for name in ("base_model", "tier", "tags"):
            ledger.add_column(sa.Column(name, sa.Text(), nullable=False, server_default=""))
        ledger.add_column(sa.Column("project_id", sa.Text(), nullable=True))
        for name in QUANTITIES:
            ledger.add_column(sa.Column(name, BIG, nullable=False, server_default="0"))
        ledger.add_column(sa.Column("corrects", sa.Text(), nullable=True))
        ledger.add_column(sa.Column("occurred_at", BIG, nullable=True))
        for name in ("kind", "quantities", "cached"):
            ledger.drop_constraint(op.f(f"ck_ledger_entries_{name}"), type_="check")
        for name, rule in CHECKS.items():
            ledger.create_check_constraint(op.f(f"ck_ledger_entries_{name}"), rule)


def count_engines() -> None:
    op.create_table(
        "engine_counts",
        sa.Column("server_id", sa.Text(), nullable=False),
        sa.Column("base_model", sa.Text(), nullable=False),
        sa.Column("adapter_digest", sa.Text(), nullable=False),
        sa.Column("prompt_tokens", BIG, nullable=False),
        sa.Column("cached_tokens", BIG, nullable=False),
        sa.Column("output_tokens", BIG, nullable=False),
        sa.PrimaryKeyConstraint("server_id", "base_model", "adapter_digest", name="pk_engine_counts"),
    )
    op.execute(
        f"""INSERT INTO engine_counts
            SELECT '{COUNTED_BEFORE}', base_model, coalesce(adapter_digest, ''),
                   sum(input_tokens), sum(cached_tokens), sum(output_tokens)
            FROM ledger_entries GROUP BY base_model, coalesce(adapter_digest, '')"""  # noqa: S608  a constant
    )


CHECKS = {
    "kind": "kind IN ('usage', 'interrupted', 'storage', 'residency', 'correction')",
    "correction": "(corrects IS NOT NULL) = (kind = 'correction')",
    "quantities": "kind = 'correction' OR (input_tokens >= 0 AND output_tokens >= 0"
    " AND waived_input_tokens >= 0 AND waived_output_tokens >= 0 AND adapter_load >= 0"
    " AND adapter_byte_seconds >= 0 AND adapter_resident_byte_seconds >= 0)",
    "cached": "kind = 'correction' OR (cached_tokens BETWEEN 0 AND input_tokens"
    " AND waived_cached_tokens BETWEEN 0 AND waived_input_tokens)",
}

# SQLite alters a table by making a new one, and the old table's triggers are lost.
SQLITE_TRIGGERS = {
    "ledger_entries_no_update": """CREATE TRIGGER ledger_entries_no_update BEFORE UPDATE ON ledger_entries
       BEGIN SELECT RAISE(ABORT, 'ledger_entries is append-only'); END""",
    "ledger_entries_no_delete": """CREATE TRIGGER ledger_entries_no_delete BEFORE DELETE ON ledger_entries
       BEGIN SELECT RAISE(ABORT, 'ledger_entries is append-only'); END""",
    "ledger_entries_no_gap": """CREATE TRIGGER ledger_entries_no_gap BEFORE INSERT ON ledger_entries
       WHEN NEW.sequence IS NOT (SELECT coalesce(max(sequence), 0) + 1 FROM ledger_entries)
         OR EXISTS (SELECT 1 FROM ledger_entries WHERE event_id = NEW.event_id)
       BEGIN SELECT RAISE(ABORT, 'ledger_entries is gap-free and append-only'); END""",
}

# The check runs once per statement instead of once per row: settlements insert hundreds of rows in a statement.
POSTGRESQL_GAP_CHECK = (
    "DROP TRIGGER ledger_entries_no_gap ON ledger_entries",
    "DROP FUNCTION loramux_no_gap()",
    """CREATE FUNCTION loramux_no_gap() RETURNS trigger LANGUAGE plpgsql AS $$
       DECLARE first bigint; last bigint; many bigint;
       BEGIN
         SELECT min(sequence), max(sequence), count(*) INTO first, last, many FROM added;
         IF many > 0 AND (last - first + 1 <> many
             OR first <> 1 + (SELECT coalesce(max(sequence), 0) FROM ledger_entries WHERE sequence < first)
             OR last <> (SELECT max(sequence) FROM ledger_entries)) THEN
           RAISE EXCEPTION 'ledger_entries is gap-free and append-only';
         END IF;
         RETURN NULL;
       END $$""",
    """CREATE TRIGGER ledger_entries_no_gap AFTER INSERT ON ledger_entries REFERENCING NEW TABLE AS added
       FOR EACH STATEMENT EXECUTE FUNCTION loramux_no_gap()""",
)
