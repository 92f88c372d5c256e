"""SGLang with ``--device cpu`` on a machine without GPU and without a CPU build of sgl_kernel.

* :mod:`.bootstrap`   switches it on, before SGLang is imported (the seam in ``sglang/__init__.py`` calls it)
* :mod:`.gdn`         Gated DeltaNet: causal convolution, gates, chunked prefill, one-token step, gated norm
* :mod:`.speculation` draft trees: building, greedy verification, token and cache-location helpers
* :mod:`.sampling`    sampling from the target along a draft tree
* :mod:`.operators`   registers them as ``torch.ops.sgl_kernel.*_cpu``
* :mod:`.adapters`    replaces the few names in SGLang that lead to a Triton kernel even on CPU
* :mod:`.paged`       attention of several queries per request over a paged KV pool
* :mod:`.attention`   SGLang's attention backends over it: tree verification and EAGLE draft decoding
* ``overlay/``        a stand-in package ``sgl_kernel``: the wheel's Python files over the operators above

Importing this package imports neither torch nor SGLang.
"""
