"""Rows of fine-tuning jobs."""

from __future__ import annotations

import msgspec

from loramux.common.identity import Principal
from loramux.data.entities import TrainingJob, TrainingOptions
from loramux.data.records.database import Database
from loramux.data.records.training import VALIDATING_FILES


def job_of(caller: Principal, database: Database, id: str, **more: object) -> TrainingJob:
    """Return a caller's job that `server_1` validates. `more`: fields with other values."""
    job = TrainingJob(
        id=id,
        tenant_id=caller.tenant,
        project_id=caller.project,
        owner=caller.owner,
        key_id=caller.key_id,
        model="tiny",
        base_model="tiny",
        adapter_digest=None,
        template_digest="0" * 64,
        context=256,
        adapter="a",
        training_file_id="file-1",
        validation_file_id=None,
        options=TrainingOptions(),
        tags="",
        state=VALIDATING_FILES,
        server_id="server_1",
        attempts=1,
        created_at=database.now(),
    )
    return msgspec.structs.replace(job, **more)
