"""The console of all commands of eval, and their way to stop."""

from __future__ import annotations

import contextlib
import io
import os
import signal

import pytest

from eval import terminal
from sglang_c2t.offline.servers import interrupted_by_sigterm


def test_sigterm_lets_a_command_stop_its_servers_and_a_second_one_does_not_stop_that() -> None:
    stopped = []
    before = signal.getsignal(signal.SIGTERM)

    def command() -> None:
        with interrupted_by_sigterm():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)
                stopped.append("server")

    with pytest.raises(KeyboardInterrupt):
        command()
    assert stopped == ["server"]
    assert signal.getsignal(signal.SIGTERM) == before


def test_what_redirects_stdout_later_does_not_reach_a_console() -> None:
    ours, theirs = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(ours):
        console = terminal.console(width=60)
        with contextlib.redirect_stdout(theirs):
            table = terminal.table("title", "word", numbers=("number",))
            table.add_row("one", "1")
            console.print(table)
    assert theirs.getvalue() == ""
    assert "one" in ours.getvalue()
    assert max(map(len, ours.getvalue().splitlines())) <= 60
