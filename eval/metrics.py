"""tau and gamma from per-request counts: sums first, one division last.

Names follow SGLang's: ``correct`` counts accepted draft tokens, ``accept`` counts the
bonus token too. A leaf: standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SpecTotals:
    """Counts summed over requests. All zero on a server without speculation."""

    verify_ct: int = 0
    num_correct_drafts: int = 0
    num_proposed_drafts: int = 0

    @classmethod
    def from_meta_infos(cls, meta_infos: Iterable[Mapping[str, Any]]) -> SpecTotals:
        """Sum SGLang's per-request ``meta_info``.

        A request that ended with its first token was never verified and carries none of
        the keys; a request that carries only some of them is an error.
        """
        verified = [meta for meta in meta_infos if "spec_verify_ct" in meta]
        return cls(
            verify_ct=sum(meta["spec_verify_ct"] for meta in verified),
            num_correct_drafts=sum(meta["spec_num_correct_drafts"] for meta in verified),
            num_proposed_drafts=sum(meta["spec_num_proposed_drafts"] for meta in verified),
        )

    @property
    def accept_length(self) -> float | None:
        """tau: tokens gained per verification, the bonus token included."""
        return _ratio(self.verify_ct + self.num_correct_drafts, self.verify_ct)

    @property
    def gamma(self) -> float | None:
        """gamma: draft tokens the target verified per verification, the root excluded."""
        return _ratio(self.num_proposed_drafts, self.verify_ct)

    @property
    def accept_rate(self) -> float | None:
        """alpha: accepted share of the draft tokens the target verified."""
        return _ratio(self.num_correct_drafts, self.num_proposed_drafts)


def _ratio(numerator: int, denominator: int) -> float | None:
    return numerator / denominator if denominator else None
