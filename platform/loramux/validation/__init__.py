"""Uploads are proved sound in processes of their own, before anything serves them."""

from loramux.validation.report import Check, Refusal, Report, Usage, Warned
from loramux.validation.sandbox import SandboxDied
from loramux.validation.validator import Validator

__all__ = ["Check", "Refusal", "Report", "SandboxDied", "Usage", "Validator", "Warned"]
