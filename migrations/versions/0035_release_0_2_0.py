"""release 0.2.0: everything since 0.1.0

Servers of 0.1.0 continue to run while the database is migrated. New columns have a default or may be null, and the
tables and columns that 0.1.0 uses do not change (docs/operations/deploy.md).
"""

import sqlalchemy as sa
from alembic import op

revision = "0035"
down_revision = "0011"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    rename_actor("house", "system")
    add_columns()
    refuse_changes_of_closed_months()
    begin_own_lineages()
    for create in (create_accounts, create_batches, create_releases, create_bases, create_sums):
        create()
    op.create_table("schema_floor", sa.Column("revision", sa.Text(), nullable=False, primary_key=True))
    op.execute(f"INSERT INTO schema_floor (revision) VALUES ('{revision}')")  # noqa: S608  our own name


def downgrade() -> None:
    """Remove all additions and their data. Raises RuntimeError if 0.1.0 could not store the remaining data."""
    if _exists("SELECT 1 FROM ledger_entries WHERE user_id IS NOT NULL"):
        raise RuntimeError("ledger entries have users, which their hashes cover; restore the backup before the upgrade")
    if _exists("SELECT 1 FROM revisions GROUP BY adapter_id, digest HAVING count(*) > 1"):
        raise RuntimeError("an adapter has one content for two bases, which the older schema cannot hold")
    for table in TABLES:
        op.drop_table(table)
    allow_changes_of_closed_months()
    drop_columns()
    rename_actor("system", "house")


TABLES = (
    *("schema_floor", "daily_usage", "usage_segments", "base_migration_items", "base_migrations", "bases"),
    *(
        "shadow_sums",
        "shadows",
        "release_policies",
        "canary_guards",
        "evaluations",
        "request_feedback",
        "revision_hours",
    ),
    *("batch_chunks", "batches", "files", "console_sessions", "billing_profiles", "pepper_check"),
)
"""Tables in the order in which foreign keys allow them to be dropped."""
OLD_UNIQUE, NEW_UNIQUE = "uq_revisions_adapter_id_digest", "uq_revisions_adapter_id_digest_base_model"
# SQLite alters a table by making a new one, and the old table's trigger is lost.
REVISIONS_IMMUTABLE = """CREATE TRIGGER revisions_immutable
    BEFORE UPDATE OF id, tenant_id, adapter_id, number, digest, rank, size_bytes ON revisions
    BEGIN SELECT RAISE(ABORT, 'revisions are immutable'); END"""


def added_columns() -> list[tuple[str, sa.Column]]:
    """Return new column objects at each call, because a column object belongs to one table."""
    return [
        ("tiers", sa.Column("service_tiers", sa.Text(), nullable=False, server_default="batch flex")),
        ("tenants", sa.Column("zero_retention", sa.Boolean(), nullable=False, server_default=sa.false())),
        ("tenants", sa.Column("allow_judges", sa.Boolean(), nullable=False, server_default=sa.false())),
        ("uploads", sa.Column("base_model", sa.Text(), nullable=True)),
        ("uploads", sa.Column("ignored", sa.Text(), nullable=True)),
        ("uploads", sa.Column("submitter", sa.Text(), nullable=True)),
        ("budget_holds", sa.Column("base_model", sa.Text(), nullable=False, server_default=sa.text("''"))),
        ("requests", sa.Column("user_id", sa.Text(), nullable=True)),
        ("ledger_entries", sa.Column("user_id", sa.Text(), nullable=True)),
    ]


def add_columns() -> None:
    """Add the name of the base to revisions, uploads and the budget holds of requests."""
    for table, column in added_columns():
        op.add_column(table, column)
    with op.batch_alter_table("revisions") as revisions:
        revisions.add_column(sa.Column("base_model", sa.Text(), nullable=False, server_default=sa.text("''")))
        revisions.add_column(sa.Column("bundle", sa.Text(), nullable=True))
        revisions.drop_constraint(OLD_UNIQUE, type_="unique")
        revisions.create_unique_constraint(NEW_UNIQUE, ["adapter_id", "digest", "base_model"])
    if _is_sqlite():
        op.execute(REVISIONS_IMMUTABLE)


def drop_columns() -> None:
    if _is_sqlite():
        op.execute("DROP TRIGGER keys_own_lineage")
    else:
        op.execute("DROP TRIGGER keys_own_lineage ON keys")
        op.execute("DROP FUNCTION loramux_own_lineage()")
    with op.batch_alter_table("keys") as keys:
        keys.drop_column("lineage")
    with op.batch_alter_table("revisions") as revisions:
        revisions.drop_constraint(NEW_UNIQUE, type_="unique")
        revisions.drop_column("bundle")
        revisions.drop_column("base_model")
        revisions.create_unique_constraint(OLD_UNIQUE, ["adapter_id", "digest"])
    if _is_sqlite():
        op.execute(REVISIONS_IMMUTABLE)
    for table, column in reversed(added_columns()):
        op.drop_column(table, column.name)


ACTORS = (
    ("alias_versions", "changed_by"),
    ("adapter_pins", "pinned_by"),
    ("adapter_grants", "granted_by"),
    ("audit_entries", "actor"),
)
AUDITED = ("changed_by", "pinned_by", "granted_by")
"""Fields of the entities that the audit log shows before and after a change."""

AUDIT_APPEND_ONLY = """CREATE TRIGGER audit_entries_no_update BEFORE UPDATE ON audit_entries
    BEGIN SELECT RAISE(ABORT, 'audit_entries is append-only'); END"""


def rename_actor(old: str, new: str) -> None:
    """Rename an actor. Ids of keys and members have a prefix and an underscore, so neither word is such an id."""
    is_sqlite = _is_sqlite()
    if is_sqlite:
        op.execute("DROP TRIGGER audit_entries_no_update")
    else:
        op.execute("ALTER TABLE audit_entries DISABLE TRIGGER audit_entries_append_only")
    for table, column in ACTORS:
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
        op.execute(AUDIT_APPEND_ONLY)
    else:
        op.execute("ALTER TABLE audit_entries ENABLE TRIGGER audit_entries_append_only")


# A server of 0.1.0 has no lineages, so each key that it makes begins one. Version 0.3 may drop the trigger and the
# default.
OWN_LINEAGE_SQLITE = (
    "CREATE TRIGGER keys_own_lineage AFTER INSERT ON keys WHEN NEW.lineage = ''"
    " BEGIN UPDATE keys SET lineage = NEW.id WHERE id = NEW.id; END",
)
OWN_LINEAGE_POSTGRESQL = (
    "CREATE FUNCTION loramux_own_lineage() RETURNS trigger LANGUAGE plpgsql AS"
    " $$ BEGIN NEW.lineage := NEW.id; RETURN NEW; END $$",
    "CREATE TRIGGER keys_own_lineage BEFORE INSERT ON keys FOR EACH ROW WHEN (NEW.lineage = '')"
    " EXECUTE FUNCTION loramux_own_lineage()",
)


def begin_own_lineages() -> None:
    """Add to each key its chain of rotations. Each key of 0.1.0 begins a chain."""
    with op.batch_alter_table("keys") as keys:
        keys.add_column(sa.Column("lineage", sa.Text(), nullable=False, server_default=sa.text("''")))
    op.execute("UPDATE keys SET lineage = id")
    for statement in OWN_LINEAGE_SQLITE if _is_sqlite() else OWN_LINEAGE_POSTGRESQL:
        op.execute(statement)


CLOSED = "OLD.valid_from < (SELECT COALESCE(MAX(ends_at), 0) FROM periods)"
MONTH_CLOSED = "subscriptions is append-only: the month is closed"


def refuse_changes_of_closed_months() -> None:
    """Allow subscriptions to be deleted while their month is not closed."""
    if _is_sqlite():
        op.execute("DROP TRIGGER subscriptions_no_delete")
        op.execute(
            f"CREATE TRIGGER subscriptions_no_delete BEFORE DELETE ON subscriptions WHEN {CLOSED}"
            f" BEGIN SELECT RAISE(ABORT, '{MONTH_CLOSED}'); END"
        )
        return
    op.execute("DROP TRIGGER subscriptions_append_only ON subscriptions")
    op.execute(
        "CREATE TRIGGER subscriptions_append_only BEFORE UPDATE OR TRUNCATE ON subscriptions"
        " FOR EACH STATEMENT EXECUTE FUNCTION loramux_refuse('subscriptions is append-only')"
    )
    op.execute(
        "CREATE FUNCTION loramux_refuse_closed_subscription() RETURNS trigger AS $$ BEGIN"
        f" IF {CLOSED} THEN RAISE EXCEPTION '{MONTH_CLOSED}' USING ERRCODE = 'integrity_constraint_violation'; END IF;"
        " RETURN OLD; END $$ LANGUAGE plpgsql"
    )
    op.execute(
        "CREATE TRIGGER subscriptions_closed BEFORE DELETE ON subscriptions"
        " FOR EACH ROW EXECUTE FUNCTION loramux_refuse_closed_subscription()"
    )


def allow_changes_of_closed_months() -> None:
    if _is_sqlite():
        op.execute("DROP TRIGGER subscriptions_no_delete")
        op.execute(
            "CREATE TRIGGER subscriptions_no_delete BEFORE DELETE ON subscriptions"
            " BEGIN SELECT RAISE(ABORT, 'subscriptions is append-only'); END"
        )
        return
    op.execute("DROP TRIGGER subscriptions_closed ON subscriptions")
    op.execute("DROP FUNCTION loramux_refuse_closed_subscription()")
    op.execute("DROP TRIGGER subscriptions_append_only ON subscriptions")
    op.execute(
        "CREATE TRIGGER subscriptions_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON subscriptions"
        " FOR EACH STATEMENT EXECUTE FUNCTION loramux_refuse('subscriptions is append-only')"
    )


def create_accounts() -> None:
    """Create the tables for the pepper's check value, billing addresses and signed-in browsers."""
    op.create_table(
        "pepper_check",
        sa.Column("id", BIG, autoincrement=False, nullable=False),
        sa.Column("mac", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_pepper_check"),
        sa.CheckConstraint("id = 1", name=op.f("ck_pepper_check_single")),
    )
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
    op.create_table(
        "console_sessions",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("mac", sa.LargeBinary(), nullable=False),
        *(sa.Column(name, sa.Text(), nullable=False) for name in ("kind", "tenant_id", "holder", "project_id")),
        sa.Column("is_operator", sa.Boolean(), nullable=False),
        sa.Column("viewed", sa.Text(), nullable=False),
        *(sa.Column(name, BIG, nullable=False) for name in ("created_at", "used_at", "expires_at")),
        sa.PrimaryKeyConstraint("id", name="pk_console_sessions"),
        sa.UniqueConstraint("mac", name="uq_console_sessions_mac"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_console_sessions_tenant_id"),
        sa.ForeignKeyConstraint(
            ["tenant_id", "project_id"],
            ["projects.tenant_id", "projects.id"],
            name="fk_console_sessions_tenant_id_project_id",
        ),
    )
    op.create_index("ix_console_sessions_holder", "console_sessions", ["holder"])


def create_batches() -> None:
    """Create the tables for files and batches of requests."""
    op.create_table(
        "files",
        *map(_text, ("id", "tenant_id", "project_id", "owner", "purpose", "filename")),
        *map(_big, ("size", "created_at", "expires_at")),
        sa.PrimaryKeyConstraint("id", name="pk_files"),
        sa.UniqueConstraint("tenant_id", "id", name="uq_files_tenant_id_id"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_files_tenant_id"),
        sa.ForeignKeyConstraint(
            ["tenant_id", "project_id"], ["projects.tenant_id", "projects.id"], name="fk_files_tenant_id_project_id"
        ),
    )
    op.create_index("ix_files_tenant_id_created_at", "files", ["tenant_id", "created_at"])
    op.create_index("ix_files_expires_at", "files", ["expires_at"])
    op.create_table(
        "batches",
        *map(_text, ("id", "tenant_id", "project_id", "owner", "endpoint", "input_file_id", "completion_window")),
        *map(_text, ("tags", "state")),
        _text("server_id", nullable=True),
        *map(_big, ("attempts", "lines", "flushed", "completed", "failed")),
        *(_text(name, nullable=True) for name in ("errors", "output_file_id", "error_file_id")),
        *map(_big, ("created_at", "expires_at")),
        *(_big(name, nullable=True) for name in ("in_progress_at", "finalizing_at", "cancelling_at", "finished_at")),
        sa.PrimaryKeyConstraint("id", name="pk_batches"),
        sa.UniqueConstraint("tenant_id", "id", name="uq_batches_tenant_id_id"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_batches_tenant_id"),
        sa.ForeignKeyConstraint(
            ["tenant_id", "project_id"], ["projects.tenant_id", "projects.id"], name="fk_batches_tenant_id_project_id"
        ),
        sa.CheckConstraint(
            "state IN ('validating', 'in_progress', 'finalizing', 'cancelling',"
            " 'completed', 'failed', 'expired', 'cancelled')",
            name=op.f("ck_batches_state"),
        ),
        sa.CheckConstraint("completed + failed = flushed AND flushed <= lines", name=op.f("ck_batches_counts")),
    )
    op.create_index("ix_batches_tenant_id_created_at", "batches", ["tenant_id", "created_at"])
    op.create_index("ix_batches_state", "batches", ["state"])
    op.create_table(
        "batch_chunks",
        _text("batch_id"),
        _big("start"),
        _text("object"),
        sa.PrimaryKeyConstraint("batch_id", "start", name="pk_batch_chunks"),
        sa.ForeignKeyConstraint(["batch_id"], ["batches.id"], name="fk_batch_chunks_batch_id", ondelete="CASCADE"),
    )


COUNTED = (
    *("completed", "cancelled", "failed", "refused", "stop", "length", "abort"),
    *("prompt_tokens", "output_tokens", "decode_tokens", "decode_us"),
    *(f"first_token_{number}" for number in range(16)),
)
RUNNING = sa.text("ended_at IS NULL")


EVALUATION = ("id", "tenant_id", "project_id", "owner", "adapter", "models", "file_id", "batch_id", "grader", "state")
POLICY = ("adapter_id", "alias", "tenant_id", "policy", "changed_by")


def create_releases() -> None:
    """Create the tables for metrics, feedback, evaluations, canary guards, policies and shadows."""
    op.create_table(
        "revision_hours",
        *map(_text, ("tenant_id", "project_id", "model")),
        *map(_big, ("hour", *COUNTED)),
        sa.PrimaryKeyConstraint("tenant_id", "project_id", "model", "hour", name="pk_revision_hours"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_revision_hours_tenant_id"),
    )
    op.create_index("ix_revision_hours_hour", "revision_hours", ["hour"])
    op.create_table(
        "request_feedback",
        *(sa.Column(name, sa.Text(), nullable=False) for name in ("request_id", "tenant_id", "model")),
        sa.Column("score", BIG, nullable=False),
        sa.Column("label", sa.Text(), nullable=True),
        sa.Column("created_at", BIG, nullable=False),
        sa.PrimaryKeyConstraint("request_id", name="pk_request_feedback"),
        sa.ForeignKeyConstraint(["request_id"], ["requests.id"], name="fk_request_feedback_request_id"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_request_feedback_tenant_id"),
    )
    op.create_index("ix_request_feedback_tenant_id_model", "request_feedback", ["tenant_id", "model", "created_at"])
    op.create_table(
        "evaluations",
        *(sa.Column(name, sa.Text(), nullable=False) for name in EVALUATION),
        *(sa.Column(name, sa.Text(), nullable=True) for name in ("server_id", "result", "error")),
        *(sa.Column(name, BIG, nullable=False) for name in ("attempts", "created_at")),
        sa.Column("finished_at", BIG, nullable=True),
        sa.Column("judge_key", sa.LargeBinary(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_evaluations"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_evaluations_tenant_id"),
        sa.ForeignKeyConstraint(
            ["tenant_id", "project_id"],
            ["projects.tenant_id", "projects.id"],
            name="fk_evaluations_tenant_id_project_id",
        ),
        sa.CheckConstraint("state IN ('running', 'completed', 'failed')", name=op.f("ck_evaluations_state")),
    )
    op.create_index("ix_evaluations_tenant_id_adapter", "evaluations", ["tenant_id", "adapter", "created_at"])
    op.create_index("ix_evaluations_state", "evaluations", ["state"])
    op.create_table(
        "canary_guards",
        *(sa.Column(name, sa.Text(), nullable=False) for name in ("adapter_id", "alias", "tenant_id", "measures")),
        sa.Column("created_at", BIG, nullable=False),
        sa.Column("first_token_seconds", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("adapter_id", "alias", name="pk_canary_guards"),
        sa.ForeignKeyConstraint(
            ["tenant_id", "adapter_id", "alias"],
            ["aliases.tenant_id", "aliases.adapter_id", "aliases.name"],
            name="fk_canary_guards_tenant_id_adapter_id_alias",
            ondelete="CASCADE",
        ),
    )
    op.create_table(
        "release_policies",
        *(sa.Column(name, sa.Text(), nullable=False) for name in POLICY),
        sa.Column("changed_at", BIG, nullable=False),
        sa.PrimaryKeyConstraint("adapter_id", "alias", name="pk_release_policies"),
        sa.ForeignKeyConstraint(
            ["tenant_id", "adapter_id"],
            ["adapters.tenant_id", "adapters.id"],
            name="fk_release_policies_tenant_id_adapter_id",
        ),
    )
    op.create_table(
        "shadows",
        *(sa.Column(name, sa.Text(), nullable=False) for name in ("id", "tenant_id", "adapter_id", "created_by")),
        sa.Column("keep_outputs", sa.Boolean(), nullable=False),
        sa.Column("ended_because", sa.Text(), nullable=True),
        *(
            sa.Column(name, BIG, nullable=False)
            for name in ("revision", "share", "max_tokens_per_day", "created_at", "day", "day_tokens")
        ),
        sa.Column("ended_at", BIG, nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_shadows"),
        sa.ForeignKeyConstraint(
            ["tenant_id", "adapter_id"],
            ["adapters.tenant_id", "adapters.id"],
            name="fk_shadows_tenant_id_adapter_id",
        ),
    )
    op.create_index("ix_shadows_adapter_id", "shadows", ["adapter_id", "created_at"])
    op.create_index(
        "ix_shadows_running", "shadows", ["adapter_id"], unique=True, sqlite_where=RUNNING, postgresql_where=RUNNING
    )
    op.create_table(
        "shadow_sums",
        sa.Column("shadow_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("value", BIG, nullable=False),
        sa.PrimaryKeyConstraint("shadow_id", "name", name="pk_shadow_sums"),
        sa.ForeignKeyConstraint(["shadow_id"], ["shadows.id"], name="fk_shadow_sums_shadow_id"),
    )


def create_bases() -> None:
    """Create the tables for added or retired bases, and for moves of adapters between bases."""
    op.create_table(
        "bases",
        sa.Column("name", sa.Text(), nullable=False),
        *(sa.Column(name, sa.Text(), nullable=True) for name in ("settings", "successor")),
        sa.Column("retired_at", BIG, nullable=True),
        sa.Column("changed_at", BIG, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_bases"),
    )
    op.create_table(
        "base_migrations",
        *_texts("id", "source", "target", "created_by", "state"),
        *_texts("tenant", "adapter", "error", "server_id", nullable=True),
        *_numbers("evaluates", "attempts", "created_at"),
        *_numbers("finished_at", nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_base_migrations"),
        sa.CheckConstraint(
            "state IN ('running', 'completed', 'cancelled', 'failed')", name=op.f("ck_base_migrations_state")
        ),
    )
    op.create_index("ix_base_migrations_state", "base_migrations", ["state"])
    op.create_table(
        "base_migration_items",
        *_texts("migration_id", "tenant_id", "tenant_name", "adapter", "revision_id", "digest", "outcome"),
        *_texts("code", "reason", "evaluation_id", nullable=True),
        *_numbers("position", "number", "weight"),
        *_numbers("new_number", nullable=True),
        sa.PrimaryKeyConstraint("migration_id", "position", name="pk_base_migration_items"),
        sa.ForeignKeyConstraint(["migration_id"], ["base_migrations.id"], name="fk_base_migration_items_migration_id"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_base_migration_items_tenant_id"),
        sa.CheckConstraint(
            "outcome IN ('pending', 'evaluating', 'fits', 'needs_retraining', 'refused')",
            name=op.f("ck_base_migration_items_outcome"),
        ),
    )
    op.create_index("ix_base_migration_items_tenant_id", "base_migration_items", ["tenant_id"])


SEGMENT = ("first_sequence", "last_sequence", "first_day", "last_day", "earliest_subject")
DAY_NUMBERS = ("segment", "day", "created_day")
DAY_TEXTS = ("base_model", "tier", "project_id", "key_id", "model")
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


def create_sums() -> None:
    """Create the tables for daily sums of the ledger, which servers fill step by step."""
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
        *(sa.Column(name, BIG, nullable=False) for name in DAY_NUMBERS),
        *(sa.Column(name, sa.Text(), nullable=False) for name in DAY_TEXTS),
        *(sa.Column(name, BIG, nullable=False) for name in QUANTITIES),
        sa.PrimaryKeyConstraint("tenant_id", *DAY_NUMBERS, *DAY_TEXTS, name="pk_daily_usage"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_daily_usage_tenant_id"),
        sqlite_with_rowid=False,
    )


def _text(name: str, *, nullable: bool = False) -> sa.Column[str]:
    return sa.Column(name, sa.Text(), nullable=nullable)


def _big(name: str, *, nullable: bool = False) -> sa.Column[int]:
    return sa.Column(name, BIG, nullable=nullable)


def _texts(*names: str, nullable: bool = False) -> list[sa.Column[str]]:
    return [_text(name, nullable=nullable) for name in names]


def _numbers(*names: str, nullable: bool = False) -> list[sa.Column[int]]:
    return [_big(name, nullable=nullable) for name in names]


def _is_sqlite() -> bool:
    return op.get_bind().dialect.name == "sqlite"


def _exists(query: str) -> bool:
    return op.get_bind().execute(sa.text(query)).first() is not None
