"""Checks, then times treewy's CUDA operators beside SGLang's own kernels: `python -m bench.kernels`."""
