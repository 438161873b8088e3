"""tau and gamma from the counts of requests: sums first, one division last.

Names follow SGLang's: ``correct`` counts accepted drafts, ``accept`` the bonus token too.
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
        """Sum SGLang's ``meta_info``. A request that ended with its first token has no counts; a
        request with some of them only is a KeyError.
        """
        verified = [meta for meta in meta_infos if "spec_verify_ct" in meta]
        return cls(*(sum(meta[f"spec_{name}"] for meta in verified) for name in cls.__match_args__))

    @property
    def accept_length(self) -> float | None:
        """tau: tokens per verification, the bonus token included."""
        return 1 + self.num_correct_drafts / self.verify_ct if self.verify_ct else None

    @property
    def gamma(self) -> float | None:
        """gamma: drafts verified per verification."""
        return self.num_proposed_drafts / self.verify_ct if self.verify_ct else None
