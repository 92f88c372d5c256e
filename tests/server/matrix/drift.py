"""How far the states of one long answer are from a float64 replay of the very inputs that the layers read.

The server of this scenario runs with a recorder in its processes (drift_hook/, through PYTHONPATH; nothing in the package or
the patches knows of it). The replay is the recurrence, token by token, from the recorded inputs.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Mapping

from treewy_sglang.demo.prompts import mixed

HOOK = Path(__file__).resolve().parent / "drift_hook"
FILE = "recorded.pt"


def environment(folder: Path, inherited: Mapping[str, str], tokens: int) -> dict[str, str]:
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).unlink(missing_ok=True)
    path = [str(HOOK), *(e for e in (inherited.get("PYTHONPATH") or os.environ.get("PYTHONPATH", "")).split(os.pathsep) if e)]
    return {"PYTHONPATH": os.pathsep.join(path), "MATRIX_DRIFT_FILE": str(folder / FILE), "MATRIX_DRIFT_TOKENS": str(tokens)}


def replay(record: Mapping[str, Any]) -> tuple[Any, int]:
    """State after the recorded tokens of one layer, float64 [HV, V, K], and the number of tokens. The convolution's output is
    rounded to the activations' dtype, as every implementation rounds it."""
    import torch
    import torch.nn.functional as F

    x, weight, bias = record["mixed_qkv"], record["conv_weight"].double(), record["conv_bias"]
    width, heads, values = weight.shape[1], record["key_heads"], record["A_log"].shape[0]
    mixed_in = F.pad(x.double().T, (width - 1, 0))
    out = sum(mixed_in[:, i : i + len(x)] * weight[:, i : i + 1] for i in range(width))
    if bias is not None:
        out = out + bias.double()[:, None]
    out = F.silu(out).T.to(x.dtype).double()
    dim = x.shape[1] // (2 * heads + values)
    _, k, v = out.split([heads * dim, heads * dim, values * dim], dim=1)
    k, v = k.reshape(-1, heads, dim), v.reshape(-1, values, dim)
    k = (k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(values // heads, 1)
    g = -record["A_log"].double().exp() * F.softplus(record["a"].double() + record["dt_bias"].double())
    decay, beta = g.exp(), record["b"].double().sigmoid()
    state = torch.zeros(values, dim, dim, dtype=torch.float64)
    for t in range(len(x)):
        state *= decay[t][:, None, None]
        u = beta[t][:, None] * (v[t] - torch.bmm(state, k[t].unsqueeze(-1)).squeeze(-1))
        state.baddbmm_(u.unsqueeze(-1), k[t].unsqueeze(1))
    return state, len(x)


def errors(record: Mapping[str, Any]) -> tuple[list[float], int]:
    """Of one layer: |state - replay| / |replay| of every head (Frobenius norms), and the number of tokens."""
    truth, tokens = replay(record)
    difference = record["state"].double() - truth
    return (difference.flatten(1).norm(dim=1) / truth.flatten(1).norm(dim=1)).tolist(), tokens


def load(server, size, folder: Path) -> dict[str, Any]:
    import torch

    # A few tokens more than are recorded: a step may bring several.
    server.generate(mixed(5)[4], size.long + 16)
    file, asked = folder / FILE, time.monotonic()
    while not file.exists():
        if time.monotonic() - asked > 60:
            raise AssertionError(f"the recorder wrote no {file}")
        time.sleep(0.5)
    found, tokens = {}, set()
    for name, record in torch.load(file).items():
        found[str(name)], count = errors(record)
        tokens.add(count)
    assert len(tokens) == 1, f"layers saw different numbers of tokens: {tokens}"
    return {"errors": found, "tokens": tokens.pop()}
