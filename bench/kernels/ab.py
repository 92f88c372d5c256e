"""python -m bench.kernels.ab: the candidates of csrc/cuda/verify_variants.h against each other, in one process.

For each case and variant: the results are compared with the float64 recurrence in place, then verify and commit are timed as
in bench.kernels (CUDA graphs, rotated layers). A variant that is wrong is not timed. One line a case, microseconds a layer; the
variant is read at every launch, so that TREEWY_VARIANT can change between two captures.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "python"))

# What each case can tell apart: number of the variant -> what it changes (csrc/cuda/verify_variants.h).
SHORT, LONG, BLOCK, COMMIT = (0, 2048, 4096), (20, 4116, 4112), (0, 2), (32,)
PLAN = [  # shape, requests, draft, fused, variants of verify
    *[("35B", 64, d, fused, SHORT) for d in ("chain4", "chain8", "tree9", "tree16", "tree17", "tree24", "tree32") for fused in (False, True)],
    *[("35B", n, d, fused, SHORT) for n in (256, 16, 8) for d in ("chain4", "tree32") for fused in (False, True)],
    *[("35B", 64, d, fused, LONG) for d in ("tree33", "tree48", "tree49", "tree64") for fused in (False, True)],
    *[("35B", n, "tree64", fused, LONG) for n in (1, 4, 16) for fused in (False, True)],
    ("35B", 64, "tree128", False, BLOCK),
    ("35B", 1, "tree128", False, BLOCK),
]


def main(argv=None) -> int:
    p = argparse.ArgumentParser(prog="bench.kernels.ab", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--budget", type=float, default=150, metavar="SECONDS", help="start no new case after this long")
    p.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: plumbing only")
    p.add_argument("--shape", help="this shape for every case (tiny: plumbing)")
    p.add_argument("--out", type=Path, help="JSON lines")
    args = p.parse_args(argv)
    from . import cases as C, problem, run, timing

    began = time.monotonic()
    read, both = timing.ceilings(args.device)
    print(f"read {read:.0f} GB/s, read+write {both:.0f} GB/s")
    bad, pools, rows = 0, {}, []

    def add(row, text):
        rows.append(row)
        print(text, flush=True)
        if args.out:
            with args.out.open("a") as file:
                file.write(json.dumps(row) + "\n")

    for shape, requests, draft, fused, variants in PLAN:
        if time.monotonic() - began > args.budget:
            print("time is up: the cases after this one were not run")
            break
        kind, nodes = C.parse_draft(draft)
        case = C.Case(args.shape or shape, requests, nodes, kind, "treewy-fused-conv" if fused else "treewy")
        if case.shape not in pools:
            pools.clear()
            gc.collect()
            pools[case.shape] = problem.Pool(C.SHAPES[case.shape], case.state_dtype, args.device)
        problem_, kernels = run.build(case, pools[case.shape], args.device)
        state = problem_.N * C.state_bytes(problem_.pool.shape, case.state_dtype)
        calls = [lambda s=s, i=i: kernels.verify(s, i) for s, i in problem_.pairs]
        commits = [lambda s=s: kernels.commit(s) for s in range(problem_.sets)]
        for what, list_, per, choices in (("verify", calls, 1, variants), ("commit", commits, problem_.layers, COMMIT)):
            figures = {}
            if what == "commit" and (draft, requests) not in (("chain4", 64), ("tree16", 64), ("chain4", 1)):
                continue
            for v in choices:
                os.environ["TREEWY_VARIANT"] = str(v)
                try:
                    run.check_in_place(case, problem_, kernels)
                except Exception as error:
                    bad += 1
                    figures[v] = None
                    print(f"{case} variant {v}: {type(error).__name__}: {str(error)[:200]}")
                    if run.fatal(error):
                        return 1
                    continue
                least = -(-timing.L2_FLOOR // (state * per))
                figures[v] = round(timing.graph_us(list_, args.device, 25.0, min(len(list_), least)) / per, 2)
            base, peak = figures.get(choices[0]), (read if what == "verify" else both / 2) * 1e3
            cells = [
                f"{v}: wrong" if us is None else f"{v}: {us:8.2f} us ({base / us if base else float('nan'):.2f}x, {100 * state / us / peak:3.0f} %)"
                for v, us in figures.items()
            ]
            add(dict(case=str(case), what=what, us=figures, read_gbps=read, readwrite_gbps=both), f"{what:6} {str(case):44} " + "   ".join(cells))
    os.environ.pop("TREEWY_VARIANT", None)
    print(f"ab: {len(rows)} rows, {bad} wrong, {time.monotonic() - began:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
