"""weighted aliases with their history, pins, grants, deletions that can be undone, and adapters that expire"""

import json
import secrets

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
STANDING = sa.text("until IS NULL")
MOMENTS = ("deleted_at", "purge_at", "expires_at")
WHOLE = 100
"""The weight of an alias's only target."""


def upgrade() -> None:
    extend_adapters()
    rebuild_aliases()
    create_pins()
    create_grants()


def downgrade() -> None:
    raise RuntimeError("weighted aliases have no place in the older schema; restore the backup from before the upgrade")


def extend_adapters() -> None:
    op.add_column("adapters", sa.Column("version", BIG, nullable=False, server_default=sa.text("1")))
    op.add_column("adapters", sa.Column("expires_at", BIG, nullable=True))
    op.add_column("revisions", sa.Column("purge_at", BIG, nullable=True))
    op.add_column("revisions", sa.Column("expires_at", BIG, nullable=True))
    for table, moment in (("adapters", "expires_at"), *(("revisions", name) for name in MOMENTS)):
        is_set = sa.text(f"{moment} IS NOT NULL")
        op.create_index(f"ix_{table}_{moment}", table, [moment], sqlite_where=is_set, postgresql_where=is_set)


def rebuild_aliases() -> None:
    """Convert every alias to one with a single target."""
    old = op.get_bind().execute(
        sa.text(
            "SELECT aliases.adapter_id, aliases.name, aliases.tenant_id, aliases.revision_id, aliases.updated_at, "
            "revisions.number FROM aliases JOIN revisions ON revisions.id = aliases.revision_id"
        )
    )
    rows = [{**row, "id": f"alias_{secrets.token_hex(12)}", "version": 1} for row in old.mappings()]
    op.drop_table("aliases")
    aliases = op.create_table(
        "aliases",
        sa.Column("adapter_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("version", BIG, nullable=False),
        sa.Column("updated_at", BIG, nullable=False),
        sa.PrimaryKeyConstraint("adapter_id", "name", name="pk_aliases"),
        sa.UniqueConstraint("id", name="uq_aliases_id"),
        sa.UniqueConstraint("tenant_id", "adapter_id", "name", name="uq_aliases_tenant_id_adapter_id_name"),
        sa.ForeignKeyConstraint(
            ["tenant_id", "adapter_id"], ["adapters.tenant_id", "adapters.id"], name="fk_aliases_tenant_id_adapter_id"
        ),
    )
    targets, versions = create_targets(), create_versions()
    common = ("adapter_id", "tenant_id")
    op.bulk_insert(aliases, [{n: row[n] for n in (*common, "name", "id", "version", "updated_at")} for row in rows])
    op.bulk_insert(
        targets,
        [{n: row[n] for n in (*common, "revision_id")} | {"alias": row["name"], "weight": WHOLE} for row in rows],
    )
    op.bulk_insert(
        versions,
        [
            {n: row[n] for n in (*common, "version")}
            | {"alias": row["name"], "targets": json.dumps({row["number"]: WHOLE})}
            | {"changed_by": "", "changed_at": row["updated_at"]}
            for row in rows
        ],
    )


def create_targets() -> sa.Table:
    table = op.create_table(
        "alias_targets",
        sa.Column("adapter_id", sa.Text(), nullable=False),
        sa.Column("alias", sa.Text(), nullable=False),
        sa.Column("revision_id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("weight", BIG, nullable=False),
        sa.PrimaryKeyConstraint("adapter_id", "alias", "revision_id", name="pk_alias_targets"),
        sa.ForeignKeyConstraint(
            ["tenant_id", "adapter_id", "alias"],
            ["aliases.tenant_id", "aliases.adapter_id", "aliases.name"],
            name="fk_alias_targets_tenant_id_adapter_id_alias",
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id", "adapter_id", "revision_id"],
            ["revisions.tenant_id", "revisions.adapter_id", "revisions.id"],
            name="fk_alias_targets_tenant_id_adapter_id_revision_id",
        ),
        sa.CheckConstraint("weight >= 1", name=op.f("ck_alias_targets_weight")),
    )
    op.create_index("ix_alias_targets_revision_id", "alias_targets", ["revision_id"])
    return table


def create_versions() -> sa.Table:
    return op.create_table(
        "alias_versions",
        sa.Column("adapter_id", sa.Text(), nullable=False),
        sa.Column("alias", sa.Text(), nullable=False),
        sa.Column("version", BIG, autoincrement=False, nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("targets", sa.Text(), nullable=False),
        sa.Column("restores", BIG, nullable=True),
        sa.Column("changed_by", sa.Text(), nullable=False),
        sa.Column("changed_at", BIG, nullable=False),
        sa.PrimaryKeyConstraint("adapter_id", "alias", "version", name="pk_alias_versions"),
        sa.ForeignKeyConstraint(
            ["tenant_id", "adapter_id"],
            ["adapters.tenant_id", "adapters.id"],
            name="fk_alias_versions_tenant_id_adapter_id",
        ),
    )


def create_pins() -> None:
    op.create_table(
        "adapter_pins",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("adapter_id", sa.Text(), nullable=False),
        sa.Column("revision_id", sa.Text(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("size_bytes", BIG, nullable=False),
        sa.Column("pinned_by", sa.Text(), nullable=False),
        sa.Column("since", BIG, nullable=False),
        sa.Column("used_at", BIG, nullable=False),
        sa.Column("until", BIG, nullable=True),
        sa.Column("ended_by", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_adapter_pins"),
        sa.ForeignKeyConstraint(
            ["tenant_id", "adapter_id", "revision_id"],
            ["revisions.tenant_id", "revisions.adapter_id", "revisions.id"],
            name="fk_adapter_pins_tenant_id_adapter_id_revision_id",
        ),
        sa.CheckConstraint("size_bytes >= 0", name=op.f("ck_adapter_pins_size_bytes")),
    )
    op.create_index(
        "ix_adapter_pins_standing",
        "adapter_pins",
        ["revision_id"],
        unique=True,
        sqlite_where=STANDING,
        postgresql_where=STANDING,
    )


def create_grants() -> None:
    op.create_table(
        "adapter_grants",
        sa.Column("adapter_id", sa.Text(), nullable=False),
        sa.Column("grantee", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("granted_by", sa.Text(), nullable=False),
        sa.Column("granted_at", BIG, nullable=False),
        sa.PrimaryKeyConstraint("adapter_id", "grantee", name="pk_adapter_grants"),
        sa.ForeignKeyConstraint(
            ["tenant_id", "adapter_id"],
            ["adapters.tenant_id", "adapters.id"],
            name="fk_adapter_grants_tenant_id_adapter_id",
        ),
    )
    op.create_index("ix_adapter_grants_grantee", "adapter_grants", ["grantee"])
