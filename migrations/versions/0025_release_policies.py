"""release policies: what a revision must show before it takes most of an alias's requests"""

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
TEXTS = ("adapter_id", "alias", "tenant_id", "policy", "changed_by")


def upgrade() -> None:
    op.create_table(
        "release_policies",
        *(sa.Column(name, sa.Text(), nullable=False) for name in TEXTS),
        sa.Column("changed_at", BIG, nullable=False),
        sa.PrimaryKeyConstraint("adapter_id", "alias", name="pk_release_policies"),
        sa.ForeignKeyConstraint(
            ["tenant_id", "adapter_id"],
            ["adapters.tenant_id", "adapters.id"],
            name="fk_release_policies_tenant_id_adapter_id",
        ),
    )


def downgrade() -> None:
    op.drop_table("release_policies")
