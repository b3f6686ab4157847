"""tiers, projects, members, keys that expire, and the audit log"""

import secrets

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
OPEN = sa.text("status = 'open'")


def upgrade() -> None:
    create_tiers()
    create_projects()
    create_members()
    extend_tenants()
    give_everybody_a_project()
    extend_keys()
    extend_requests()
    create_audit_log()


def downgrade() -> None:
    raise RuntimeError("an audit log is never dropped by a command; restore the backup from before the upgrade")


def create_tiers() -> None:
    tiers = op.create_table(
        "tiers",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("service_class", sa.Text(), nullable=False),
        sa.Column("weight", BIG, nullable=False),
        sa.Column("created_at", BIG, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_tiers"),
        sa.CheckConstraint(
            "service_class IN ('interactive', 'standard', 'batch')", name=op.f("ck_tiers_service_class")
        ),
        sa.CheckConstraint("weight BETWEEN 1 AND 1000", name=op.f("ck_tiers_weight")),
    )
    names = ("interactive", "standard", "batch")
    op.bulk_insert(tiers, [{"name": name, "service_class": name, "weight": 1, "created_at": 0} for name in names])


def create_projects() -> None:
    op.create_table(
        "projects",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("created_at", BIG, nullable=False),
        sa.Column("archived_at", BIG, nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_projects"),
        sa.UniqueConstraint("tenant_id", "name", name="uq_projects_tenant_id_name"),
        sa.UniqueConstraint("tenant_id", "id", name="uq_projects_tenant_id_id"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_projects_tenant_id"),
    )


def create_members() -> None:
    op.create_table(
        "members",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("issuer", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("role", sa.Text(), nullable=False),
        sa.Column("created_at", BIG, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_members"),
        sa.UniqueConstraint("tenant_id", "issuer", "subject", name="uq_members_tenant_id_issuer_subject"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_members_tenant_id"),
        sa.CheckConstraint(
            "role IN ('owner', 'admin', 'developer', 'billing', 'viewer')", name=op.f("ck_members_role")
        ),
    )
    op.create_index("ix_members_issuer_subject", "members", ["issuer", "subject"])


def extend_tenants() -> None:
    with op.batch_alter_table("tenants") as batch:
        batch.add_column(sa.Column("tier", sa.Text(), nullable=True))
        batch.add_column(sa.Column("suspended_at", BIG, nullable=True))
    op.execute("UPDATE tenants SET tier = 'standard'")
    with op.batch_alter_table("tenants") as batch:
        batch.alter_column("tier", existing_type=sa.Text(), nullable=False)
        batch.create_foreign_key("fk_tenants_tier", "tiers", ["tier"], ["name"])


def give_everybody_a_project() -> None:
    connection = op.get_bind()
    tenants = connection.execute(sa.text("SELECT id, created_at FROM tenants")).all()
    insert = sa.text("INSERT INTO projects (id, tenant_id, name, created_at) VALUES (:id, :tenant, 'default', :at)")
    for tenant, created_at in tenants:
        connection.execute(insert, {"id": f"project_{secrets.token_hex(12)}", "tenant": tenant, "at": created_at})


def extend_keys() -> None:
    with op.batch_alter_table("keys") as batch:
        batch.add_column(sa.Column("project_id", sa.Text(), nullable=True))
        batch.add_column(sa.Column("models", sa.Text(), nullable=True))
        batch.add_column(sa.Column("created_by", sa.Text(), nullable=True))
        batch.add_column(sa.Column("expires_at", BIG, nullable=True))
        batch.add_column(sa.Column("last_used_at", BIG, nullable=True))
        batch.add_column(sa.Column("replaced_by", sa.Text(), nullable=True))
    op.execute("UPDATE keys SET created_by = 'local'")
    op.execute("UPDATE keys SET project_id = (SELECT id FROM projects WHERE projects.tenant_id = keys.tenant_id)")
    with op.batch_alter_table("keys") as batch:
        batch.alter_column("project_id", existing_type=sa.Text(), nullable=False)
        batch.alter_column("created_by", existing_type=sa.Text(), nullable=False)
        batch.create_foreign_key(
            "fk_keys_tenant_id_project_id", "projects", ["tenant_id", "project_id"], ["tenant_id", "id"]
        )


def extend_requests() -> None:
    """Extend `requests`. SQLite rebuilds the table and copies only columns, so index and checks are repeated."""
    op.drop_index("ix_requests_open", "requests")
    with op.batch_alter_table("requests") as batch:
        batch.add_column(sa.Column("project_id", sa.Text(), nullable=True))
        batch.drop_constraint("fk_requests_tenant_id_key_id", type_="foreignkey")
    op.execute(
        "UPDATE requests SET project_id = (SELECT id FROM projects WHERE projects.tenant_id = requests.tenant_id)"
    )
    checks = (
        sa.CheckConstraint("status IN ('open', 'settled', 'interrupted')", name=op.f("ck_requests_status")),
        sa.CheckConstraint("prompt_tokens >= 0 AND max_tokens >= 0", name=op.f("ck_requests_quantities")),
    )
    with op.batch_alter_table("requests", table_args=checks) as batch:
        batch.create_foreign_key(
            "fk_requests_tenant_id_project_id", "projects", ["tenant_id", "project_id"], ["tenant_id", "id"]
        )
    op.create_index("ix_requests_open", "requests", ["server_id"], sqlite_where=OPEN, postgresql_where=OPEN)


def create_audit_log() -> None:
    op.create_table(
        "audit_entries",
        sa.Column("sequence", BIG, autoincrement=True, nullable=False),
        sa.Column("at", BIG, nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=True),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("request_id", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("object_id", sa.Text(), nullable=False),
        sa.Column("before", sa.Text(), nullable=True),
        sa.Column("after", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("sequence", name="pk_audit_entries"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_audit_entries_tenant_id"),
    )
    op.create_index("ix_audit_entries_tenant_id_sequence", "audit_entries", ["tenant_id", "sequence"])
    for statement in POSTGRESQL_TRIGGERS if op.get_bind().dialect.name == "postgresql" else SQLITE_TRIGGERS:
        op.execute(statement)


# INSERT OR REPLACE deletes without calling a DELETE trigger, so SQLite's INSERT trigger refuses an existing sequence.
SQLITE_TRIGGERS = (
    """CREATE TRIGGER audit_entries_no_update BEFORE UPDATE ON audit_entries
       BEGIN SELECT RAISE(ABORT, 'audit_entries is append-only'); END""",
    """CREATE TRIGGER audit_entries_no_delete BEFORE DELETE ON audit_entries
       BEGIN SELECT RAISE(ABORT, 'audit_entries is append-only'); END""",
    """CREATE TRIGGER audit_entries_no_replace BEFORE INSERT ON audit_entries
       WHEN EXISTS (SELECT 1 FROM audit_entries WHERE sequence = NEW.sequence)
       BEGIN SELECT RAISE(ABORT, 'audit_entries is append-only'); END""",
)

POSTGRESQL_TRIGGERS = (
    """CREATE TRIGGER audit_entries_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON audit_entries
       FOR EACH STATEMENT EXECUTE FUNCTION loramux_refuse('audit_entries is append-only')""",
)
