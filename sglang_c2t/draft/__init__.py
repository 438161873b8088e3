"""The gates of a batch: what grows, what is cut, what waits for the next step. No SGLang here."""
