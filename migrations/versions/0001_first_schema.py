"""first schema"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
GENESIS = "0" * 64


def upgrade() -> None:
    create_tenants()
    create_adapters()
    create_requests()
    create_ledger()
    forbid_rewriting()


def downgrade() -> None:
    raise RuntimeError("there is nothing below the first schema, and a ledger is never dropped by a command")


def create_tenants() -> None:
    op.create_table(
        "tenants",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("created_at", BIG, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_tenants"),
        sa.UniqueConstraint("name", name="uq_tenants_name"),
    )
    op.create_table(
        "keys",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("scopes", sa.Text(), nullable=False),
        sa.Column("mac", sa.LargeBinary(), nullable=False),
        sa.Column("hint", sa.Text(), nullable=False),
        sa.Column("created_at", BIG, nullable=False),
        sa.Column("revoked_at", BIG, nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_keys"),
        sa.UniqueConstraint("mac", name="uq_keys_mac"),
        sa.UniqueConstraint("tenant_id", "id", name="uq_keys_tenant_id_id"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_keys_tenant_id"),
    )


def create_adapters() -> None:
    op.create_table(
        "adapters",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("created_at", BIG, nullable=False),
        sa.Column("deleted_at", BIG, nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_adapters"),
        sa.UniqueConstraint("tenant_id", "id", name="uq_adapters_tenant_id_id"),
        sa.UniqueConstraint("tenant_id", "name", name="uq_adapters_tenant_id_name"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_adapters_tenant_id"),
    )
    op.create_table(
        "revisions",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("adapter_id", sa.Text(), nullable=False),
        sa.Column("number", BIG, nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("rank", BIG, nullable=False),
        sa.Column("size_bytes", BIG, nullable=False),
        sa.Column("base", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("created_at", BIG, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_revisions"),
        sa.UniqueConstraint("adapter_id", "number", name="uq_revisions_adapter_id_number"),
        sa.UniqueConstraint("adapter_id", "digest", name="uq_revisions_adapter_id_digest"),
        sa.UniqueConstraint("tenant_id", "adapter_id", "id", name="uq_revisions_tenant_id_adapter_id_id"),
        sa.ForeignKeyConstraint(
            ["tenant_id", "adapter_id"],
            ["adapters.tenant_id", "adapters.id"],
            name="fk_revisions_tenant_id_adapter_id",
        ),
        sa.CheckConstraint("state IN ('ready', 'deleted')", name=op.f("ck_revisions_state")),
        sa.CheckConstraint("number >= 1 AND rank >= 1 AND size_bytes >= 0", name=op.f("ck_revisions_quantities")),
    )
    op.create_index("ix_revisions_digest", "revisions", ["digest"])
    op.create_table(
        "aliases",
        sa.Column("adapter_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("revision_id", sa.Text(), nullable=False),
        sa.Column("updated_at", BIG, nullable=False),
        sa.PrimaryKeyConstraint("adapter_id", "name", name="pk_aliases"),
        sa.ForeignKeyConstraint(
            ["tenant_id", "adapter_id", "revision_id"],
            ["revisions.tenant_id", "revisions.adapter_id", "revisions.id"],
            name="fk_aliases_tenant_id_adapter_id_revision_id",
        ),
    )


def create_requests() -> None:
    op.create_table(
        "requests",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.Column("server_id", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("adapter_digest", sa.Text(), nullable=True),
        sa.Column("prompt_tokens", BIG, nullable=False),
        sa.Column("max_tokens", BIG, nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("created_at", BIG, nullable=False),
        sa.Column("settled_at", BIG, nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_requests"),
        sa.ForeignKeyConstraint(
            ["tenant_id", "key_id"], ["keys.tenant_id", "keys.id"], name="fk_requests_tenant_id_key_id"
        ),
        sa.CheckConstraint("status IN ('open', 'settled', 'interrupted')", name=op.f("ck_requests_status")),
        sa.CheckConstraint("prompt_tokens >= 0 AND max_tokens >= 0", name=op.f("ck_requests_quantities")),
    )
    still_open = sa.text("status = 'open'")
    op.create_index("ix_requests_open", "requests", ["server_id"], sqlite_where=still_open, postgresql_where=still_open)


def create_ledger() -> None:
    op.create_table(
        "ledger_entries",
        sa.Column("sequence", BIG, autoincrement=False, nullable=False),
        sa.Column("event_id", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.Column("request_id", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("adapter_digest", sa.Text(), nullable=True),
        sa.Column("input_tokens", BIG, nullable=False),
        sa.Column("cached_tokens", BIG, nullable=False),
        sa.Column("output_tokens", BIG, nullable=False),
        sa.Column("finish_reason", sa.Text(), nullable=True),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("created_at", BIG, nullable=False),
        sa.Column("prev_hash", sa.Text(), nullable=False),
        sa.Column("hash", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("sequence", name="pk_ledger_entries"),
        sa.UniqueConstraint("event_id", name="uq_ledger_entries_event_id"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_ledger_entries_tenant_id"),
        sa.CheckConstraint("kind IN ('usage', 'interrupted')", name=op.f("ck_ledger_entries_kind")),
        sa.CheckConstraint("input_tokens >= 0 AND output_tokens >= 0", name=op.f("ck_ledger_entries_quantities")),
        sa.CheckConstraint("cached_tokens BETWEEN 0 AND input_tokens", name=op.f("ck_ledger_entries_cached")),
    )
    op.create_index("ix_ledger_entries_tenant_id_created_at", "ledger_entries", ["tenant_id", "created_at"])
    head = op.create_table(
        "ledger_head",
        sa.Column("id", BIG, autoincrement=False, nullable=False),
        sa.Column("sequence", BIG, nullable=False),
        sa.Column("hash", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_ledger_head"),
        sa.CheckConstraint("id = 1", name=op.f("ck_ledger_head_single")),
    )
    op.bulk_insert(head, [{"id": 1, "sequence": 0, "hash": GENESIS}])


def forbid_rewriting() -> None:
    statements = POSTGRESQL_TRIGGERS if op.get_bind().dialect.name == "postgresql" else SQLITE_TRIGGERS
    for statement in statements:
        op.execute(statement)


# INSERT OR REPLACE deletes without calling a DELETE trigger, so SQLite's INSERT trigger also refuses an existing
# event_id.
SQLITE_TRIGGERS = (
    """CREATE TRIGGER ledger_entries_no_update BEFORE UPDATE ON ledger_entries
       BEGIN SELECT RAISE(ABORT, 'ledger_entries is append-only'); END""",
    """CREATE TRIGGER ledger_entries_no_delete BEFORE DELETE ON ledger_entries
       BEGIN SELECT RAISE(ABORT, 'ledger_entries is append-only'); END""",
    """CREATE TRIGGER ledger_entries_no_gap BEFORE INSERT ON ledger_entries
       WHEN NEW.sequence IS NOT (SELECT coalesce(max(sequence), 0) + 1 FROM ledger_entries)
         OR EXISTS (SELECT 1 FROM ledger_entries WHERE event_id = NEW.event_id)
       BEGIN SELECT RAISE(ABORT, 'ledger_entries is gap-free and append-only'); END""",
    """CREATE TRIGGER revisions_immutable
       BEFORE UPDATE OF id, tenant_id, adapter_id, number, digest, rank, size_bytes ON revisions
       BEGIN SELECT RAISE(ABORT, 'revisions are immutable'); END""",
)

POSTGRESQL_TRIGGERS = (
    """CREATE FUNCTION loramux_refuse() RETURNS trigger LANGUAGE plpgsql AS
       $$ BEGIN RAISE EXCEPTION '%', TG_ARGV[0]; END $$""",
    """CREATE FUNCTION loramux_no_gap() RETURNS trigger LANGUAGE plpgsql AS $$
       BEGIN
         IF NEW.sequence IS DISTINCT FROM (SELECT coalesce(max(sequence), 0) + 1 FROM ledger_entries) THEN
           RAISE EXCEPTION 'ledger_entries is gap-free and append-only';
         END IF;
         RETURN NEW;
       END $$""",
    """CREATE TRIGGER ledger_entries_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON ledger_entries
       FOR EACH STATEMENT EXECUTE FUNCTION loramux_refuse('ledger_entries is append-only')""",
    """CREATE TRIGGER ledger_entries_no_gap BEFORE INSERT ON ledger_entries
       FOR EACH ROW EXECUTE FUNCTION loramux_no_gap()""",
    """CREATE TRIGGER revisions_immutable
       BEFORE UPDATE OF id, tenant_id, adapter_id, number, digest, rank, size_bytes ON revisions
       FOR EACH STATEMENT EXECUTE FUNCTION loramux_refuse('revisions are immutable')""",
)
