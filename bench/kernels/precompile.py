"""Compiles the peers' Triton kernels for a GPU that this machine does not have.

    python -m bench.kernels.precompile CACHE_DIR [--arch 90] [--shapes ..] [--requests ..] [--drafts ..]

SGLang's convolution unrolls every draft node: at 128 nodes one variant compiles for minutes, and there are variants for
each shape and batch size. Rented GPU time is dear, so they are compiled beforehand, on meta tensors, with the same
calls, and `python -m bench.kernels --triton-cache CACHE_DIR` finds them. A kernel that is not in the cache is compiled
on the spot. The cache is valid for one Triton version; Triton's own key, which also names the build of Python, is
replaced by source, options and version.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time


def share_cache(folder: str, conv_limit: int | None = None) -> None:
    """Makes Triton read and write `folder` under keys that do not depend on the machine. With `conv_limit`, a
    convolution over more nodes that is not in there raises instead of compiling for minutes."""
    os.environ["TRITON_CACHE_DIR"] = folder
    import triton
    import triton.compiler.compiler as compiler
    import triton.runtime.cache as cache
    import triton.runtime.jit as jit

    def get_cache_key(src, backend, backend_options, env_vars):
        target = backend.target
        return f"{triton.__version__}-{target.backend}{target.arch}-{src.hash()}-{backend_options.hash()}"

    for module in (cache, compiler, jit):
        if hasattr(module, "get_cache_key"):
            module.get_cache_key = get_cache_key

    def get_group(self, filename):  # the group file names the folder it was written in
        path = self._make_path("__grp__" + filename)
        if not os.path.exists(path):
            return None
        with open(path) as f:
            names = json.load(f)["child_paths"]
        return {name: self._make_path(name) for name in names if os.path.exists(self._make_path(name))}

    cache.FileCacheManager.get_group = get_group
    if conv_limit is None:
        return
    compile_ = triton.compiler.compile

    def limited(src, target=None, options=None, **kwargs):
        if getattr(src.fn, "__name__", "") == "_causal_conv1d_update_kernel":
            seqlen = src.constants[(src.fn.arg_names.index("seqlen"),)]
            parsed = compiler.make_backend(target).parse_options(dict(options or {}))
            key = get_cache_key(src, compiler.make_backend(target), parsed, {})
            folder = cache.get_cache_manager(hashlib.sha256(key.encode()).hexdigest()).cache_dir
            if seqlen > conv_limit and not any(name.startswith("__grp__") for name in os.listdir(folder)):
                raise RuntimeError(f"not compiled beforehand: the convolution over {seqlen} nodes compiles for minutes")
        return compile_(src, target=target, options=options, **kwargs)

    triton.compiler.compile = limited


def fake_device(arch: int) -> None:
    """Triton compiles for sm_`arch` and launches nothing."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    class Driver:
        get_current_device = staticmethod(lambda: 0)
        get_current_stream = staticmethod(lambda device=0: 0)
        get_current_target = staticmethod(lambda: GPUTarget("cuda", arch, 32))

    driver.set_active(Driver())
    run = JITFunction.run
    JITFunction.run = lambda self, *args, grid, warmup, **kwargs: run(self, *args, grid=grid, warmup=True, **kwargs)


def calls_of(case, pool, kernels):
    from . import peers, problem

    shape = pool.shape
    p = problem.plan(case, pool, peers.bytes_per_layer(case, shape, pool.slots), 120 << 30)
    peer = peers.PEERS[case.mode](kernels, p)
    return [
        ("verify", lambda: peer.verify(0, 0)),
        ("commit", lambda: peer.commit(0)),
        ("conv", lambda: peer.conv(0, 0)),
    ]


def main(argv=None) -> int:
    from . import cases as C

    parser = argparse.ArgumentParser(prog="bench.kernels.precompile", description=__doc__.split("\n")[0])
    parser.add_argument("cache")
    parser.add_argument("--arch", type=int, default=90)
    parser.add_argument("--shapes", nargs="+", default=["35B", "397B-tp8", "397B"])
    parser.add_argument("--requests", nargs="+", type=int, default=list(C.REQUESTS))
    parser.add_argument("--drafts", nargs="+", default=list(C.DRAFTS))
    parser.add_argument("--state-dtype", default="float32")
    args = parser.parse_args(argv)
    os.environ["TRITON_STORE_BINARY_ONLY"] = "1"
    share_cache(os.path.abspath(args.cache))
    fake_device(args.arch)
    from . import peers, problem

    kernels = peers.load()
    todo = C.matrix(args.shapes, args.requests, args.drafts, ["snapshot", "replayssm"], args.state_dtype)
    todo.sort(key=lambda c: (c.nodes, args.shapes.index(c.shape)))  # the slow ones last
    pools = {}
    for case in todo:
        pool = pools.setdefault(case.shape, problem.Pool(C.SHAPES[case.shape], case.state_dtype, "meta"))
        try:
            calls = calls_of(case, pool, kernels)
        except MemoryError as error:
            print(f"{case}: {error}", flush=True)
            continue
        for name, call in calls:
            start = time.perf_counter()
            call()
            if time.perf_counter() - start > 0.5:
                print(f"{case} {name}: {time.perf_counter() - start:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
