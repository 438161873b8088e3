"""What no server runs: record, train, evaluate, replay."""
