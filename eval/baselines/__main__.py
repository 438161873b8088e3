"""Train a baseline that learns: ``python -m eval.baselines RULE RECORDING ... --out FILE``.

``mcsd`` and ``mcsd-hidden`` need a recording made with ``--c2t-policy eval.baselines:MCSDInputs``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from eval.baselines import logistic, mcsd
from eval.baselines.estimators import save
from sglang_c2t.classifier.recording import read_recording
from sglang_c2t.config import ConfigError

TRAINERS = {
    logistic.Logistic.name: logistic.train,
    mcsd.MCSD.name: mcsd.train,
    mcsd.MCSDHidden.name: mcsd.train_hidden,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Read the recordings, train, and write the weights."""
    parser = argparse.ArgumentParser(prog="python -m eval.baselines", description=__doc__)
    parser.add_argument("rule", choices=sorted(TRAINERS))
    parser.add_argument("recordings", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="file, .safetensors")
    args = parser.parse_args(argv)
    try:
        recording = read_recording(*args.recordings, mix_drafts=True)
        save(TRAINERS[args.rule](recording), args.out)
    except (ConfigError, OSError) as error:
        print(f"python -m eval.baselines: error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
