"""Whether servers answer as the one without speculation does, except at ties of its logits.

The rule for ties is that of ``ties.py``: bfloat16 products round differently for other
batch shapes, and SGLang without speculation differs from itself between batch sizes as well.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from eval.gpu.fleet import Running
from eval.gpu.results import Results
from eval.gpu.ties import Reference, excused, parting


class Answers:
    """Greedy answers of one server without speculation, to compare other servers' with."""

    def __init__(
        self, results: Results, server: Running, texts: Sequence[str], tokens: int
    ) -> None:
        self._results, self._texts, self._tokens = results, texts, tokens
        replies = server.generate(texts, tokens, return_logprob=True, top_logprobs_num=2)
        self._references = [Reference.of(reply) for reply in replies]
        results.write(f"answers-{server.spec.name}.json", json.dumps(self._as_json()))
        self._control(server)

    def _as_json(self) -> list[dict[str, Any]]:
        """Tokens, and the gap in nats between the two best ones."""
        return [
            {"tokens": r.tokens, "gaps": [round(t[0][0] - t[1][0], 3) for t in r.top if len(t) > 1]}
            for r in self._references
        ]

    def _control(self, server: Running) -> None:
        """How often the server differs from itself at smaller batch sizes."""
        parted = total = 0
        for size in {max(len(self._texts) // 4, 1), max(len(self._texts) // 8, 1)}:
            replies = server.generate(self._texts[:size], self._tokens)
            for reference, reply in zip(self._references, replies, strict=False):
                parted += parting(reference, reply["output_ids"]) is not None
                total += 1
        self._results.add("control", server=server.spec.name, parted=parted, total=total)
        self._results.log(f"answers of {server.spec.name}: {parted} of {total} differ from its own")

    def compare(self, server: Running, method: str, batches: Sequence[int]) -> None:
        """Compare the answers of ``server`` at each batch size; at 1, three of them in turn."""
        for batch in batches:
            numbers = [range(batch)] if batch > 1 else [range(i, i + 1) for i in range(3)]
            replies: list[tuple[int, Any]] = []
            for places in numbers:
                group = [i % len(self._texts) for i in places]
                texts = [self._texts[i] for i in group]
                replies += zip(group, server.generate(texts, self._tokens), strict=True)
            self._add(server.spec.name, method, batch, replies)

    def _add(self, name: str, method: str, batch: int, replies: list[tuple[int, Any]]) -> None:
        pairs = [(self._references[i], reply["output_ids"]) for i, reply in replies]
        parted = sum(parting(reference, tokens) is not None for reference, tokens in pairs)
        wrong = [
            {"prompt": i, **_difference(self._references[i], reply["output_ids"])}
            for i, reply in replies
            if not excused(self._references[i], reply["output_ids"])
        ]
        tau = accept_length([reply for _, reply in replies])
        self._results.add(
            "answers",
            server=name,
            method=method,
            batch=batch,
            total=len(replies),
            parted=parted,
            wrong=wrong,
            tau=tau,
        )
        self._results.log(
            f"answers of {name}, {method}, batch {batch}: {parted} of {len(replies)} differ, "
            f"{len(wrong)} {'WRONG' if wrong else 'not at ties'}, tau {tau}"
        )


def accept_length(replies: Sequence[Any]) -> float | None:
    """Tokens per verification over all requests; ``None`` without speculation."""
    verified = sum(reply["meta_info"].get("spec_verify_ct", 0) for reply in replies)
    tokens = sum(reply["meta_info"]["completion_tokens"] for reply in replies)
    return round(tokens / verified, 3) if verified else None


def _difference(reference: Reference, tokens: Sequence[int]) -> dict[str, Any]:
    """The first place that differs, the reference's two best tokens there, and the token taken."""
    place = parting(reference, tokens)
    assert place is not None, "an equal answer is excused"
    known = place < min(len(tokens), len(reference.top))
    return {
        "place": place,
        "top": [list(entry) for entry in reference.top[place][:2]] if known else [],
        "got": tokens[place] if known else None,
        "lengths": [len(reference.tokens), len(tokens)],
    }
