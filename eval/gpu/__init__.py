"""Measuring on a GPU: models of real size with random weights, acceptance from recorded traces."""
