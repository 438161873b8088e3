"""Triton kernels of the decode loop, each with a twin in plain torch. None knows SGLang."""
