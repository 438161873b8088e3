"""The draft side: SGLang's draft workers with hooks and a gate."""
