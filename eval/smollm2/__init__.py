"""A real pair: SmolLM2-135M-Instruct, and an EAGLE-3 head for it that was trained here."""

from pathlib import Path

#: Folder of the EAGLE-3 head; classifiers and logs call it by this name.
HEAD = Path(__file__).parent / "SmolLM2-135M-Instruct-EAGLE3"
