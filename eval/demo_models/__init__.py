"""A tiny model family that stock SGLang loads, and the script that makes it (see MODEL_CARD.md)."""
