"""Releases that are measured: how each revision of an adapter serves, and which of two is better on a set."""

from loramux.records.bases import BaseMigration, MigrationItem
from loramux.records.comparisons import Evaluation
from loramux.records.revision_metrics import FIRST_TOKEN_BOUNDS
from loramux.releases.comparison import EvaluationResult
from loramux.releases.evaluations import EvaluationNotFound, Evaluations, open_evaluations
from loramux.releases.graders import Grader, InvalidGrader
from loramux.releases.likeness import Measure
from loramux.releases.metrics import (
    WINDOWS,
    FeedbackSummary,
    InvalidFeedback,
    RequestNotFound,
    RevisionMetrics,
    RevisionReport,
    ServiceLevel,
    VersionReport,
    open_revision_metrics,
)
from loramux.releases.migrations import (
    BaseMigrations,
    Migration,
    MigrationNotFound,
    Shifted,
    open_base_migrations,
)
from loramux.releases.policies import (
    CanaryGuards,
    Guard,
    PolicyCheck,
    PolicyReport,
    ReleasePolicies,
    ReleasePolicy,
    ReleaseRefused,
    open_canary_guards,
)
from loramux.releases.shadows import ShadowReport, ShadowRequests, Shadows, open_shadows

__all__ = [
    "FIRST_TOKEN_BOUNDS",
    "WINDOWS",
    "BaseMigration",
    "BaseMigrations",
    "CanaryGuards",
    "Evaluation",
    "EvaluationNotFound",
    "EvaluationResult",
    "Evaluations",
    "FeedbackSummary",
    "Grader",
    "Guard",
    "InvalidFeedback",
    "InvalidGrader",
    "Measure",
    "Migration",
    "MigrationItem",
    "MigrationNotFound",
    "PolicyCheck",
    "PolicyReport",
    "ReleasePolicies",
    "ReleasePolicy",
    "ReleaseRefused",
    "RequestNotFound",
    "RevisionMetrics",
    "RevisionReport",
    "ServiceLevel",
    "ShadowReport",
    "ShadowRequests",
    "Shadows",
    "Shifted",
    "VersionReport",
    "open_base_migrations",
    "open_canary_guards",
    "open_evaluations",
    "open_revision_metrics",
    "open_shadows",
]
