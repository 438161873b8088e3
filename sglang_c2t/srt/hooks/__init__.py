"""Hooks into SGLang: flags, refusals, requests, control, reporting."""
