"""Where SGLang calls us: flags, refusals, requests, control, reporting."""
