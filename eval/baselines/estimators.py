"""Estimators of acceptance: which recorded tokens they learn from, and their weights on disk.

An estimator says how likely the target accepts a token whose ancestors it has accepted.
"""

from __future__ import annotations

import os

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sglang_c2t.classifier.recording import Recording
from sglang_c2t.config import ConfigError
from sglang_c2t.offline.train import TrainSettings, split_by_group


def reached(recording: Recording) -> Tensor:
    """[n] bool: the token's parent is the root or was accepted, so its label is its own."""
    parents = recording.parent_rows()
    return (parents < 0) | recording.nodes["accept"].bool()[parents.clamp(min=0)]


def training_rows(recording: Recording, generator: torch.Generator) -> Tensor:
    """The recorded tokens that the target reached, of the prompts that `train` learns from too."""
    prompt = recording.drafts["prompt"][recording.nodes["draft"].long()]
    rows, _ = split_by_group(prompt, TrainSettings().heldout_share, generator)
    rows = rows[reached(recording)[rows]]
    accepted = recording.nodes["accept"][rows].bool()
    if accepted.all() or not accepted.any():
        raise ConfigError("a recording needs accepted and rejected tokens; record more prompts")
    return rows


def save(net: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write the weights."""
    save_file({name: t.detach().contiguous() for name, t in net.state_dict().items()}, path)


def load(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Weights by name; :class:`ConfigError` for a file that holds none."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot read weights: {error}") from error


def frozen(net: nn.Module, weights: dict[str, Tensor]) -> nn.Module:
    """The network with these weights, to be asked only."""
    net.load_state_dict(weights)
    return net.eval().requires_grad_(False)
