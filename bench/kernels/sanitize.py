"""Small calls of every operator for compute-sanitizer (see sanitize.sh). Inputs are made on the CPU and copied, so that
no kernel but treewy's own runs and initcheck sees every read of something that was never written."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[2] / "python")]

import torch

from bench.kernels import accuracy as A
from bench.kernels import cases as C
from bench.kernels import truth


def main() -> int:
    from treewy_sglang import ops

    wrong = 0
    sizes = [1, 2, 3, 4, 8, 9, 16, 17, 33, 64, 65, 128]
    todo = []
    for i, T in enumerate(sizes):
        for j, draft in enumerate(("chain", "tree", "forest")):
            act = ("bfloat16", "float32", "float16")[(i + j) % 3]
            state = ("float32", "bfloat16", "float16")[(i + 2 * j) % 3]
            K = 128 if T > 33 or (i + j) % 4 else (64, 256)[i % 2]
            todo.append(A.Sample(draft, N=2, T=T, H=1, HV=2, K=K, act=act, state=state, seed=i * 10 + j))
    for s in todo:
        host = A.tensors(s, "cpu")
        d = {name: x.cuda() for name, x in host.items()}
        for fused in (False, True):
            out, pool, _ = A.treewy(s, d, "cuda", fused, torch.float32)
            if not fused:
                want, _ = A.recurrence(s, host, torch.float32)
                error = truth.output_errors(out.cpu(), want).max().item()
                if not error < 1e-4:
                    wrong += 1
                    print(f"{s}: out differs by {error:.3g}", flush=True)
        child, sibling = C.links_of(host["parents"])
        if s.draft == "tree":
            parents = torch.empty_like(host["parents"]).cuda()
            ops.parents_from_links(child.cuda(), sibling.cuda(), parents)
            if not torch.equal(parents.cpu(), host["parents"]):
                wrong += 1
                print(f"{s}: parents_from_links", flush=True)
    torch.cuda.synchronize()
    print(f"sanitize: {len(todo)} cases, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
