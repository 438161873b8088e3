"""A short soak from its command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval.soak.__main__ import main
from eval.soak.malformed import FATAL, MALFORMED


@pytest.mark.extended
@pytest.mark.server
def test_soak_of_a_minute_passes_and_reports_every_malformed_request(tmp_path: Path) -> None:
    argv = ["--minutes", "0.8", "--shapes", "tree", "--seed", "5", "--out", str(tmp_path)]
    assert main(argv) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["provenance"]["command"].endswith(" ".join(argv))
    tree = summary["servers"]["tree"]
    assert all(check["passed"] is not False for check in tree["checks"])
    rows = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert sum(tree["requests"].values()) == len(rows)
    assert {case.name for case in (*MALFORMED, *FATAL)} <= {row["name"] for row in rows}
    faults = {fault.split(":")[0] for fault in tree["faults"]}
    assert {"switch policy", "pause", "flush", "reload classifier"} <= faults
