"""metrics of revisions by project"""

import sqlalchemy as sa
from alembic import op

revision = "0032"
down_revision = "0031"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
COUNTED = (
    *("completed", "cancelled", "failed", "refused", "stop", "length", "abort"),
    *("prompt_tokens", "output_tokens", "decode_tokens", "decode_us"),
    *(f"first_token_{number}" for number in range(16)),
)


def upgrade() -> None:
    """Counts of before belong to a tenant's only project; where it has several, keys of one do not see them."""
    only = (
        "coalesce((SELECT min(id) FROM projects WHERE projects.tenant_id = old_revision_hours.tenant_id"
        " HAVING count(*) = 1), '')"
    )
    _rebuild(("tenant_id", "project_id", "model", "hour"), f"tenant_id, {only}, model, hour, {', '.join(COUNTED)}")
    op.execute("UPDATE schema_floor SET revision = '0032'")  # servers of before would add to rows by the old key


def downgrade() -> None:
    op.execute("UPDATE schema_floor SET revision = '0031'")
    sums = ", ".join(f"sum({name})" for name in COUNTED)
    _rebuild(("tenant_id", "model", "hour"), f"tenant_id, model, hour, {sums}", "GROUP BY tenant_id, model, hour")


def _rebuild(keys: tuple[str, ...], selected: str, grouped: str = "") -> None:
    op.drop_index("ix_revision_hours_hour", "revision_hours")
    op.rename_table("revision_hours", "old_revision_hours")
    if op.get_bind().dialect.name == "postgresql":  # a constraint keeps its name when its table is renamed
        for name in ("pk_revision_hours", "fk_revision_hours_tenant_id"):
            op.drop_constraint(name, "old_revision_hours")
    op.create_table(
        "revision_hours",
        *(sa.Column(name, BIG if name == "hour" else sa.Text(), nullable=False) for name in keys),
        *(sa.Column(name, BIG, nullable=False) for name in COUNTED),
        sa.PrimaryKeyConstraint(*keys, name="pk_revision_hours"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_revision_hours_tenant_id"),
    )
    columns = ", ".join((*keys, *COUNTED))
    op.execute(
        f"INSERT INTO revision_hours ({columns}) SELECT {selected} FROM old_revision_hours {grouped}"  # noqa: S608
    )
    op.drop_table("old_revision_hours")
    op.create_index("ix_revision_hours_hour", "revision_hours", ["hour"])
