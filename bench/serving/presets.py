"""Sets of options for one H200, each meant to fit into some minutes of a rented machine."""

from __future__ import annotations

from .server import OFFLINE

CHAINS = ["snapshot-chain4", "replayssm-chain4", "treewy-chain4"]
# Batch sizes whose graphs are captured, most of what a start takes; SGLang adds the most that memory lets run at a time, and
# pads a batch in between. The same for every mode.
GRAPHS = "1 2 4 8 16 20 24 32 48 64 96 128 192 256".split()
# quick: other model files are not imported; they are those of Qwen3-Next, so not where the model is another.
BASE = {
    "device": "cuda",
    "dtype": "bfloat16",
    "accept": "published",
    "dims": "35B",
    "server_args": [*OFFLINE, "--cuda-graph-bs-decode", *GRAPHS],
    "rounds": 2,
    "quick": True,
}

# memory: with Qwen3.5-35B-A3B dimensions `treewy plan` gives snapshots of a chain of 3 drafts 20 running requests at 0.66
# and 11 at 0.59.
PRESETS = {
    "tight": {**BASE, "modes": CHAINS, "memory": ["tight=0.66"], "concurrency": [32, 64, 128, 256]},
    "tightest": {**BASE, "modes": CHAINS, "memory": ["tight=0.59"], "concurrency": [32, 128]},
    # What SGLang's own options make of the same memory: ratios at which snapshots and ReplaySSM, too, keep no more KV cache than the
    # requests that run can fill, found as `treewy plan` finds TreeWY's; and a slot less for every request.
    "split": {
        **BASE, "modes": ["treewy-chain4", "replayssm-chain4+ratio3.85", "snapshot-chain4+ratio6", "treewy-chain4+lazy", "replayssm-chain4+lazy+ratio3.85"],
        "memory": ["tight=0.66"], "concurrency": [128],
    },
    "ample": {**BASE, "modes": ["none", *CHAINS], "memory": ["ample=0.85"], "concurrency": [1, 8, 32, 64], "repeats": 2},
    "trees": {
        **BASE, "modes": ["treewy-tree15", "snapshot-tree15", "treewy-tree40", "treewy-tree64"],
        "memory": ["tight=0.66", "ample=0.85"], "concurrency": [1, 8, 32],
    },
    "trees-wide": {
        **BASE, "modes": ["treewy-tree64", "snapshot-tree64", "treewy-tree40", "snapshot-tree40"],
        "memory": ["ample=0.85"], "concurrency": [1, 8, 32],
    },
    # Whether a tree beats the best chain anywhere: few requests, sparse and dense.
    "best": {
        **BASE, "modes": ["none", "treewy-chain4", "treewy-tree15", "treewy-tree40"], "memory": ["ample=0.85"],
        "concurrency": [1, 2, 4, 8], "repeats": 2,
    },
    "best-dense": {
        **BASE, "dims": "27B", "quick": False, "modes": ["none", "treewy-chain4", "treewy-tree15", "treewy-tree40"],
        "memory": ["ample=0.85"], "concurrency": [1, 2, 4, 8], "repeats": 2,
    },
    # The plumbing, on any machine: the demo's checkpoint, nothing to publish.
    "smoke": {
        "device": "cpu", "dtype": "float32", "accept": "real", "modes": ["none", "treewy-chain4"], "concurrency": [2],
        "memory": ["tight=slots:16"], "input_len": 24, "output_len": 16, "rounds": 2, "quick": True, "warmup": 1,
        "server_args": ["--max-total-tokens", "8192", "--sleep-on-idle"],
    },
}  # fmt: skip
