"""Attachment to SGLang's runtime; the only folder that imports sglang."""
