"""A real pair: SmolLM2-135M-Instruct, and an EAGLE-3 head for it that was trained here."""
