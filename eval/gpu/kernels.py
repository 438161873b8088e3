"""A sprint's commands on kernels: their tests while servers start, and parts of a step alone."""

from __future__ import annotations

import json
import os
import sys
import threading

from eval.gpu.fleet import run_bounded
from eval.gpu.plan import Plan
from eval.gpu.results import Results, elapsed

#: Tests of kernels alone. ``tests/cuda/test_servers.py`` starts servers as the sprint does.
TESTS = (
    "tests/kernels",
    "tests/draft/test_chain.py",
    "tests/policies/test_fused.py",
    "tests/cuda/test_flashinfer_trees.py",
)
GPUCHECK_SECONDS = 75.0


class Kernels:
    """``gpucheck.py`` of the kit, if there is one, then ``pytest -m gpu``; and microbenchmarks.

    Their output is appended to ``kernels.log``.
    """

    def __init__(self, results: Results, kit: str | None, plan: Plan) -> None:
        self._results, self._kit, self._plan = results, kit, plan
        self._log = results.folder / "kernels.log"
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Start the tests in a thread."""
        self._thread.start()

    def join(self, until: float) -> None:
        """Wait for tests that run, at most until that second of the call."""
        if self._thread.ident:
            self._thread.join(timeout=max(0.0, until - elapsed()))

    def _run(self) -> None:
        if self._kit:
            self._part("gpucheck", [f"{self._kit}/gpucheck.py"], GPUCHECK_SECONDS)
        options = ["-p", "no:cacheprovider", "-v", "--tb=short", "-rfE", *self._plan.pytest]
        argv = ["-m", "pytest", "-m", "gpu", *TESTS, *options]
        self._part("pytest", argv, self._plan.pytest_seconds)

    def _part(self, name: str, argv: list[str], seconds: float) -> None:
        began = elapsed()
        before = self._log.stat().st_size if self._log.exists() else 0
        code = run_bounded([sys.executable, *argv], seconds, self._log)
        lines = self._log.read_bytes()[before:].decode(errors="replace").splitlines()
        passed = sum(line.startswith("ok ") or " PASSED" in line for line in lines)
        failed = [x[:300] for x in lines if x.startswith(("FAIL", "ERROR ")) or " FAILED" in x]
        self._results.add(
            "kernels",
            part=name,
            code=code,
            seconds=round(elapsed() - began, 1),
            passed=passed,
            failed=failed[:30],
        )
        self._results.log(f"{name}: exit code {code}, {passed} passed, {len(failed)} failed")

    def microbench(self, seconds: float) -> None:
        """Measure the GPU's ceilings and the parts of a step; CEILINGS has the former's flags."""
        end = elapsed() + seconds
        ceilings, rows = (self._results.folder / name for name in ("ceilings.json", "micro.json"))
        limits = ["--out", str(ceilings), *os.environ.get("CEILINGS", "").split()]
        parts = ["--ceilings", str(ceilings), "--out", str(rows), *self._plan.microbench]
        for module, options in (("eval.gpu.roofline", limits), ("eval.gpu.microbench", parts)):
            argv = [sys.executable, "-m", module, *options]
            code = run_bounded(argv, end - elapsed(), self._log)
            found = json.loads(ceilings.read_text()) if ceilings.exists() else None
            self._results.add("microbench", part=module, code=code, ceilings=found)
            self._results.log(f"{module}: exit code {code}")
