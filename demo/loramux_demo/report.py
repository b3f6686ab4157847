"""What the demo found, as one record that is printed, or encoded as JSON, and that says whether all went well."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from loramux_demo.accounts import Sharing, UsageRow
from loramux_demo.assets import OWNERS
from loramux_demo.drive import Drive

LEAST_EXACT = 0.9
LEAST_SHARED = sum(map(len, OWNERS.values()))


@dataclass(frozen=True)
class Report:
    """One run of the demo."""

    url: str
    drive: Drive
    sharing: Sharing
    usage: tuple[UsageRow, ...]
    """As each tenant reads it from the server, sorted."""
    usage_of_responses: tuple[UsageRow, ...]
    """As the responses said, sorted."""
    isolated: bool
    """Whether another tenant's adapter and an absent one get the same answer."""

    @property
    def failures(self) -> list[str]:
        """A sentence for each promise that was not kept."""
        promises = (
            (
                self.drive.exact >= LEAST_EXACT,
                f"only {self.drive.exact:.0%} of the answers are exactly as expected; {LEAST_EXACT:.0%} must be",
            ),
            (
                self.sharing.beside_base >= LEAST_SHARED,
                f"at most {self.sharing.beside_base} adapters shared a step with the base model; "
                f"{LEAST_SHARED} must have",
            ),
            (self.usage == self.usage_of_responses, "the usage rows differ from the usage in the responses"),
            (self.isolated, "one tenant can tell another's adapter from one that does not exist"),
        )
        return [sentence for kept, sentence in promises if not kept]

    def as_json(self) -> dict[str, Any]:
        """The document that --json prints."""
        return {
            "ok": not self.failures,
            "failures": self.failures,
            "url": self.url,
            "exact": self.drive.exact,
            "max_distinct_adapters_in_a_step": self.sharing.in_a_step,
            "max_distinct_adapters_beside_base": self.sharing.beside_base,
            "tokens_per_second": round(self.drive.tokens_per_second, 1),
            "output_tokens": sum(answer.output_tokens for answer in self.drive.answers),
            "seconds": round(self.drive.seconds, 3),
            "usage": [asdict(row) for row in self.usage],
            "usage_equals_responses": self.usage == self.usage_of_responses,
            "tenants_isolated": self.isolated,
            "answers": [
                {
                    "model": answer.model or answer.call.model,
                    "tenant": answer.call.tenant,
                    "endpoint": answer.call.way,
                    "prompt": answer.call.prompt.question,
                    "text": answer.text,
                    "expected": answer.call.prompt.expected,
                    "ok": answer.ok,
                    "error": answer.error,
                }
                for answer in self.drive.answers
            ],
        }
