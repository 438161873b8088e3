"""Files of a benchmark run: what is written is what is read, or is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.bench.records import (
    Cell,
    Method,
    RecordError,
    Request,
    Run,
    has_cell,
    read_cell,
    read_cells,
    read_run,
    write_cell,
    write_run,
)


def request(index: int, verify_ct: int = 2) -> Request:
    meta = {
        "spec_verify_ct": verify_ct,
        "spec_num_correct_drafts": 3,
        "spec_num_proposed_drafts": 4,
        "finish_reason": {"type": "stop", "matched": 0},
    }
    return Request(index, "math", 11, 3, (5, 6, 7), 0.5, 1.25, 0.25, True, "", meta)


def cell(repeat: int = 0, num_requests: int = 2, method: str = "fixed 3") -> Cell:
    return Cell(
        method, 0.0, 8, repeat, "2026-01-01T00:00:00+00:00", 2.0, 6, 3.0,
        {"mean_ttft_ms": 7.0}, {"verify_rows": 9}, {}, ["python", "-m", "sglang.launch_server"],
        tuple(request(i) for i in range(num_requests)), {"seconds": 1.0, "steps": 10},
    )  # fmt: skip


RUN = Run(
    "2026-01-01T00:00:00+00:00",
    {"name": "test", "methods": [{"kind": "none"}]},
    {"revision": "abc", "hardware": {"cores": 2}},
    {"name": "mix", "n": 2, "sha256": "00", "parts": []},
    (Method("no speculation", "none", [], baseline=True), Method("c2t", "c2t", ["--c2t"], 0.5)),
)


def test_cell_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert not has_cell(tmp_path, cell().key)
    path = write_cell(tmp_path, cell())
    assert path == tmp_path / "cells" / "fixed-3.t0.c8.r0.jsonl"
    assert has_cell(tmp_path, cell().key)
    assert read_cell(path) == cell()


def test_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_run(tmp_path / "run", RUN)
    assert read_run(tmp_path / "run") == RUN


@given(share=st.floats(0, 1))
@settings(deadline=None)
def test_cell_cut_short_anywhere_is_refused(
    tmp_path_factory: pytest.TempPathFactory, share: float
) -> None:
    """Nothing but the last line end may be missing; no cut gives another cell."""
    path = write_cell(tmp_path_factory.mktemp("run"), cell(num_requests=3))
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    if len(path.read_bytes()) >= len(whole) - 1:
        assert read_cell(path) == cell(num_requests=3)
    else:
        with pytest.raises(RecordError, match=path.name):
            read_cell(path)


def test_broken_files_are_named_and_the_others_are_read(tmp_path: Path) -> None:
    for repeat in range(3):
        write_cell(tmp_path, cell(repeat))
    broken = tmp_path / "cells" / cell(1).key.file_name
    broken.write_text(broken.read_text()[:-40])
    (tmp_path / "cells" / ".123.fixed-3.t0.c8.r7.jsonl").write_text("being written")
    cells, sentences = read_cells(tmp_path)
    assert [c.repeat for c in cells] == [0, 2]
    assert len(sentences) == 1
    assert broken.name in sentences[0]
