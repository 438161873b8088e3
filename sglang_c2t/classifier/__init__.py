"""The C2T classifier: features, model, file, calibration and recordings."""
