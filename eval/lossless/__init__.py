"""Whether a ``--c2t`` server answers what the server without speculation answers."""
