"""Every table, for the migrations and their test."""

from __future__ import annotations

from loramux.records import models, tenancy_models

METADATA = models.Base.metadata
TABLE_MODULES = (models, tenancy_models)
