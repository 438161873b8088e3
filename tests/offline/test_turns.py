"""Servers that take turns: one runs at a time, by a clock of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

from sglang_c2t.offline.servers import start, stop
from sglang_c2t.offline.turns import Turns

#: Writes the time, every 5 ms.
TICKS = "import time\nwhile True: print(time.monotonic(), flush=True); time.sleep(0.005)"


def ticks(log: Path, since: float, until: float) -> list[float]:
    return [at for at in map(float, log.read_text().splitlines()[:-1]) if since < at < until]


def test_servers_take_turns_and_their_clocks_stand_while_they_do(tmp_path: Path) -> None:
    logs = {name: tmp_path / name for name in "ab"}
    running: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, log in logs.items():
            running[name] = start([sys.executable, "-c", TICKS], os.environ, log)
        while not all(log.read_text().count("\n") > 2 for log in logs.values()):
            time.sleep(0.05)
        turns = Turns({name: process.pid for name, process in running.items()}, seconds=0.3)
        with turns.taken():
            began = time.monotonic()
            time.sleep(2.0)
            both = {name: ticks(log, began, time.monotonic()) for name, log in logs.items()}
            turns.done("a")
            time.sleep(0.2)  # until its turn has ended
            last, rest = turns.clock("a"), time.monotonic()
            time.sleep(0.8)
            assert turns.clock("a") == last
            assert not ticks(logs["a"], rest, time.monotonic())
            assert len(ticks(logs["b"], rest, time.monotonic())) > 20
            assert not turns.over
        ended = time.monotonic()
        assert turns.over, "what ends now has no time"
        names = [name for _, name in sorted((at, n) for n in both for at in both[n])]
        assert set(names) == {"a", "b"}
        assert sum(one != other for one, other in pairwise(names)) <= 10
        assert turns.clock("a") + turns.clock("b") <= ended - began + 0.1
        assert turns.clock("b") > 0.5 * (ended - began)
        time.sleep(0.3)
        assert all(ticks(log, ended, time.monotonic()) for log in logs.values())
    finally:
        for process in running.values():
            stop(process)
