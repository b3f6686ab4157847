"""the versions of a training adapter are counted together, under the name of their series"""

from alembic import op

revision = "0045"
down_revision = "0041"
branch_labels = None
depends_on = None

SERIES = """SELECT base_model, adapter_digest, min(model) AS series FROM ledger_entries
            WHERE adapter_digest IS NOT NULL AND model NOT LIKE '%@%' GROUP BY base_model, adapter_digest"""


def upgrade() -> None:
    op.execute(
        f"""INSERT INTO engine_counts
            SELECT counts.server_id, counts.base_model, versions.series,
                   sum(counts.prompt_tokens), sum(counts.cached_tokens), sum(counts.output_tokens)
            FROM engine_counts AS counts JOIN ({SERIES}) AS versions
              ON counts.base_model = versions.base_model AND counts.adapter_digest = versions.adapter_digest
            GROUP BY counts.server_id, counts.base_model, versions.series"""  # noqa: S608  a constant
    )
    op.execute(
        f"""DELETE FROM engine_counts WHERE EXISTS (SELECT 1 FROM ({SERIES}) AS versions
              WHERE engine_counts.base_model = versions.base_model
                AND engine_counts.adapter_digest = versions.adapter_digest)"""  # noqa: S608  a constant
    )


def downgrade() -> None:
    """Leave the sums: the counts of single versions are not kept."""
