"""sglang-c2t: speculative decoding in SGLang that pays off under load. Importing this package loads
neither torch nor sglang.
"""

__version__ = "0.1.0"
