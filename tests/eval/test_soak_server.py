"""A soak of less than a minute, from its command line: it must pass and tell what it did."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval.soak.__main__ import main
from eval.soak.malformed import FATAL, MALFORMED


@pytest.mark.extended
@pytest.mark.server
def test_a_short_soak_passes_and_its_summary_tells_of_every_kind_of_request(
    tmp_path: Path,
) -> None:
    argv = ["--minutes", "0.8", "--shape", "tree", "--round", "48", "--probes", "1",
            "--seed", "5", "--out", str(tmp_path)]  # fmt: skip
    assert main(argv) == 0
    told = json.loads((tmp_path / "summary.json").read_text())
    assert told["provenance"]["command"].endswith(" ".join(argv))
    (tree,) = told["servers"]
    assert all(check["passed"] is not False for check in tree["checks"])
    rows = [
        json.loads(line) for line in (tmp_path / "tree-requests.jsonl").read_text().splitlines()
    ]
    assert sum(sum(kind.values()) for kind in tree["requests"].values()) == len(rows)
    sent = {row["name"] for row in rows if row["kind"] == "malformed"}
    assert sent == {case.name for case in (*MALFORMED, *FATAL)}
    assert tree["retracted_requests"] > 0
    assert {"switch policy", "pause", "flush", "reload classifier"} <= {
        what.split(":")[0] for what in tree["control"]
    }
