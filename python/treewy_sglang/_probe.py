"""What `treewy doctor` can only learn from torch and the compiled operators, asked in a process of its own: a broken library
may end it. Prints one line `PROBE {json}` per stage, {"stage": NAME, ...facts} or {"stage": NAME, "error": SENTENCE}, and
before each a line `BEGIN NAME`."""

from __future__ import annotations

import ctypes
import json
import time
import warnings


def stage(name, function):
    """Run one stage and print what it returns; False if it failed."""
    print("BEGIN", name, flush=True)
    try:
        facts = function()
    except Exception as error:
        facts = {"error": f"{type(error).__name__}: {error}"}
    print("PROBE", json.dumps({"stage": name, **facts}), flush=True)
    return "error" not in facts


def build_facts():
    """What the compiled part was built from, which its host module knows without torch."""
    from treewy_sglang import _host

    return dict(_host.build_info())


def torch_facts():
    import torch

    return {"version": torch.__version__, "path": torch.__file__, "cuda": torch.version.cuda}


def driver():
    """CUDA version that the driver offers, "13.0"; None where there is no driver."""
    try:
        version = ctypes.c_int()
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)):
            return None
    except OSError:
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def cuda_facts():
    import torch

    facts = {"driver": driver(), "runtime": torch.version.cuda, "devices": [], "reason": None}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    if not usable:
        if caught:
            facts["reason"] = str(caught[-1].message).split("\n")[0]
        elif torch.version.cuda is None:
            facts["reason"] = "this torch was built without CUDA"
        else:
            try:
                torch.cuda.init()
            except Exception as error:
                facts["reason"] = str(error).split("\n")[0]
        return facts
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        facts["devices"].append(
            {"name": about.name, "capability": [about.major, about.minor], "free_bytes": free, "total_bytes": total}
        )
    return facts


def operator_facts():
    from treewy_sglang import build_info, ops  # noqa: F401  (loads the library)

    return dict(build_info())


def self_test(device):
    """All four operators on random draft trees against the float64 recurrence, by the tolerance policy of testing.py."""
    import torch

    from treewy_sglang import check_errors, ops, reference, tree
    from treewy_sglang.testing import assert_same_bits, assert_within_yardstick, make_inputs

    began = time.monotonic()
    act = torch.float32 if device == "cpu" else torch.bfloat16
    # The tests are for accuracy; this is for a library that does not fit the machine, so it has room for rounding.
    factor, floor = 16.0, 16.0
    x = make_inputs(N=2, T=16, H=2, HV=4, K=128, act=act, conv=True, seed=0, device=device)
    exact = reference.tree_conv_verify(*x.conv_args(), nodes=x.accepted)
    rough = reference.tree_conv_verify(*x.conv_args(), nodes=x.accepted, dtype=torch.float32)
    by_node = lambda t: t.reshape(x.N, x.T, *t.shape[1:])

    children, siblings = (torch.tensor(side, device=device) for side in zip(*map(tree.links_from_parents, x.trees)))
    parents = torch.full_like(x.parents, -9)
    ops.parents_from_links(children, siblings, parents)
    assert_same_bits(parents, x.parents, name="parents [request, node]")

    for conv in (False, True):
        out, stash = x.out(), x.stash(conv=conv)
        if conv:
            ops.tree_conv_verify(*x.conv_args(), out, stash.layer(0))
        else:
            ops.tree_verify(*x.args(), out, stash.layer(0))
        truth, yardstick = (exact, rough) if conv else (reference.recurrence(*x.args(), dtype=d) for d in (torch.float64, torch.float32))
        assert_within_yardstick(
            by_node(out), by_node(truth.out), by_node(yardstick.out),
            name="outputs [request, node, head, v]", group_dims=(0, 2), dtype=act, factor=factor, floor_ulps=floor,
        )  # fmt: skip
    ops.commit(stash, x.parents, x.accepted, x.state_indices, x.pool, x.conv_pool)
    assert_within_yardstick(
        x.pool[0][x.state_indices], exact.states, rough.states,
        name="states [request, head, v, k]", group_dims=(0, 1), dtype=x.pool.dtype, factor=factor, floor_ulps=floor,
    )  # fmt: skip
    counted = check_errors(device)
    if any(counted.values()):
        raise AssertionError(f"the operators counted bad values: {counted}")
    return {"nodes": x.T, "seconds": time.monotonic() - began}


def main(want_cuda):
    """`want_cuda`: also test on the GPU where there is one."""
    stage("build", build_facts)
    if not stage("torch", torch_facts):
        return
    seen = {}

    def cuda():
        seen.update(cuda_facts())
        return seen

    stage("cuda", cuda)

    def operators():
        facts = operator_facts()
        seen["operators"] = facts
        return facts

    if not stage("operators", operators):
        return
    stage("self-test cpu", lambda: self_test("cpu"))
    if want_cuda and seen.get("devices") and seen["operators"]["cuda"]:
        stage("self-test cuda", lambda: self_test("cuda"))
