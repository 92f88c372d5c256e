"""python -m bench.kernels: checks treewy against float64, then times it beside SGLang's own kernels.

    python -m bench.kernels                              the whole matrix, rows to bench/results/kernels-....jsonl
    python -m bench.kernels --quick                      a few cases, seconds
    python -m bench.kernels --accuracy 1000 --drift 1000 exactness only, nothing is timed unless --time is given too
    python -m bench.kernels --report FILE.jsonl          table and plot of rows that exist

Rows that the file already holds are skipped, so a run that was cut short goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __package__ in (None, ""):  # python bench/kernels/__main__.py
    sys.path.insert(0, str(ROOT))
    __package__ = "bench.kernels"
if str(ROOT / "python") not in sys.path:
    sys.path.append(str(ROOT / "python"))  # a checkout that is built in place but not installed


def parser() -> argparse.ArgumentParser:
    from . import cases as C

    p = argparse.ArgumentParser(prog="bench.kernels", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--shapes", nargs="+", default=["35B", "397B-tp8", "397B"], choices=list(C.SHAPES))
    p.add_argument("--requests", nargs="+", type=positive, default=list(C.REQUESTS))
    p.add_argument("--drafts", nargs="+", type=known_draft, default=list(C.DRAFTS), help="chainN, treeN")
    p.add_argument("--modes", nargs="+", default=list(C.MODES), choices=C.MODES)
    p.add_argument("--state-dtype", default="float32", choices=list(C.DTYPES))
    p.add_argument("--sweep", action=argparse.BooleanOptionalAction, default=None,
                   help="treewy at every T from 2 to 64 at 64 requests (default: with the full set of drafts)")
    p.add_argument("--quick", action="store_true", help="35B, 64 requests, chain 4 and trees of 16 and 64, small check")
    p.add_argument("--budget", type=float, default=None, metavar="SECONDS", help="start no new case after this long")
    p.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: plumbing only, host clock")
    p.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    p.add_argument("--commit", help="commit to write into the rows (default: TREEWY_COMMIT, git)")
    p.add_argument("--isolate", type=int, default=3, metavar="N",
                   help="run N of the peer cases that are known to overflow, each in a process of its own (default 3)")
    p.add_argument("--triton-cache", help="cache made by bench.kernels.precompile")
    p.add_argument("--full-import", action="store_true", help="import sglang whole instead of its kernel modules alone")
    p.add_argument("--accuracy", type=positive, metavar="CASES", help="random cases against float64")
    p.add_argument("--drift", type=positive, metavar="CYCLES", help="verify/commit cycles in a row")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--time", action="store_true", help="time as well, after --accuracy or --drift")
    p.add_argument("--report", type=Path, nargs="+", help="only summarise and plot these files")
    p.add_argument("--isolated-case", help=argparse.SUPPRESS)
    return p


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}; allowed: 1 or more")
    return value


def known_draft(text: str) -> str:
    from . import cases as C

    try:
        C.parse_draft(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def log(text: str) -> None:
    print(text, flush=True)


class Rows:
    """The JSON lines of a run: appended one by one, never rewritten."""

    @staticmethod
    def fields() -> tuple[str, ...]:
        """What a case is told from another by."""
        from . import cases as C

        return tuple(C.Case.__dataclass_fields__)

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.done = {self.key(r) for r in read(path)} if path.exists() else set()

    def key(self, row: dict) -> tuple:
        return tuple(row[f] for f in self.fields())

    def add(self, row: dict) -> None:
        with open(self.path, "a") as f:
            f.write(json.dumps(row) + "\n")
        self.done.add(self.key(row))


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def exactness(args, name: str) -> bool:
    from . import accuracy

    ok, result = True, {}
    if args.accuracy:
        start = time.perf_counter()
        result["accuracy"] = accuracy.campaign(args.accuracy, args.device, args.seed, log)
        log(accuracy.text(result["accuracy"]) + f"\n  {time.perf_counter() - start:.0f} s")
        ok &= result["accuracy"]["ok"]
    if args.drift:
        result["drift"] = []
        for draft, nodes in (("chain", 4), ("tree", 16)):
            d = accuracy.drift(args.drift, args.device, draft, nodes)
            last = d["points"][-1]
            log(f"drift {draft}{nodes} after {last['cycle']} cycles: treewy {last['treewy']:.2e}, float32 recurrence "
                f"{last['float32']:.2e}, worst ratio on the way {d['worst_ratio']:.2f}")
            result["drift"].append(d)
            ok &= d["ok"]
    path = args.out / f"{'-'.join(result)}-{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    log(f"exactness: {'green' if ok else 'RED'} -> {path}")
    return ok


def isolated(args, case) -> dict:
    """A case that may destroy its CUDA context, in a process of its own. Its row comes back, or what killed it."""
    command = [sys.executable, str(Path(__file__).resolve()), "--isolated-case", json.dumps(list(case.key)), "--device", args.device]
    if args.triton_cache:
        command += ["--triton-cache", args.triton_cache]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    except subprocess.TimeoutExpired:
        return dict(verify_us=None, conv_us=None, commit_us=None, error="no answer within 90 s")
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            return json.loads(line)
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return dict(verify_us=None, conv_us=None, commit_us=None, error=f"process ended with {done.returncode}: {last}"[:300])


def main(argv=None) -> int:
    args = parser().parse_args(argv)
    from . import report

    if args.report:
        try:
            rows = [r for path in args.report for r in read(path)]
            needed = (*Rows.fields(), "gpu", "commit", "read_gbps", "readwrite_gbps")
            missing = {f for f in needed for r in rows if not isinstance(r, dict) or f not in r}
            if missing or not rows:
                raise ValueError(f"no rows of this benchmark: {', '.join(sorted(missing)) or 'everything'} missing")
        except (OSError, ValueError) as error:
            print(f"bench.kernels: --report {' '.join(map(str, args.report))}: {error}", file=sys.stderr)
            return 2
        print(report.table(rows))
        log(report.plot(rows, args.report[0].with_suffix(".png")))
        return 0
    if args.triton_cache:
        from . import precompile

        precompile.share_cache(os.path.abspath(args.triton_cache), conv_limit=32)

    import torch

    from . import cases as C
    from . import check, peers, problem, run, timing

    if args.device == "cuda" and not torch.cuda.is_available():
        print("bench.kernels: no CUDA device here (--device cpu only tries the plumbing)", file=sys.stderr)
        return 2
    if args.isolated_case:
        case = C.Case(*json.loads(args.isolated_case))
        row, _ = run.run(case, problem.Pool(C.SHAPES[case.shape], case.state_dtype, args.device), args.device, isolated=True)
        print(json.dumps(row), flush=True)
        os._exit(0)  # a broken context can hang the ordinary exit
    if args.quick:
        args.shapes, args.requests, args.drafts = ["35B"], [64], ["chain4", "tree16", "tree64"]
    start = time.perf_counter()
    commit, gpu = timing.commit(args.commit, str(ROOT)), timing.gpu_name(args.device)
    name = f"{timing.today()}-{timing.gpu_tag(gpu)}-{commit}"
    log(f"bench.kernels: {gpu}, commit {commit}, torch {torch.__version__}")

    if args.accuracy or args.drift:
        ok = exactness(args, name)
        if not ok or not args.time:
            return 0 if ok else 1
    wrong = check.run(args.device, quick=args.quick)
    if wrong:
        log(f"check: RED, {len(wrong)} faults; nothing is timed")
        for line in wrong[:20]:
            log("  " + line)
        return 1
    log(f"check: green ({time.perf_counter() - start:.0f} s)")

    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    try:
        sglang = peers.load(args.full_import).version
    except (ImportError, RuntimeError) as error:
        log(f"peers: {error}; their rows will hold this error")
        sglang, peer_error = None, f"{type(error).__name__}: {error}"
    read_gbps, readwrite_gbps = timing.ceilings(args.device)
    log(f"ceilings: read {read_gbps:.0f} GB/s, read+write {readwrite_gbps:.0f} GB/s")

    todo = C.matrix(args.shapes, args.requests, args.drafts, args.modes, args.state_dtype)
    sweep = args.sweep if args.sweep is not None else set(args.drafts) == set(C.DRAFTS)
    if sweep and "treewy" in args.modes:
        extra = C.sweep(args.shapes[0], 64 if 64 in args.requests else args.requests[-1], 2, 64, args.state_dtype)
        todo = [c for c in extra if c not in todo] + todo
    rows = Rows(args.out / f"kernels-{name}.jsonl")
    clock = timing.Clock(args.device)
    # A pool lives as long as cases of its shape follow one another: three of them do not fit beside the snapshots.
    pool, broken, left = None, None, 0
    isolate = args.isolate
    for case in todo:
        if case.key in rows.done:
            continue
        if args.budget is not None and time.perf_counter() - start > args.budget:
            left += 1
            continue
        shape = C.SHAPES[case.shape]
        if case.mode in peers.PEERS and sglang is None:
            figures = dict(verify_us=None, conv_us=None, commit_us=None, error=peer_error)
        elif case.mode in peers.PEERS and peers.overflows(case, shape) and isolate > 0:
            isolate -= 1
            pool = None  # the other process needs the memory
            if args.device == "cuda":
                torch.cuda.empty_cache()
            figures = isolated(args, case)
            figures["isolated"] = True
        else:
            if pool is None or (pool.shape.name, pool.state_dtype) != (case.shape, case.state_dtype):
                pool = None
                if args.device == "cuda":
                    torch.cuda.empty_cache()
                pool = problem.Pool(shape, case.state_dtype, args.device)
            budget_ms = 15.0 if f"{case.draft}{case.nodes}" not in args.drafts else 60.0
            figures, broken = run.run(case, pool, args.device, budget_ms=budget_ms)
        row = dict(gpu=gpu, commit=commit, **{f: getattr(case, f) for f in rows.fields()})
        row.update({k: figures.pop(k, None) for k in ("verify_us", "conv_us", "commit_us")})
        row.update(read_gbps=_round(read_gbps), readwrite_gbps=_round(readwrite_gbps), clock_mhz=clock.read())
        row.update(
            stash_bytes_per_node=C.stash_bytes_per_node(shape),
            snapshot_bytes_per_node=C.snapshot_bytes_per_node(shape, case.state_dtype, case.draft),
            torch=torch.__version__, triton=triton_version, sglang=sglang, **figures,
        )  # fmt: skip
        rows.add(row)
        log(f"{time.perf_counter() - start:6.1f} s  {report.line(row)}")
        if broken is not None:
            break
    if broken is not None and not run.fatal(broken):
        log(f"treewy gave a wrong result at {case}: {broken}; nothing more is timed")
        return 1
    if broken is not None:
        log(f"{case} ended the CUDA context ({str(broken).splitlines()[0]}); going on in a new process")
        sys.stdout.flush()
        again = [a for a in (sys.argv[1:] if argv is None else argv)]
        os.execv(sys.executable, [sys.executable, str(Path(__file__).resolve()), *again])
    if left:
        log(f"budget of {args.budget:.0f} s spent: {left} cases left; the same command goes on with them")
    everything = read(rows.path) if rows.path.exists() else []
    print(report.table(everything))
    log(f"rows: {rows.path}")
    log(report.plot(everything, rows.path.with_suffix(".png")))
    return 0


def _round(x: float):
    return None if x != x else round(x, 1)


if __name__ == "__main__":
    sys.exit(main())
