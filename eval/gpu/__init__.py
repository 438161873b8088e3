"""Measuring on a GPU: the demo pair in models of real size, servers, parts of a step."""
