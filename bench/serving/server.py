"""One SGLang server in one mode, and what its log says of it."""

from __future__ import annotations

import os
import re
import subprocess
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional, Sequence

from treewy_sglang.demo.server import Mode as DemoMode
from treewy_sglang.demo.server import Server

from .modes import Mode

# What keeps a server off the network and off compilers that a bare host does not have.
OFFLINE = ("--attention-backend", "triton", "--grammar-backend", "none", "--disable-prefill-cuda-graph")


@dataclass(frozen=True)
class Setting:
    """How much memory a server is given."""

    memory: str  # tight or ample
    mem_fraction: Optional[float] = None  # None: SGLang's own
    slots: Optional[int] = None  # --max-mamba-cache-size instead, for a device without a memory of its own


@dataclass
class BenchServer(Server):
    """`sglang.launch_server` for a benchmark: only what is measured is set, the rest is SGLang's default."""

    bench_mode: Mode = field(default_factory=lambda: Mode("none"))
    setting: Setting = Setting("ample")
    accept: Optional[float] = None  # accepted length to simulate
    dummy: bool = False
    context_length: Optional[int] = 4096
    quick_start: bool = False
    patience: float = 0.0  # nothing is asked of it any more when it is stopped

    def command(self) -> list[str]:
        command = [
            self.python, "-m", "sglang.launch_server", "--model-path", str(self.model), "--host", self.host,
            "--port", str(self.port), "--device", self.device, "--random-seed", "0",
            "--max-running-requests", str(self.running), "--decode-log-interval", "10",
        ]  # fmt: skip
        if self.dtype != "auto":
            command += ["--dtype", self.dtype]
        if self.context_length:
            command += ["--context-length", str(self.context_length)]
        if self.dummy:
            command += ["--load-format", "dummy"]
        if self.setting.mem_fraction is not None:
            command += ["--mem-fraction-static", str(self.setting.mem_fraction)]
        if self.setting.slots is not None:
            command += ["--max-mamba-cache-size", str(self.setting.slots)]
        if self.device == "cuda" and not any(a.startswith(("--cuda-graph-max-bs", "--cuda-graph-bs")) for a in self.arguments):
            # Every batch that the clients can make is captured, and none beyond: capturing takes most of a start.
            command += ["--cuda-graph-max-bs-decode", str(self.running)]
        return [*command, *self.bench_mode.arguments, *self.arguments]

    def child_environment(self) -> dict[str, str]:
        env = super().child_environment()
        for name in ("SGLANG_SIMULATE_ACC_LEN", "SGLANG_SIMULATE_ACC_METHOD"):
            env.pop(name, None)
        if self.accept is not None:
            # Lengths are drawn so that their mean is the one asked for.
            env.update(SGLANG_SIMULATE_ACC_LEN=str(self.accept), SGLANG_SIMULATE_ACC_METHOD="match-expected")
        return env


def make(
    mode: Mode,
    setting: Setting,
    model: Path,
    log: Path,
    *,
    requests: int,
    arguments: Sequence[str],
    quick: bool = False,
    **more,
) -> BenchServer:
    """A server that is not started yet. `more`: device, dtype, accept, dummy, context_length, timeout, python, on_wait."""
    return BenchServer(
        model=model,
        mode=DemoMode(mode.name, mode.nodes),
        log=log,
        running=requests,
        arguments=tuple(arguments),
        bench_mode=mode,
        setting=setting,
        quick_start=quick,
        **more,
    )


STARTED = re.compile(r"max_total_num_tokens=(\d+).*?max_running_requests=(\d+)")
SLOTS = re.compile(r"max_mamba_cache_size: (\d+)")
RUNNING = re.compile(r"(?:Prefill|Decode) batch.*?#running-req: (\d+)")
NEW = re.compile(r"Prefill batch, #new-seq: (\d+).*?#running-req: (\d+)")
RETRACTED = re.compile(r"Retract requests.*?#retracted_reqs: (\d+)")


def started(log: str) -> dict:
    """What a server said of its pools before it answered."""
    found, slots = STARTED.search(log), SLOTS.search(log)
    return {
        "max_total_num_tokens": int(found[1]) if found else None,
        "max_running_requests": int(found[2]) if found else None,
        "max_mamba_cache_size": int(slots[1]) if slots else None,
    }


def during(log: str) -> dict:
    """Most requests that ran at a time, and how many were retracted, in the part of a log that a client run wrote."""
    running = [int(n) for n in RUNNING.findall(log)]
    running += [int(new) + int(n) for new, n in NEW.findall(log)]
    return {"running_max": max(running, default=None), "retractions": sum(map(int, RETRACTED.findall(log)))}


class PeakMemory:
    """The most memory in use while it runs, in GiB: of the GPUs, or on CPU of the server's process group."""

    def __init__(self, device: str, group: Optional[int], every: float = 0.5):
        self.device, self.group, self.every = device, group, every
        self.peak: Optional[float] = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._end.set()
        self._thread.join(10)

    def _run(self) -> None:
        while True:
            used = resident(self.group) if self.device == "cpu" else gpu_used()
            if used is not None:
                self.peak = max(self.peak or 0.0, used)
            if self._end.wait(self.every):
                return


def gpu_used() -> Optional[float]:
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"], capture_output=True, text=True
        )
        return max(float(line) for line in done.stdout.split()) / 1024
    except (OSError, ValueError):
        return None


def resident(group: Optional[int]) -> Optional[float]:
    """Resident memory of a process group; pages that its processes share are counted once a process."""
    if group is None:
        return None
    total = 0
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(entry.name)) == group:
                total += int((entry / "statm").read_text().split()[1])
        except (OSError, ValueError, IndexError):
            continue  # it ended meanwhile
    return total * os.sysconf("SC_PAGE_SIZE") / 2**30 if total else None
