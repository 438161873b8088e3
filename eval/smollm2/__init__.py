"""A real pair: SmolLM2-135M-Instruct, and an EAGLE-3 head for it that was trained here."""

from pathlib import Path

#: The head, as SGLang loads it.
HEAD = Path(__file__).parent / "weights"
