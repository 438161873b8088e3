"""Recording inside a server: what goes wrong with the disk must not reach the requests."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from sglang_c2t.policies import DraftLayer


class FullDisk:
    """A writer whose disk is full."""

    def add(self, rows: dict[str, torch.Tensor]) -> None:
        raise OSError(28, "No space left on device")

    def flush(self) -> None:
        raise OSError(28, "No space left on device")


def test_a_full_disk_ends_the_recording_and_not_the_server(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from sglang_c2t.srt.recorder import Recorder

    recorder = Recorder(FullDisk())  # type: ignore[arg-type]
    batch = SimpleNamespace(reqs=[SimpleNamespace(rid="a")])
    one = torch.ones(1)
    layers = [DraftLayer(depth=1, prob=one, joint=one, entropy=one, alive=one.bool())]
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            recorder.add(batch, layers, torch.tensor([2]), torch.tensor([1]))
    said = [record.getMessage() for record in caplog.records]
    assert said == ["C2T: recording stopped, serving goes on: [Errno 28] No space left on device"]
