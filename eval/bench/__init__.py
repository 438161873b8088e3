"""The serving benchmark: what is run, on which prompts, and what is kept of it."""
