"""Policies of other papers, to compare with: ``--c2t-policy eval.baselines:NAME``.

They are asked in torch. Those that learn take the file of ``python -m eval.baselines`` as the
option ``weights``::

    {"policy": "eval.baselines:MCSD", "policy_options": {"weights": "mcsd.safetensors"}}
"""

from eval.baselines.entropy import Entropy, EntropyWidth
from eval.baselines.fork import Fork
from eval.baselines.logistic import Logistic
from eval.baselines.mcsd import MCSD, MCSDHidden, MCSDInputs
from eval.baselines.static_tree import StaticTree

__all__ = [
    "MCSD",
    "Entropy",
    "EntropyWidth",
    "Fork",
    "Logistic",
    "MCSDHidden",
    "MCSDInputs",
    "StaticTree",
]
