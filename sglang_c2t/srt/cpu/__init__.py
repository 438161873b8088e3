"""SGLang on CPUs without its own kernels."""
