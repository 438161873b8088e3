"""Cases for the emulated device, and the process that serves them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from tests.emulated.serve import Case, Served

REPOSITORY = Path(__file__).parents[2]

#: Seconds that a start or a run may take, on a machine that has other things to do.
SECONDS = 300


class Emulator:
    """Serves one case after the other, each in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process, self._log = process, log
        self._read()  # it is ready

    def serve(self, case: Case) -> list[Served]:
        """Serve the runs; AssertionError with the last output where one failed."""
        served = self.try_to(case)
        for run in served:
            assert not run.error, f"{run.error}\n{self._printed()}"
        return served

    def try_to(self, case: Case) -> list[Served]:
        """Serve the runs, some of which may fail."""
        assert self._process.stdin is not None
        print(json.dumps(asdict(case)), file=self._process.stdin, flush=True)
        told = ((run, json.loads(self._read())) for run in case.runs)
        return [Served(**{**served, "requests": run.requests}) for run, served in told]

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the emulator ended:\n{self._printed()}"
        return line

    def _printed(self) -> str:
        return self._log.read_text(errors="replace")[-4000:]


@contextmanager
def emulator(folder: Path) -> Iterator[Emulator]:
    """One that lives as long as the block; what it prints is in ``folder``."""
    log = folder / "emulator.log"
    home = {"HOME": str(folder), "FLASHINFER_WORKSPACE_BASE": str(folder)}
    with log.open("w") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.emulated.serve", str(SECONDS)],
            cwd=REPOSITORY, env={**os.environ, **home},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sink, text=True,
        )  # fmt: skip
    try:
        yield Emulator(process, log)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
