"""Policies for tests, loaded into a server with ``--c2t-policy``; one server, many gates."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from sglang_c2t.config import C2TConfig
from sglang_c2t.policies import ChainPolicy, DraftLayer, build_policy

MODES = ("c2t", "full", "none", "random")


@dataclass
class Switchable:
    """Reads from the file ``control`` which gate to be, before every layer.

    ``random`` keeps each token with probability 0.7, so that lengths differ between the
    requests of a batch and from step to step. Its seed is the process's own, so that
    tensor-parallel ranks would decide differently if each decided for itself.
    """

    control: str
    name: ClassVar[str] = "switchable"
    needs: ClassVar[frozenset[str]] = frozenset()
    _generator: torch.Generator = field(
        default_factory=lambda: torch.Generator().manual_seed(os.getpid())
    )
    _c2t: ChainPolicy = field(default_factory=lambda: build_policy(C2TConfig()))

    def keep(self, layer: DraftLayer) -> Tensor:
        """[B] bool, as the current mode says."""
        mode = Path(self.control).read_text()
        if mode == "c2t":
            return self._c2t.keep(layer)
        if mode == "random":
            return torch.rand(layer.alive.shape, generator=self._generator) < 0.7
        return torch.full_like(layer.alive, {"full": True, "none": False}[mode])
