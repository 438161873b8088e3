"""The draft side: SGLang's draft workers, watched and gated."""
