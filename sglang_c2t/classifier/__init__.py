"""The C2T classifier: its features, its model, its file, its training."""
