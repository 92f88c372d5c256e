"""The JSON lines of a run: what a row holds, where it goes, and which are there already."""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Iterable, Optional

# Every row has these, in this order; figures are null where there is an error.
FIELDS = (
    "gpu", "commit", "model", "mode", "nodes", "mem_fraction", "memory", "concurrency", "accept_len", "output_tok_s",
    "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms", "running_max", "retractions", "peak_gib", "error",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One client run. Rows with the same case are the same measurement."""

    model: str
    mode: str
    memory: str
    mem_fraction: Optional[float]
    slots: Optional[int]
    accept: str  # as asked for: real, published, or a number
    concurrency: int
    input_len: int
    output_len: int
    prompts: int
    repeat: int

    @property
    def server(self) -> tuple:
        """Cases that one server serves."""
        return (self.model, self.mode, self.memory, self.mem_fraction, self.slots, self.accept)


def case_of(row: dict) -> Case:
    return Case(**{name: row[name] for name in Case.__dataclass_fields__})


def read(path: Path) -> list[dict]:
    """The rows of a file. A last line that an interruption cut short is left out."""
    rows = []
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            if number != len(lines):
                raise ValueError(f"{path}: line {number} is not JSON") from None
    return rows


class Rows:
    """Rows are appended one by one, so that an interruption costs the row that was being measured."""

    def __init__(self, path: Path, retry_errors: bool = False):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.rows = read(path) if path.exists() else []
        if path.exists() and (text := path.read_text()) and not text.endswith("\n"):  # the line that was cut short
            path.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        self.done = {case_of(r) for r in self.rows if r["error"] is None or not retry_errors}

    def add(self, case: Case, facts: dict[str, Any], figures: dict[str, Any]) -> dict:
        values = {**asdict(case), **facts, **figures}
        row = {name: values.pop(name, None) for name in FIELDS}
        row.update(values)
        with open(self.path, "a") as f:
            f.write(json.dumps(row) + "\n")
        self.rows.append(row)
        self.done.add(case)
        return row


def latest(rows: Iterable[dict]) -> list[dict]:
    """The newest row of every case: a retried error gives way to what came after it."""
    return list({case_of(row): row for row in rows}.values())


def commit(root: Path) -> str:
    """TREEWY_COMMIT, or git's name for what is checked out, or unknown."""
    if os.environ.get("TREEWY_COMMIT"):
        return os.environ["TREEWY_COMMIT"]
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=9", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def gpu_name(device: str) -> str:
    """The driver's name of the GPU. torch is not asked: it would take memory there."""
    if device == "cpu":
        return "cpu"
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True
        )
    except OSError:
        return "unknown GPU"
    return (done.stdout.strip().splitlines() or ["unknown GPU"])[0]


def tag(gpu: str) -> str:
    words = [w for w in re.findall(r"[a-z0-9]+", gpu.lower()) if w not in ("nvidia", "tesla", "gpu")]
    return "-".join(words) or "gpu"


def path_for(out: Path, gpu: str, commit: str) -> Path:
    """serving-<date>-<gpu>-<commit>.jsonl: the newest of this GPU and commit if there is one, so that a run which began
    before midnight goes on; else one of today."""
    there = sorted(out.glob(f"serving-????-??-??-{tag(gpu)}-{commit}.jsonl"))
    today = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
    return there[-1] if there else out / f"serving-{today}-{tag(gpu)}-{commit}.jsonl"
