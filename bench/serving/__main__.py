"""python -m bench.serving: throughput and latency of a server in each mode, driven by SGLang's own serving client.

    python -m bench.serving --dims 35B --modes none snapshot-chain4 treewy-chain4 treewy-tree16 \\
        --memory tight=0.66 ample=0.85 --concurrency 8 32 128
    python -m bench.serving --preset tight --budget 1400   a set for one H200 (--list-presets)
    python -m bench.serving --preset smoke                 the plumbing, on CPU
    python -m bench.serving --report FILE.jsonl            table and plots of rows that exist

Each server starts once. Cases that the file holds are skipped, so a run that was cut short goes on where it stopped;
a server that does not start, or ends, is a row with its error (--retry-errors measures those again).
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Iterator, Optional, Sequence

ROOT = Path(__file__).resolve().parents[2]
if __package__ in (None, ""):  # python bench/serving/__main__.py
    sys.path.insert(0, str(ROOT))
    __package__ = "bench.serving"
if str(ROOT / "python") not in sys.path:
    sys.path.append(str(ROOT / "python"))  # a checkout that is not installed

from . import client, modes, plots, presets, rows, server  # noqa: E402

from treewy_sglang.demo.server import ServerFailed  # noqa: E402

DEFAULTS = {
    "modes": ["none", "snapshot-chain4", "treewy-chain4"], "memory": ["ample"], "concurrency": [1, 8, 32], "repeats": 1,
    "accept": "real", "input_len": 256, "output_len": 192, "rounds": 3, "device": "cuda", "dtype": "auto", "warmup": 8,
    "context_length": 4096, "server_args": [], "start_timeout": 600.0, "client_timeout": 600.0, "quick": False,
    "model": None, "dims": None, "layers": None,
}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="bench.serving", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    p.add_argument("--model", type=Path, help="a checkpoint (default: the demo's, made on first use)")
    p.add_argument(
        "--dims", help="dimensions with dummy weights instead: a built-in model of `treewy plan`, or its config.json"
    )
    p.add_argument("--layers", type=int, help="with --dims: fewer layers, in fours")
    p.add_argument("--modes", nargs="+", help=modes.__doc__.split("\n\n", 1)[1])
    p.add_argument(
        "--memory",
        nargs="+",
        metavar="NAME[=F|=slots:N]",
        help="tight or ample with a --mem-fraction-static, or with a number of state slots; a name can come twice",
    )
    p.add_argument("--concurrency", nargs="+", type=int)
    p.add_argument("--repeats", type=int, help="client runs of each case on the same server")
    p.add_argument(
        "--accept",
        help="accepted length: real, published (simulated: 3.2 for chains, 3.38 and 3.58 for trees), or a number",
    )
    p.add_argument("--input-len", type=int)
    p.add_argument("--output-len", type=int)
    p.add_argument("--rounds", type=int, help="prompts a client run sends, times the concurrency; 8 at least")
    p.add_argument("--warmup", type=int, help="requests before a client run is timed")
    p.add_argument("--device", choices=["cuda", "cpu"])
    p.add_argument("--dtype")
    p.add_argument("--context-length", type=int)
    p.add_argument("--server-args", type=shlex.split, help="more for sglang.launch_server, in quotes")
    p.add_argument(
        "--client-args",
        type=shlex.split,
        default=[],
        help="more for sglang.bench_serving, in quotes; the last one counts",
    )
    p.add_argument("--python", default=sys.executable, help="the Python that has SGLang (default: this one)")
    p.add_argument("--start-timeout", type=float, metavar="SECONDS")
    p.add_argument("--client-timeout", type=float, metavar="SECONDS")
    p.add_argument(
        "--quick",
        action="store_true",
        default=None,
        help="for Qwen3-Next: import no other model files; on CPU one thread",
    )
    p.add_argument("--preset", choices=list(presets.PRESETS), help="options for one H200; what is given besides wins")
    p.add_argument("--list-presets", action="store_true")
    p.add_argument("--budget", type=float, metavar="SECONDS", help="start no server and no client run after this long")
    p.add_argument(
        "--least", type=float, default=0, metavar="SECONDS", help="of the budget that must be left to start a server"
    )
    p.add_argument("--retry-errors", action="store_true", help="measure cases again whose row holds an error")
    p.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    p.add_argument("--logs", type=Path, default=ROOT / ".demo" / "serving", help="logs of servers and clients")
    p.add_argument("--report", type=Path, nargs="+", help="only summarise and plot these files")
    return p


def fill(args: argparse.Namespace) -> argparse.Namespace:
    """Options as given, else of the preset, else the default."""
    preset = presets.PRESETS.get(args.preset, {})
    for name, value in {**DEFAULTS, **preset}.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    if args.accept not in ("real", "published"):
        try:
            if not float(args.accept) >= 1:
                raise ValueError
        except ValueError:
            raise modes.BadMode(f"--accept is {args.accept!r}; allowed: real, published, or a number from 1") from None
    for name in ("input_len", "output_len", "rounds", "repeats", "warmup"):
        if getattr(args, name) < 1:
            raise modes.BadMode(f"--{name.replace('_', '-')} is {getattr(args, name)}; allowed: 1 or more")
    if any(c < 1 for c in args.concurrency):
        raise modes.BadMode(f"--concurrency is {args.concurrency}; allowed: 1 or more each")
    if args.model is not None and args.dims is not None:
        raise modes.BadMode(f"--dims is {args.dims} beside --model; allowed: one of the two")
    return args


def setting(text: str) -> server.Setting:
    """tight, tight=0.66, tight=slots:24"""
    name, _, value = text.partition("=")
    if name not in ("tight", "ample"):
        raise modes.BadMode(f"--memory is {text!r}; allowed: tight or ample, with =0.66 or =slots:24")
    try:
        if value.startswith("slots:"):
            slots = int(value[6:])
            if slots < 1:
                raise ValueError
            return server.Setting(name, None, slots)
        fraction = float(value) if value else None
        if fraction is not None and not 0 < fraction < 1:
            raise ValueError
    except ValueError:
        raise modes.BadMode(f"--memory is {text!r}; allowed: a fraction between 0 and 1, or slots:N") from None
    return server.Setting(name, fraction)


def cases(args: argparse.Namespace, model: str) -> dict[tuple, list[rows.Case]]:
    """The servers in the order they start, and the cases that each serves: repeats outermost, so that a drift of the
    machine shows as spread and not as a difference between concurrencies."""
    plan: dict[tuple, list[rows.Case]] = {}
    for memory in args.memory:
        s = setting(memory)
        for mode in args.modes:
            simulated = modes.parse(mode).simulated(args.accept)
            accept = "real" if simulated is None else f"{simulated:g}"
            for repeat in range(args.repeats):
                for concurrency in args.concurrency:
                    prompts = max(8, args.rounds * concurrency)
                    case = rows.Case(model, mode, s.memory, s.mem_fraction, s.slots, accept, concurrency,
                                     args.input_len, args.output_len, prompts, repeat)  # fmt: skip
                    plan.setdefault(case.server, []).append(case)
    return plan


class Progress:
    """Two bars: cases, and the requests of the client run that is under way. Lines instead where there is no tqdm."""

    def __init__(self, total: int, done: int):
        try:
            from tqdm import tqdm
        except ImportError:
            tqdm = None
        self.cases = tqdm and tqdm(total=total, initial=done, desc="cases", unit="case", dynamic_ncols=True, position=0)
        self.requests = tqdm and tqdm(total=1, desc="server", unit="req", dynamic_ncols=True, position=1, leave=False)

    def say(self, text: str) -> None:
        self.cases.write(text) if self.cases is not None else print(text, flush=True)

    def what(self, text: str, total: int = 1) -> None:
        if self.requests is not None:
            self.requests.reset(total=total)
            self.requests.set_description_str(text[:60])

    def at(self, done: int, total: int) -> None:
        if self.requests is not None:
            self.requests.total = total
            self.requests.update(done - self.requests.n)

    def case_done(self) -> None:
        if self.cases is not None:
            self.cases.update(1)

    def close(self) -> None:
        for bar in (self.requests, self.cases):
            if bar is not None:
                bar.close()


def short(error: BaseException) -> str:
    """One line of an error, with what the end of a log says of its cause."""
    text = " ".join(str(error).split())
    causes = [
        line.strip()
        for line in str(error).splitlines()
        if line.strip().startswith(("RuntimeError", "ValueError", "torch.", "AssertionError", "TreeWY"))
    ]
    cause = next((line for line in reversed(causes)), "")
    if cause and cause[:80] not in text[:400]:
        text = f"{text[:160]} ... {cause}"
    return f"{type(error).__name__}: {text}"[:600]


class Runner:
    def __init__(self, args: argparse.Namespace, model: Path, name: str, store: rows.Rows, facts: dict):
        self.args, self.model, self.name, self.store, self.facts = args, model, name, store, facts
        self.began = time.monotonic()
        self.left = 0
        self.host: Optional[client.Host] = None

    def close(self) -> None:
        if self.host is not None:
            self.host.stop()

    def spent(self, needed: float = 0.0) -> bool:
        """Whether less than `needed` seconds of the budget are left."""
        return self.args.budget is not None and time.monotonic() - self.began + needed > self.args.budget

    def start(self, case: rows.Case, progress: Progress) -> tuple[server.BenchServer, dict]:
        mode = modes.parse(case.mode)
        s = server.Setting(case.memory, case.mem_fraction, case.slots)
        log = self.args.logs / f"server-{case.mode}-{case.memory}-{case.mem_fraction or case.slots or 'own'}.log"
        made = server.make(
            mode, s, self.model, log, device=self.args.device, dtype=self.args.dtype,
            requests=max(self.args.concurrency), accept=None if case.accept == "real" else float(case.accept),
            dummy=self.args.dims is not None, context_length=self.args.context_length, arguments=self.args.server_args,
            timeout=self.args.start_timeout, python=self.args.python, quick=self.args.quick,
            on_wait=lambda text: progress.what(f"{case.mode} starts, {text}"),
        )  # fmt: skip
        progress.what(f"{case.mode} starts")
        if self.host is None:  # imports while the first server starts
            self.host = client.Host(self.args.python, self.args.logs / "client-host.log")
        began = time.monotonic()
        made.start()
        return made, {**server.started(made.log_text()), "start_s": round(time.monotonic() - began, 1)}

    def measure(self, running: server.BenchServer, case: rows.Case, progress: Progress, first: bool) -> dict:
        """`first`: of this server. Its batches then make kernels compile, so it is warmed with as many requests as it holds."""
        progress.what(f"{case.mode} {case.memory} x {case.concurrency}", case.prompts)
        seen = len(running.log_text())
        warmup = max(self.args.warmup, case.concurrency if first else 0)
        with server.PeakMemory(self.args.device, running.process.pid) as memory:
            found = client.run(
                case, running.url, self.model, self.args.logs, warmup=warmup, arguments=self.args.client_args,
                timeout=self.args.client_timeout, on_progress=progress.at, alive=running.alive, host=self.host,
            )  # fmt: skip
        peak = None if memory.peak is None else round(memory.peak, 2)
        return {**found, **server.during(running.log_text()[seen:]), "peak_gib": peak}

    def add(self, case: rows.Case, figures: dict, progress: Progress) -> None:
        mode = modes.parse(case.mode)
        facts = {**self.facts, "nodes": mode.nodes, "steps": mode.steps, "topk": mode.topk}
        row = self.store.add(case, facts, {"error": None, **figures})
        progress.case_done()
        progress.say(plots.table([row]).splitlines()[-1])

    def serve(self, pending: Sequence[rows.Case], progress: Progress) -> None:
        """All cases of one server. One that ends under a case is started once more for the cases after it."""
        running: Optional[server.BenchServer] = None
        pools: dict = {}
        first = True
        try:
            for number, case in enumerate(pending):
                if self.spent(0 if running is not None and running.alive() else self.args.least):
                    self.left += len(pending) - number
                    return
                if running is None or not running.alive():
                    if running is not None:
                        running.stop()
                        running = None
                    try:
                        running, pools = self.start(case, progress)
                        first = True
                    except ServerFailed as error:
                        for failed in pending[number:]:
                            self.add(failed, {"error": short(error)}, progress)
                        return
                try:
                    figures = self.measure(running, case, progress, first)
                    first = False
                except (client.ClientFailed, ServerFailed) as error:
                    reason = short(error) if running.alive() else f"{short(error)}; {running.log_end(3)}"
                    figures = {"error": " ".join(reason.split())[:600]}
                self.add(case, {**pools, **figures}, progress)
        finally:
            if running is not None:
                progress.what("server stops")
                running.stop()


def versions() -> dict:
    import importlib.metadata as metadata

    found = {}
    for name in ("sglang", "torch", "treewy-sglang"):
        try:
            found[name.replace("-", "_")] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name.replace("-", "_")] = None
    return found


def the_model(args: argparse.Namespace) -> tuple[Path, str]:
    """Folder of the checkpoint, and its name in the rows."""
    if args.dims is not None:
        from treewy_sglang.planner import load

        from .model import write_dummy

        found = load(args.dims)
        name = Path(found.name).name + "-dummy" + (f"-{args.layers}-layers" if args.layers else "")
        return write_dummy(args.logs / name, args.dims, args.layers), name
    if args.model is not None:
        return args.model, args.model.name
    from treewy_sglang.demo.checkpoint import make_checkpoint

    return make_checkpoint(ROOT / ".demo" / "checkpoint"), "demo"


def interrupts() -> Iterator[None]:
    """SIGTERM ends a run as Ctrl-C does: its server is stopped with it."""

    def stop(*_):
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, stop)
    yield
    signal.signal(signal.SIGTERM, previous)


def main(argv: Optional[Sequence[str]] = None) -> int:
    args = parser().parse_args(argv)
    if args.list_presets:
        for name, values in presets.PRESETS.items():
            print(f"{name:11s} " + " ".join(f"{k}={v}" for k, v in values.items() if k != "server_args"))
        return 0
    if args.report:
        found = [row for path in args.report for row in rows.read(path)]
        print(plots.table(found))
        print(plots.plot(found, args.report[0]))
        return 0
    from treewy_sglang.planner import PlanError

    try:
        args = fill(args)
        for name in (*args.modes, *args.memory):  # before anything is made or started
            modes.parse(name) if name in args.modes else setting(name)
        args.logs.mkdir(parents=True, exist_ok=True)
        model, name = the_model(args)
    except (modes.BadMode, PlanError) as error:
        print(f"bench.serving: {error}", file=sys.stderr)
        return 2

    gpu, commit = rows.gpu_name(args.device), rows.commit(ROOT)
    store = rows.Rows(rows.path_for(args.out, gpu, commit), args.retry_errors)
    plan = cases(args, name)
    total = sum(map(len, plan.values()))
    pending = {key: [c for c in group if c not in store.done] for key, group in plan.items()}
    todo = sum(map(len, pending.values()))
    servers = sum(map(bool, pending.values()))
    print(f"bench.serving: {gpu}, commit {commit}, {name}: {todo} of {total} cases, {servers} servers", flush=True)
    runner = Runner(
        args,
        model,
        name,
        store,
        {"gpu": gpu, "commit": commit, "device": args.device, "dtype": args.dtype, **versions()},
    )
    progress = Progress(total, total - todo)
    guard = interrupts()
    next(guard)
    try:
        for group in pending.values():
            if group:
                runner.serve(group, progress)
    except KeyboardInterrupt:
        progress.close()
        print(f"bench.serving: interrupted; the same command goes on. Rows: {store.path}", file=sys.stderr)
        return 130
    finally:
        runner.close()
        progress.close()
        next(guard, None)
    if runner.left:
        print(f"budget of {args.budget:.0f} s spent: {runner.left} cases left; the same command goes on with them")
    if store.rows:
        print(plots.table(store.rows))
        print(plots.plot(store.rows, store.path))
    print(f"rows: {store.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
