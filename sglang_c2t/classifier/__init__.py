"""The C2T classifier: features, model, file and recordings."""
