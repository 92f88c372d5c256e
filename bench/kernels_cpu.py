"""Times the CPU operators against the sequential recurrence in torch, after checking that both are right.

    python bench/kernels_cpu.py [--quick] [--json FILE] [--threads N]

Three measurements a shape (activations bfloat16, K = V = 128, gates of real checkpoints):

    verify   tree_verify                 against  one step per node, batched over requests and heads
    conv     tree_conv_verify            against  convolution, SiLU and split in torch, then the same recurrence
    round    tree_verify + commit        against  the recurrence that keeps every node's state + a copy of the accepted one

The torch side is written twice, with batched matrix products and with elementwise passes, and the faster one of each shape
counts. Every repetition times operator and torch back to back on other slots of a pool larger than the caches; what is
reported is the median of the ratios, so that a load on the machine that comes and goes hits both. A shape whose outputs
fail the check of treewy_sglang.testing is not timed. Exit code 1: a check failed; 2: an operator was slower somewhere, or
--only selects nothing.
"""

import argparse
import gc
import itertools
import json
import platform
import statistics
import sys
import time

import torch

import treewy_sglang
from treewy_sglang import ops, reference, tree
from treewy_sglang.testing import assert_within_yardstick, error_ratio, make_inputs

SHAPES = {"chain 4": ("chain", 4), "chain 8": ("chain", 8), "tree 16": ("topk4", 16), "tree 64": ("topk4", 64)}
POOL_BYTES = 96 << 20  # beyond the last-level cache of the machines this runs on


class Torch:
    """The sequential recurrence, the best we know in torch: float32 state, in-place updates, no step that is not needed."""

    def __init__(self, x, elementwise):
        self.x, self.elementwise = x, elementwise
        n, t = x.N, x.T
        self.parents = [[p[i] for p in x.trees] for i in range(t)]
        self.chain = x.parents is None
        self.parents_matrix = torch.tensor(x.trees)
        self.base = torch.arange(n) * (t + 1)
        # Where the parent's state of step i lies among [N, T+1] states; column 0 is the committed state.
        self.parent_at = [self.base + torch.tensor(p) + 1 for p in self.parents]

    def prepare(self, q, k, v):
        x = self.x
        n, t, hv, group = x.N, x.T, x.HV, x.HV // x.H
        unit = lambda y: y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6)
        shape = lambda y: y.reshape(n, t, hv, x.K).transpose(0, 1).reshape(t, n * hv, x.K)
        q = shape((unit(q.float()) * x.K**-0.5).repeat_interleave(group, 1))
        k = shape(unit(k.float()).repeat_interleave(group, 1))
        v = shape(v.float())
        g = -x.A_log.exp() * torch.nn.functional.softplus(x.a.float() + x.dt_bias)
        rows = lambda y: y.reshape(n, t, hv).transpose(0, 1).reshape(t, n * hv)
        return q, k, v, rows(g.exp()), rows(x.b.float().sigmoid())

    def step(self, s, q, k, v, e, beta):
        """One node: s [N*HV, V, K] becomes its state, its output is returned."""
        s.mul_(e[:, None, None])
        if self.elementwise:
            u = beta[:, None] * (v - (s * k[:, None]).sum(-1))
            s.addcmul_(u[:, :, None], k[:, None])
            return (s * q[:, None]).sum(-1)
        u = beta[:, None] * (v - torch.bmm(s, k[:, :, None])[..., 0])
        s.baddbmm_(u[:, :, None], k[:, None])
        return torch.bmm(s, q[:, :, None])[..., 0]

    def verify(self, indices, q=None, k=None, v=None, keep=None):
        """[N*T, HV, V] in the activation dtype. keep: [N, T+1, HV, V, K] that receives every node's state."""
        x = self.x
        n, t, hv, kdim = x.N, x.T, x.HV, x.K
        q, k, v, e, beta = self.prepare(x.q if q is None else q, x.k if k is None else k, x.v if v is None else v)
        out = torch.empty(t, n * hv, kdim)
        start = x.state[indices].float()
        if self.chain and keep is None:
            s = start.reshape(n * hv, kdim, kdim)
            for i in range(t):
                out[i] = self.step(s, q[i], k[i], v[i], e[i], beta[i])
        else:
            if keep is None:
                keep = self.keep()
            flat = keep.reshape(n * (t + 1), hv, kdim, kdim)
            keep[:, 0] = start
            for i in range(t):
                s = flat.index_select(0, self.parent_at[i]).reshape(n * hv, kdim, kdim)
                out[i] = self.step(s, q[i], k[i], v[i], e[i], beta[i])
                keep[:, i + 1] = s.reshape(n, hv, kdim, kdim)
        return out.reshape(t, n, hv, kdim).transpose(0, 1).reshape(n * t, hv, kdim).to(x.q.dtype)

    def keep(self):
        x = self.x
        return torch.empty(x.N, x.T + 1, x.HV, x.K, x.K)

    def conv(self, indices, y):
        """q, k, v of the convolution over ancestors; y holds the convolution's inputs."""
        x = self.x
        n, t, width = x.N, x.T, y.conv_weight.shape[1]
        state = y.conv_pool[0, indices].float()  # [N, D, W-1]
        line = torch.cat([state.transpose(1, 2), y.mixed_qkv.float().reshape(n, t, -1)], 1)  # [N, W-1+T, D]
        total = y.conv_bias.float() + line[:, width - 1 :] * y.conv_weight[:, -1].float()
        at = torch.arange(t).expand(n, t)
        parents = self.parents_matrix
        row = torch.arange(n)[:, None]
        for back in range(1, width):  # before the root: one step further into the state's columns
            at = torch.where(at >= 0, parents[row, at.clamp(min=0)], at - 1)
            total += line[row, at + width - 1] * y.conv_weight[:, width - 1 - back].float()
        qkv = torch.nn.functional.silu(total).to(y.mixed_qkv.dtype).reshape(n * t, -1)
        return reference.split(qkv, x.H, x.HV, x.K, x.K)

    def commit(self, keep, indices):
        x = self.x
        x.state[indices] = keep[torch.arange(x.N), x.accepted + 1].to(x.state.dtype)


def sequential(x, q, k, v, keep=None):
    """The torch side before its outputs are rounded: the yardstick."""
    act, x.q = x.q, x.q.float()
    out = Torch(x, False).verify(x.state_indices, q.float(), k, v, keep=keep)
    x.q = act
    return out


def check(x, y):
    """Outputs of both forms and the committed state of one shape against float64, the torch side being the yardstick.
    Returns the operator's error in units of torch's."""
    by_node = lambda t: t.reshape(x.N, x.T, x.HV, x.K)
    judge = dict(group_dims=(0, 2), dtype=torch.float32)
    exact = reference.wy(*x.args(), nodes=x.accepted)
    keep = Torch(x, False).keep()
    rough = sequential(x, x.q, x.k, x.v, keep)
    stash, out = x.stash(), x.out(torch.float32)
    ops.tree_verify(*x.args(), out, stash.layer(0))
    assert_within_yardstick(by_node(out), by_node(exact.out), by_node(rough), name="tree_verify out", **judge)
    ratio = error_ratio(by_node(out), by_node(exact.out), by_node(rough), group_dims=(0, 2))
    pool = x.pool.clone()
    ops.commit(stash, x.parents, x.accepted, x.state_indices, pool)
    states = keep[torch.arange(x.N), x.accepted + 1]
    assert_within_yardstick(
        pool[0, x.state_indices], exact.states, states, name="committed state", group_dims=(0, 1), dtype=pool.dtype
    )
    del keep, states, pool

    out = y.out(torch.float32)
    ops.tree_conv_verify(*y.conv_args(), out, y.stash(conv=True).layer(0))
    qkv = reference.conv(*y.conv_args()[:4], y.state_indices, y.parents).to(y.mixed_qkv.dtype)
    q, k, v = reference.split(qkv, y.H, y.HV, y.K, y.K)
    exact = reference.wy(q, k, v, *y.conv_args()[4:])
    rough = sequential(y, q, k, v)
    assert_within_yardstick(by_node(out), by_node(exact.out), by_node(rough), name="tree_conv_verify out", **judge)
    # The torch convolution too: a baseline that computes something else would be no baseline.
    for name, mine, want in zip("qkv", Torch(y, False).conv(y.state_indices, y), (q, k, v)):
        if not torch.equal(mine, want):
            raise AssertionError(f"torch convolution: {name} is not that of the reference")
    return ratio


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
clock = time.perf_counter


def timed(f):
    start = clock()
    f()
    return clock() - start


def measure(operator, baseline, slots, repeats, budget):
    """Median milliseconds of both and the median of their ratios, run alternately on rotating slots."""
    ours, theirs = [], []
    operator(slots[0]), baseline(slots[0])
    begin = time.perf_counter()
    for i in range(repeats):
        at = slots[i % len(slots)]
        ours.append(timed(lambda: operator(at)))
        theirs.append(timed(lambda: baseline(at)))
        if i >= 4 and time.perf_counter() - begin > budget:
            break
    ratio = statistics.median(b / a for a, b in zip(ours, theirs))
    return 1e3 * statistics.median(ours), 1e3 * statistics.median(theirs), ratio, len(ours)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions and no 16 requests")
    parser.add_argument("--json", help="also append the JSON lines to this file")
    parser.add_argument("--threads", type=int, help="torch.set_num_threads")
    parser.add_argument("--only", help="run shapes whose label contains this text")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: processor time, for --threads 1 on a busy machine")
    args = parser.parse_args()
    global clock
    clock = CLOCKS[args.clock]
    if args.threads:
        torch.set_num_threads(args.threads)
    info = treewy_sglang.build_info()
    machine = dict(cpu=cpu_name(), isa=info["cpu_isa"], threads=torch.get_num_threads(), clock=args.clock, torch=torch.__version__, commit=info["git_commit"])
    print("#", json.dumps(machine))
    print(f"{'shape':34} {'measured':8} {'treewy ms':>10} {'torch ms':>10} {'speed-up':>9}   error / torch's")
    slower, lines, unprinted = [], [], []
    requests = (1, 4) if args.quick else (1, 4, 16)
    todo = []
    for (H, HV), state, n, (label, (shape, T)) in itertools.product(
        ((4, 8), (16, 32)), (torch.float32, torch.bfloat16), requests, SHAPES.items()
    ):
        todo.append((f"N {n:2} H {H:2} HV {HV:2} {label} {str(state)[6:]}", H, HV, state, n, label, shape, T))
    chosen = [case for case in todo if not args.only or args.only in case[0]]
    if not chosen:
        parser.error(f"--only {args.only!r} is in no label; labels are as {todo[0][0]!r}, with {', '.join(SHAPES)}")
    for name, H, HV, state, n, label, shape, T in chosen:
        x = make_inputs(N=n, T=T, H=H, HV=HV, K=128, state=state, shape=shape, seed=1)
        y = make_inputs(N=n, T=T, H=H, HV=HV, K=128, state=state, shape=shape, seed=1, conv=True)
        variants = [Torch(x, False), Torch(x, True)]
        try:
            error = check(x, y)
        except AssertionError as e:
            print(f"{name}: not timed, the check is red: {e}")
            return 1
        # A pool beyond the caches; the padding between slots of make_inputs is kept.
        per_slot = x.state[0].nbytes
        count = max(n, min(POOL_BYTES // per_slot, 4 * n)) // n * n
        x.pool = x.pool[:, :1].repeat(1, count, 1, 1, 1)
        y.conv_pool = y.conv_pool[:, :1].repeat(1, count, 1, 1)
        order = torch.randperm(count).reshape(-1, n)
        slots = list(order)
        out, stash, conv_stash = x.out(), x.stash(), y.stash(conv=True)
        layer, conv_layer = stash.layer(0), conv_stash.layer(0)

        def verify(at):
            ops.tree_verify(x.q, x.k, x.v, x.a, x.b, x.A_log, x.dt_bias, x.state, at, x.parents, out, layer)

        def conv_verify(at):
            ops.tree_conv_verify(y.mixed_qkv, y.conv_weight, y.conv_bias, y.conv_pool[0], x.a, x.b, x.A_log, x.dt_bias, x.state, at, y.parents, out, conv_layer)  # fmt: skip

        def round_(at):
            verify(at)
            ops.commit(stash, x.parents, x.accepted, at, x.pool)

        # The faster of the two ways counts as torch.
        keep = variants[0].keep()
        plain = min(variants, key=lambda p: min(timed(lambda: p.verify(slots[0], keep=keep)) for _ in range(2)))

        def torch_round(at):
            plain.verify(at, keep=keep)
            plain.commit(keep, at)

        y_torch = Torch(y, plain.elementwise)
        y_torch.x.pool = x.pool
        cases = {
            # A chain needs no state of earlier nodes; a tree does, into memory that is there already.
            "verify": (verify, lambda at: plain.verify(at, keep=None if plain.chain else keep)),
            "conv": (conv_verify, lambda at: y_torch.verify(at, *y_torch.conv(at, y), keep=None if plain.chain else keep)),
            "round": (round_, torch_round),
        }
        for what, (operator, baseline) in cases.items():
            ours, theirs, ratio, repeats = measure(operator, baseline, slots, 9 if args.quick else 25, 2.0 if args.quick else 5.0)
            print(f"{name:34} {what:8} {ours:10.3f} {theirs:10.3f} {ratio:8.1f}x   {error:.2f}", flush=True)
            line = dict(
                kernel=what, N=n, T=T, shape=label, H=H, HV=HV, K=128, state=str(state)[6:], act=str(x.q.dtype)[6:], treewy_ms=ours,
                torch_ms=theirs, speedup=ratio, repeats=repeats, torch_way="elementwise" if plain.elementwise else "bmm",
                error_of_torch=error, **machine,
            )  # fmt: skip
            lines.append(line)
            if args.json:
                with open(args.json, "a") as f:  # at once: a run of half an hour may be interrupted
                    f.write(json.dumps(line) + "\n")
            else:
                unprinted.append(line)
            if not ratio >= 1.0:
                slower.append(f"{name} {what}: {ratio:.2f}x")
        del keep
        gc.collect()
    print("".join(json.dumps(line) + "\n" for line in unprinted), end="")
    if lines:
        ratios = [line["speedup"] for line in lines]
        print(f"# {len(lines)} measurements, speed-up {min(ratios):.1f}x to {max(ratios):.1f}x, median {statistics.median(ratios):.1f}x")
    if slower:
        print("# slower than torch: " + "; ".join(slower))
        return 2
    return 0


def cpu_name():
    try:
        with open("/proc/cpuinfo") as f:
            return next(line.split(":", 1)[1].strip() for line in f if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


if __name__ == "__main__":
    sys.exit(main())
