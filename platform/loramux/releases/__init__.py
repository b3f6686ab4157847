"""Releases that are measured: how each revision of an adapter serves, and which of two is better on a set."""

from loramux.records.bases import BaseMigration, MigrationItem
from loramux.records.comparisons import Evaluation
from loramux.records.revision_metrics import FIRST_TOKEN_BOUNDS
from loramux.releases.comparison import EvaluationResult
from loramux.releases.evaluations import Evaluations, open_evaluations
from loramux.releases.graders import Grader
from loramux.releases.metrics import (
    RevisionMetrics,
    RevisionReport,
    ServiceLevel,
    VersionReport,
    open_revision_metrics,
)
from loramux.releases.migrations import (
    BaseMigrations,
    Migration,
    Shifted,
    open_base_migrations,
)
from loramux.releases.policies import (
    CanaryGuards,
    Guard,
    PolicyCheck,
    ReleasePolicies,
    ReleasePolicy,
    open_canary_guards,
)
from loramux.releases.shadows import ShadowReport, Shadows, open_shadows

__all__ = [
    "FIRST_TOKEN_BOUNDS",
    "BaseMigration",
    "BaseMigrations",
    "CanaryGuards",
    "Evaluation",
    "EvaluationResult",
    "Evaluations",
    "Grader",
    "Guard",
    "Migration",
    "MigrationItem",
    "PolicyCheck",
    "ReleasePolicies",
    "ReleasePolicy",
    "RevisionMetrics",
    "RevisionReport",
    "ServiceLevel",
    "ShadowReport",
    "Shadows",
    "Shifted",
    "VersionReport",
    "open_base_migrations",
    "open_canary_guards",
    "open_evaluations",
    "open_revision_metrics",
    "open_shadows",
]
