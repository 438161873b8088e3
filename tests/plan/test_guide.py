"""The planner that the guide adds in one file plans what the guide says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import sglang_c2t
from sglang_c2t.plan.step import BatchView, StepKind
from sglang_c2t.policies.base import TreeShape

GUIDE = Path(sglang_c2t.__file__).parent / "guides" / "developing.md"


@pytest.mark.parametrize(("weekday", "layers"), [(0, 2), (1, 5)])
def test_planner_of_the_guide_drafts_two_layers_on_mondays(
    weekday: int, layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (code,) = re.findall(r"```python\n(# mondays\.py.*?)```", GUIDE.read_text(), re.DOTALL)
    (tmp_path / "mondays.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    import mondays  # type: ignore[import-not-found]

    class Day:
        @staticmethod
        def today() -> Day:
            return Day()

        def weekday(self) -> int:
            return weekday

    monkeypatch.setattr(mondays, "date", Day)
    from sglang_c2t.config import C2TConfig
    from sglang_c2t.policies import build_policy

    planner = build_policy(C2TConfig("mondays:Mondays")).planner(TreeShape(1, 5, 6))
    plan = planner.plan(BatchView(4, row_counts=(8, 12, 16, 24), depths=(1, 2, 3, 4, 5)))
    assert (plan.num_layers, plan.kind is StepKind.UNIFORM) == (layers, weekday == 0)
    assert weekday or plan.row_budget == 4 * 3
