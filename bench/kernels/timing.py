"""CUDA-graph timing, the bandwidth ceilings of this run, and facts about the machine."""

from __future__ import annotations

import datetime
import math
import os
import shutil
import statistics
import subprocess
import time

import torch

L2_FLOOR = 256 << 20  # one replay touches at least this many bytes of state: several times any L2


REPLAY_MS = 4.0  # a replay lasts this long at least, where there are calls enough: its own launch is then nothing


def graph_us(calls, device: str, budget_ms: float = 60.0, least: int | None = None) -> float:
    """Median microseconds of one call, out of replays of a graph that holds `calls` in order.

    The calls use different layers, slots and inputs, so that no call finds its data in the L2 cache. Of slow calls the
    graph holds only as many as fill REPLAY_MS, but `least` of them (None: all), which is what it takes to pass the L2.
    """
    if device != "cuda":
        for call in calls[:1]:
            call()
        start = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - start) * 1e6 / len(calls)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        calls[0]()
        start.record(stream)
        for call in calls:
            call()
        end.record(stream)
        end.synchronize()
        if least is not None:
            enough = math.ceil(REPLAY_MS * len(calls) / max(start.elapsed_time(end), 1e-3))
            calls = calls[: min(len(calls), max(least, enough))]
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for call in calls:
                call()
        finally:
            graph.capture_end()

        def replay() -> float:
            start.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            return start.elapsed_time(end)

        replay()
        once = replay()
        repeats = int(min(30, max(7 if once < 100 else 3, budget_ms / max(once, 1e-3))))
        median = statistics.median(replay() for _ in range(repeats))
    torch.cuda.current_stream().wait_stream(stream)
    del graph
    return median * 1e3 / len(calls)


def ceilings(device: str) -> tuple[float, float]:
    """(read GB/s, read+write GB/s) of this device now: the best of a few plain streaming kernels over 4 GiB."""
    if device != "cuda":
        return float("nan"), float("nan")
    from . import streams

    return streams.measure()


class Clock:
    """SM clock in MHz; NVML where it is installed, else nvidia-smi, else None. Reads only."""

    def __init__(self, device: str):
        self._handle = self._nvml = None
        self._smi = None
        if device != "cuda":
            return
        try:
            import pynvml

            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
            self._nvml = pynvml
        except Exception:
            self._smi = shutil.which("nvidia-smi")

    def read(self) -> int | None:
        if self._nvml is not None:
            return int(self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM))
        if self._smi:
            command = [self._smi, "--query-gpu=clocks.sm", "--format=csv,noheader,nounits"]
            answer = subprocess.run(command, capture_output=True, text=True).stdout.split()
            return int(answer[0]) if answer else None
        return None


def gpu_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else device


def gpu_tag(name: str) -> str:
    """'NVIDIA H200' -> 'h200', for file names."""
    return "-".join(w for w in name.lower().replace("/", " ").split() if w not in ("nvidia", "geforce")) or "gpu"


def commit(asked: str | None, root: str) -> str:
    """The commit that is measured: the option, the environment, git, or the build information."""
    if asked or os.environ.get("TREEWY_COMMIT"):
        return asked or os.environ["TREEWY_COMMIT"]
    if os.path.exists(os.path.join(root, ".git")):
        command = ["git", "-C", root, "describe", "--always", "--dirty", "--abbrev=9", "--exclude=*"]
        answer = subprocess.run(command, capture_output=True, text=True)
        if answer.returncode == 0:
            return answer.stdout.strip()
    return "unknown"


def today() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
