"""Integration into SGLang's runtime; only this folder imports sglang."""
