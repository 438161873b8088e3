"""Triton kernels of the decode loop, each with an equivalent twin in plain torch. None knows
SGLang.
"""
