"""Starts servers side by side, asks them, keeps what they answer, and says what it shows.

The data of a start lies in WORK/data/NAME.json; a later call takes it from there (unless --fresh), so a list of scenarios can
be worked off in several calls. A start that failed is a row with its error, and is tried again by the next call.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import fnmatch
import itertools
import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, Collection, Iterator, Mapping

from server_harness import ROOT, copy_of_sglang, installed, path_environment, treewy, wait_idle

from matrix import refusals, scenarios, verdicts
from matrix.loads import FULL, LOADS, QUICK, Size
from matrix.scenarios import Check, Start
from treewy_sglang.demo.server import Server, ServerFailed, other_models

_SLOTS = re.compile(r"max_mamba_cache_size: (\d+)")


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


class Environments:
    """Environment variables that put a patched or an unpatched SGLang on the path; made when first asked for."""

    def __init__(self, work: Path, device: str):
        self.work, self.device, self.lock = work, device, threading.Lock()
        self.ready: dict[bool, dict[str, str]] = {}

    def of(self, patched: bool) -> dict[str, str]:
        with self.lock:
            if patched not in self.ready:
                self.ready[patched] = self._patched() if patched else self._unpatched()
            return self.ready[patched]

    def _state(self, folder: Path) -> str:
        return json.loads(treewy("patch", "status", "--json", str(folder)).stdout)["state"]

    def _patched(self) -> dict[str, str]:
        state = self._state(installed())
        if state != "applied":
            raise RuntimeError(f"the installed SGLang is {state}: run `treewy patch apply` first")
        return path_environment(ROOT / "python")

    def _unpatched(self) -> dict[str, str]:
        where = self.work / "unpatched"
        if not (where / "sglang").exists():
            where.mkdir(parents=True, exist_ok=True)
            copy_of_sglang(where)
        if self._state(where / "sglang") == "applied":
            done = treewy("patch", "revert", str(where / "sglang"))
            assert done.returncode == 0, done.stderr
        return path_environment(where, ROOT / "python")


def ports(first: int, last: int = 32000) -> Iterator[int]:
    """Ports below those that the kernel gives to outgoing connections: a server binds its own long after it was chosen, and
    until then the requests of the servers beside it take thousands of those."""
    for port in itertools.cycle(range(first, last)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                yield port


class Run:
    def __init__(self, args: argparse.Namespace, size: Size):
        self.args, self.size = args, size
        self.work = Path(args.work)
        self.deadline = time.monotonic() + args.budget if args.budget else None
        self.environments = Environments(self.work, args.device)
        self.models: dict[str, Path] = {}
        self.data: dict[str, Any] = {}
        self.live: set[Any] = set()  # processes
        self.failures = 0
        self.lock = threading.Lock()
        self.ports = ports(18000 + os.getpid() % 64 * 200)
        # Data of another device or size is no use here.
        self.folder = self.work / f"data-{args.device}-{args.size}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.about: dict[str, str] = {}  # what the data comes from: device and commit

    def left(self) -> float:
        return float("inf") if self.deadline is None else self.deadline - time.monotonic()

    def kept(self, name: str) -> dict[str, Any] | None:
        file = self.folder / f"{name}.json"
        if self.args.fresh or not file.exists():
            return None
        found = json.loads(file.read_text())
        return None if "error" in found else found

    def server(self, start: Start) -> Server:
        size, args = self.size, self.args
        with self.lock:
            port, other_port = next(self.ports), next(self.ports)
        running = start.running or size.at_a_time
        arguments = (*(scenarios.ON_CUDA if args.device == "cuda" else ()), "--nccl-port", str(other_port), *start.arguments, *args.server_arguments)
        if args.device == "cpu" and not start.patched:
            raise RuntimeError("an unpatched server on CPU is what tests/server/test_end_to_end.py starts")
        environment = {**self.environments.of(start.patched), **dict(start.environment)}
        if start.model.startswith("qwen35"):
            needed = {"qwen3_5", "qwen3_5_mtp", "qwen3_5_text"}
            environment["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(m for m in other_models(sys.executable) if m not in needed)
        if "drift" in start.loads:
            from matrix import drift

            environment.update(drift.environment(self.work / "drift" / start.name, environment, size.long))
        return Server(
            self.models[start.model], start.mode, self.work / "logs" / f"{start.name}.log", device=args.device,
            dtype=start.dtype, running=running, tokens=2 * running * 1400 if start.tokens is None else start.tokens,
            treewy=start.treewy, until=start.until, arguments=arguments, environment=environment, port=port,
            patience=args.patience, timeout=min(args.start_timeout, max(30.0, self.left())),
        )  # fmt: skip

    def one(self, start: Start) -> dict[str, Any]:
        """Data of a start: {"start": ..., LOAD: ..., "end": ...}, or {"error": ...} with what it got to."""
        if self.left() < self.args.least:
            return {"error": f"not run: {max(0, self.left()):.0f} s of the budget were left"}
        if self.args.give_up and self.failures >= self.args.give_up:
            return {"error": f"not run: {self.failures} servers had failed"}
        data: dict[str, Any] = {}
        server = None
        try:
            if "refusals" in start.loads:
                answers = refusals.run(self.args.device, self.models[start.model], self.work, self.environments.of(True))
                return {"refusals": {"device": self.args.device, "answers": answers}}
            began = time.monotonic()
            server = self.server(start)
            server.on_start = self.live.add
            with server:
                data["start"] = {"seconds": time.monotonic() - began, "command": server.command()}
                say(f"{start.name}: answers after {data['start']['seconds']:.0f} s")
                text = server.log_text()
                slots = _SLOTS.search(text)
                data["start"]["state_slots"] = int(slots[1]) if slots else None
                if start.has_treewy:
                    data["start"]["lines"] = verdicts.start_lines(text)
                if start.until:
                    return data
                for load in start.loads:
                    began = time.monotonic()
                    if load == "drift":
                        from matrix import drift

                        data[load] = drift.load(server, self.size, self.work / "drift" / start.name)
                    else:
                        data[load] = LOADS[load](server, self.size)
                    say(f"{start.name}: {load} took {time.monotonic() - began:.0f} s")
                    if load == "sequence":
                        server.request("/flush_cache", {})
                wait_idle(server, 120)
                state = server.state()
                data["end"] = {"treewy": state.get("treewy"), "accepted": state.get("avg_spec_accept_length"),
                               "complaints": scenarios.complaints(server.log_text())}  # fmt: skip
        except Exception as error:  # a row of the table, whatever it is
            kind = "" if isinstance(error, (ServerFailed, AssertionError)) else f"{type(error).__name__}: "
            data["error"] = f"{kind}{error}"
            with self.lock:
                self.failures += 1
            data["traceback"] = traceback.format_exc()
            if server is not None and server.log.exists():
                data["log_end"] = server.log_end(40)
        return data

    def stop_all(self, sig: int, frame: Any) -> None:
        """The servers are sessions of their own, and threads wait for them: neither would end with this process."""
        for process in self.live:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        os._exit(128 + sig)

    def finish(self, start: Start, data: dict[str, Any]) -> None:
        self.data[start.name] = data
        file = self.folder / f"{start.name}.json"
        if data.get("error", "").startswith("not run"):
            if file.exists() and not self.args.fresh:
                self.data[start.name] = json.loads(file.read_text())  # how it failed in an earlier call
            return
        data["about"] = self.about
        temporary = file.with_suffix(".new")
        temporary.write_text(json.dumps(data))
        temporary.rename(file)
        if "error" in data:
            say(f"{start.name}: FAILED: {data['error'].splitlines()[0][:300]}")

    def prepare(self, starts: Collection[Start]) -> None:
        for model in {s.model for s in starts}:
            self.models[model] = scenarios.model_directory(model, self.work)
        for patched in {s.patched for s in starts}:
            self.environments.of(patched)

    def all(self, chosen: Mapping[str, Start]) -> None:
        todo = []
        for name, start in chosen.items():
            kept = self.kept(name)
            if kept is None:
                todo.append(start)
            else:
                self.data[name] = kept
        self.prepare(todo)
        say(f"{len(chosen)} servers: {len(chosen) - len(todo)} from earlier calls, {len(todo)} to start, {self.args.parallel} at a time")
        for group, width in (
            ([s for s in todo if not s.alone and s.gpus == 1], self.args.parallel),
            ([s for s in todo if not s.alone and s.gpus > 1], 1),
            ([s for s in todo if s.alone], 1),
        ):
            with concurrent.futures.ThreadPoolExecutor(max(1, width)) as pool:
                futures = {pool.submit(self.one, start): start for start in group}
                for future in concurrent.futures.as_completed(futures):
                    self.finish(futures[future], future.result())


def judge(check: Check, data: Mapping[str, Any], size: Size) -> dict[str, str]:
    """A row: outcome is ok, MISSED (the data says no), failed (a start did) or not run."""
    for name in check.starts:
        error = data.get(name, {"error": "not run"}).get("error")
        if error is not None:
            outcome = "not run" if error.startswith("not run") else "failed"
            return {"check": check.name, "outcome": outcome, "detail": f"{name}: {error.splitlines()[0][:400]}"}
    try:
        return {"check": check.name, "outcome": "ok", "detail": check.judge(data, size)}
    except AssertionError as missed:
        return {"check": check.name, "outcome": "MISSED", "detail": str(missed)[:2000]}
    except Exception as error:
        return {"check": check.name, "outcome": "failed", "detail": f"{type(error).__name__}: {error}"}


def table(rows: list[dict[str, str]]) -> str:
    width = max((len(r["check"]) for r in rows), default=0)
    return "\n".join(f"{r['outcome']:8} {r['check']:{width}}  {r['detail'].splitlines()[0] if r['detail'] else ''}" for r in rows)


def commit() -> str:
    """TREEWY_COMMIT, for copies without git's folder; else git's name for what is checked out."""
    if os.environ.get("TREEWY_COMMIT"):
        return os.environ["TREEWY_COMMIT"]
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def device_name(device: str) -> str:
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    models = re.findall(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text()) if Path("/proc/cpuinfo").exists() else []
    return f"{models[0] if models else platform.processor()}, {os.cpu_count()} cores"


def main(argv: list[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    split = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(
        prog="python tests/server/matrix", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="what follows -- goes to every server as it is",
    )  # fmt: skip
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--scenarios", nargs="+", default=["*"], metavar="GLOB", help="checks or servers by name, for instance 'f32-*' 'memory-*'; servers start in this order")
    parser.add_argument("--size", choices=["full", "quick"], default="full")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=N", help="other values of the size: prompts new_tokens sampled long mixed ...")
    parser.add_argument("--parallel", type=int, default=1, help="servers at a time (those that need all memory run alone)")
    parser.add_argument("--gpus", type=int, default=1, help="servers that need more are left out")
    parser.add_argument("--budget", type=float, default=0, help="seconds after which no server is started any more; 0: no limit")
    parser.add_argument("--least", type=float, default=90, help="seconds of the budget that a start must have left")
    parser.add_argument("--give-up", type=int, default=0, metavar="N", help="start nothing more once N servers have failed; 0: go on")
    parser.add_argument("--patience", type=float, default=15, help="seconds that a server is given to end by itself")
    parser.add_argument("--prepare", action="store_true", help="make checkpoints and the unpatched copy that the servers need, and stop")
    parser.add_argument("--start-timeout", type=float, default=600)
    parser.add_argument("--work", default=str(ROOT / ".demo" / "matrix"))
    parser.add_argument("--fresh", action="store_true", help="take nothing from earlier calls")
    parser.add_argument("--report", action="store_true", help="start nothing: rows of what is kept; of another machine's too")
    parser.add_argument("--json", help="write the rows there, one JSON object a line")
    parser.add_argument("--list", action="store_true", help="what would run, and stop")
    args = parser.parse_args(argv[:split])
    args.server_arguments = argv[split + 1 :]
    size = FULL if args.size == "full" else QUICK
    if args.set:
        values = {name: int(number) for name, number in (item.split("=") for item in args.set)}
        size = Size(**{**vars(size), **values})
        args.size = args.size + "".join(f"-{n}{v}" for n, v in sorted(values.items()))

    possible = {n: s for n, s in scenarios.for_device(scenarios.starts(), args.device).items() if s.gpus <= args.gpus}
    wanted = lambda name: any(fnmatch.fnmatch(name, pattern) for pattern in args.scenarios)  # noqa: E731
    rows = [c for c in scenarios.checks(possible) if wanted(c.name) or any(map(wanted, c.starts[-1:]))]
    needed = {name for c in rows for name in c.starts} | {name for name in possible if wanted(name)}
    # A budget is spent in the order of the patterns: on a row's references just before the row.
    ahead = [name for p in args.scenarios for c in rows if fnmatch.fnmatch(c.name, p) or fnmatch.fnmatch(c.starts[-1], p) for name in c.starts]
    chosen = {name: possible[name] for name in (*ahead, *possible) if name in needed}
    if args.list:
        for name, start in chosen.items():
            print(f"{name}: {start.mode.name}; {', '.join(start.loads)}; {start.dtype} {' '.join(start.arguments)}")
        print(f"{len(chosen)} servers, {len(rows)} checks:\n  " + "\n  ".join(c.name for c in rows))
        return 0
    if not chosen:
        parser.error(f"nothing is called {' '.join(args.scenarios)} on {args.device}; see --list")

    run = Run(args, size)
    if args.prepare:
        run.prepare(chosen.values())
        return 0
    if args.report:
        run.data = {name: kept for name in chosen if (kept := run.kept(name)) is not None}
    else:
        for sig in (signal.SIGTERM, signal.SIGINT):
            signal.signal(sig, run.stop_all)
        run.about = {"device": device_name(args.device), "commit": commit()}
        run.all(chosen)
    found = [judge(c, run.data, size) for c in rows]
    if args.report:
        found = [r for r in found if r["outcome"] != "not run"]
    print(f"\n{table(found)}\n")
    outcomes = {o: sum(r["outcome"] == o for r in found) for o in ("ok", "MISSED", "failed", "not run")}
    say(", ".join(f"{count} {outcome}" for outcome, count in outcomes.items()))
    if args.json:
        # A row comes from where its last server ran: an earlier call, perhaps.
        origin = {c.name: run.data.get(c.starts[-1], {}).get("about") or run.about for c in rows}
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        with open(args.json, "w") as sink:
            for row in found:
                sink.write(json.dumps({**row, **origin[row["check"]], "size": vars(size)}) + "\n")
    return 0 if outcomes["ok"] == len(found) else 1
