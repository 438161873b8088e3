"""A bounded soak of a ``--c2t`` server: load, faults, and what they may not change."""
