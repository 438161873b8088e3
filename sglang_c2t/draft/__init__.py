"""Gates of a batch: they judge drafts, cut them and keep what the next step needs. They know
nothing of SGLang.
"""
