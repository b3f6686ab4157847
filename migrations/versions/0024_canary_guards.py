"""canary guards: aliases whose new revision is taken back where it is worse"""

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "canary_guards",
        *(sa.Column(name, sa.Text(), nullable=False) for name in ("adapter_id", "alias", "tenant_id", "measures")),
        sa.Column("created_at", BIG, nullable=False),
        sa.PrimaryKeyConstraint("adapter_id", "alias", name="pk_canary_guards"),
        sa.ForeignKeyConstraint(
            ["tenant_id", "adapter_id", "alias"],
            ["aliases.tenant_id", "aliases.adapter_id", "aliases.name"],
            name="fk_canary_guards_tenant_id_adapter_id_alias",
            ondelete="CASCADE",
        ),
    )


def downgrade() -> None:
    op.drop_table("canary_guards")
