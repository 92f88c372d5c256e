"""Bytes per request and requests that fit, for the three ways to keep a draft's states.

The arithmetic is that of SGLang v0.5.17 (kv_cache_configurator.py, memory_pool.py, pool_configurator.py) and, for
TreeWY, of this package's own pools through `treewy_sglang.sizes`. docs/capacity.md has it in formulas.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Optional

from treewy_sglang.sizes import (
    CONV_WIDTHS, HEAD_DIMS, MAX_NODES, conv_window_columns, slots_beside_contexts, slots_within, snapshot_slots_within,
    stash_row_bytes,
)  # fmt: skip

from .errors import PlanError, refuse
from .models import BYTES, STATE_DTYPES, Model

GIB = 1 << 30
METHODS = ("snapshot", "replayssm", "treewy")

KV_DTYPES = {"auto": None, "bfloat16": 2, "float16": 2, "float32": 4, "fp8_e4m3": 1, "fp8_e5m2": 1}
STRATEGIES = ("auto", "no_buffer", "extra_buffer", "extra_buffer_lazy")
ALGORITHMS = ("NEXTN", "NGRAM")
DEVICES = ("cuda", "cpu")
NGRAM_BREADTH = 10  # SGLang's --speculative-ngram-max-bfs-breadth


def proposed_tokens(steps: int, topk: int) -> int:
    """Tokens that so many draft steps propose: topk, then topk for each of the topk best so far."""
    return topk + (steps - 1) * topk**2


def divisors(n: int) -> list[int]:
    return [i for i in range(1, n + 1) if n % i == 0]


def integer(argument: str, value: Any, least: int, most: Optional[int] = None) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        raise refuse(argument, value, f"an integer from {least}" + (f" to {most}" if most is not None else ""))
    return value


def number(argument: str, value: Any, allowed: str, inside) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not inside(value):
        raise refuse(argument, value, allowed)
    return float(value)


def one_of(argument: str, value: Any, allowed) -> str:
    if value not in allowed:
        raise refuse(argument, repr(value), ", ".join(allowed))
    return value


@dataclass(frozen=True)
class Draft:
    """What one verify reads: `nodes` tokens, the root (the newest token) among them."""

    nodes: int
    topk: int = 1
    steps: Optional[int] = None
    shape: str = ""

    @classmethod
    def make(
        cls, nodes: Optional[int] = None, tree: Optional[list] = None, steps: Optional[int] = None,
        topk: Optional[int] = None,
    ) -> "Draft":  # fmt: skip
        """From a number of nodes, the branching of a tree level by level ([2, 2, 2]: 14 drafts below the root), or
        SGLang's steps and topk. Steps with topk > 1 and no number of nodes: all that they propose."""
        if tree is not None:
            for other, value in (("--nodes", nodes), ("--steps", steps), ("--topk", topk)):
                if value is not None:
                    raise PlanError(f"{other} is {value} beside --tree, which says it already; allowed: one of the two")
            if not isinstance(tree, (list, tuple)) or not tree:
                raise refuse("--tree", tree, "the branches of every level, as 2,2,2")
            level = total = 1
            for branches in tree:
                level *= integer("--tree", branches, 1, MAX_NODES)
                total += level
                integer("the nodes of --tree " + ",".join(map(str, tree)), total, 1, MAX_NODES)
            return cls(total, max(tree), len(tree), "tree of " + str(list(tree)))
        if topk is not None:
            integer("--topk", topk, 1, MAX_NODES)
        if steps is not None:
            integer("--steps", steps, 1)
            proposed = proposed_tokens(steps, topk or 1)
            if nodes is None:
                nodes = integer(
                    f"the draft of --steps {steps} --topk {topk or 1}, in nodes,", proposed + 1, 2, MAX_NODES
                )
            elif (topk or 1) == 1 and nodes != steps + 1:
                raise refuse("--nodes", nodes, f"{steps + 1}, which a chain of --steps {steps} has")
            elif nodes - 1 > proposed:
                raise refuse("--nodes", nodes, f"up to {proposed + 1}, which --steps {steps} --topk {topk} fill")
        elif nodes is None:
            raise PlanError("--nodes is not given; allowed: --nodes, --tree, or --steps (with --topk)")
        integer("--nodes", nodes, 1, MAX_NODES)
        topk = topk or 1
        return cls(nodes, topk, steps, f"chain of {nodes - 1}" if topk == 1 else f"tree, topk {topk}")

    @property
    def drafts(self) -> int:
        return self.nodes - 1

    def with_nodes(self, nodes: int) -> "Draft":
        return dataclasses.replace(self, nodes=nodes, steps=None, shape="")


@dataclass(frozen=True)
class Server:
    """The arguments of a server that its memory depends on. `gpu_memory` is what is free before weights are loaded."""

    gpu_memory: float = 80.0  # GiB
    mem_fraction: float = 0.85
    tp: Optional[int] = None  # None: the fewest GPUs that hold the weights
    dtype: str = "auto"
    state_dtype: str = "auto"
    kv_dtype: str = "auto"
    weights_dtype: str = "auto"
    weights_gib: Optional[float] = None  # on each GPU, MTP layers included; instead of the estimate
    context_length: int = 4096  # tokens that each request holds, and the server's --context-length
    requests: int = 48  # --max-running-requests; 48 is SGLang's default with drafts
    strategy: str = "auto"
    disable_radix_cache: bool = False
    disable_overlap_schedule: bool = False
    mamba_full_memory_ratio: float = 0.9
    max_mamba_cache_size: Optional[int] = None
    algorithm: str = "NEXTN"
    device: str = "cuda"

    def check(self) -> None:
        positive = ("a number above 0, up to 1e6", lambda x: 0 < x <= 1e6)
        number("--gpu-memory", self.gpu_memory, *positive)
        number("--mem-fraction", self.mem_fraction, "a number above 0 and below 1", lambda x: 0 < x < 1)
        number("--mamba-full-memory-ratio", self.mamba_full_memory_ratio, *positive)
        if self.tp is not None:
            integer("--tp", self.tp, 1)
            if self.device == "cpu" and self.tp > 1:
                raise refuse("--tp", self.tp, "1 with --device cpu")
        integer("--context-length", self.context_length, 1)
        integer("--requests", self.requests, 1)
        if self.max_mamba_cache_size is not None:
            integer("--max-mamba-cache-size", self.max_mamba_cache_size, 1)
        if self.weights_gib is not None:
            number("--weights-gib", self.weights_gib, *positive)
        one_of("--dtype", self.dtype, ("auto", *STATE_DTYPES))
        one_of("--state-dtype", self.state_dtype, ("auto", *STATE_DTYPES))
        one_of("--kv-dtype", self.kv_dtype, tuple(KV_DTYPES))
        one_of("--weights-dtype", self.weights_dtype, ("auto", *BYTES))
        one_of("--mamba-radix-cache-strategy", self.strategy, STRATEGIES)
        one_of("--algorithm", self.algorithm, ALGORITHMS)
        one_of("--device", self.device, DEVICES)
        if self.strategy == "extra_buffer_lazy" and self.disable_overlap_schedule:
            raise refuse(
                "--mamba-radix-cache-strategy", repr(self.strategy), "extra_buffer without the overlap schedule"
            )

    @property
    def slots_per_request(self) -> int:
        """State slots that SGLang sets aside for a running request: its own, and those of prefixes being cached."""
        if self.disable_radix_cache:
            return 1
        strategy = self.strategy
        if strategy == "auto":
            strategy = "extra_buffer" if self.device == "cuda" and not self.disable_overlap_schedule else "no_buffer"
        if strategy == "no_buffer":
            return 3
        return 5 if strategy == "extra_buffer" and not self.disable_overlap_schedule else 4


@dataclass(frozen=True)
class Fit:
    """What one method costs and how many requests it serves. Bytes are of one GPU and one request, over all layers."""

    method: str
    nodes: int
    parts: dict[str, int]  # of the draft's states
    charged: int  # what the server's sizing sets aside for them
    running: int  # requests of context_length tokens at a time
    max_running: int  # what the server logs as max_running_requests
    slots: int  # what it logs as max_mamba_cache_size
    tokens: int  # what it logs as max_total_num_tokens
    limit: str  # what keeps `running` from being larger: requests, state, kv, both (state and kv), weights
    widest: Optional[int] = None  # nodes of the widest draft that costs no request; 0: every draft costs one
    reason: Optional[str] = None  # why the method does not serve this draft at all
    raised_from: Optional[int] = None  # slots of the default split, where the server raises them

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Plan:
    """Bytes are of one GPU."""

    model: Model
    server: Server
    draft: Draft
    state_dtype: str
    dtype: str
    tp: int
    slot: dict[str, int]  # bytes of one state slot: recurrent state, convolution state
    kv_bytes_per_token: int
    weights_bytes: int  # on one GPU
    rest_bytes: int  # what is left of the static memory for states and KV cache
    fits: dict[str, Fit]


class Sizes:
    """Everything that does not depend on the draft."""

    def __init__(self, model: Model, server: Server):
        server.check()
        check_shape(model, server.tp or 1)
        self.model, self.server = model, server
        self.dtype = model.dtype if server.dtype == "auto" else server.dtype
        self.state_dtype = model.state_dtype if server.state_dtype == "auto" else server.state_dtype
        self.activation_bytes = int(BYTES[self.dtype])
        self.window = model.conv_width - 1
        self.static_bytes = int(server.gpu_memory * server.mem_fraction * GIB)
        self.tp = server.tp or (1 if server.device == "cpu" else self.fits_from() or 1)
        self.channels = model.conv_channels // self.tp
        self.key_heads, self.value_heads = model.key_heads // self.tp, model.value_heads // self.tp
        layers = model.linear_layers
        self.slot = {
            "state": layers * self.value_heads * model.value_dim * model.key_dim * int(BYTES[self.state_dtype]),
            "conv": layers * self.channels * self.window * self.activation_bytes,
        }
        self.slot_bytes = sum(self.slot.values())
        self.kv_bytes_per_token = self._kv_bytes_per_token()
        self.weights_bytes = self._weights_bytes(self.tp)
        self.rest_bytes = self.static_bytes - self.weights_bytes

    def _kv_bytes_per_token(self) -> int:
        element = KV_DTYPES[self.server.kv_dtype] or self.activation_bytes
        heads = max(1, self.model.kv_heads // self.tp)  # SGLang copies what does not split
        # The KV cache of the model's own draft layer is allocated beside the budget: SGLang charges for it only where
        # --speculative-draft-model-path names a checkpoint.
        return heads * 2 * self.model.head_dim * self.model.attention_layers * element

    def fits_from(self) -> Optional[int]:
        """The fewest GPUs whose static memory holds the weights; None when no number that divides the key heads does."""
        return next((n for n in divisors(self.model.key_heads) if self._weights_bytes(n) < self.static_bytes), None)

    def _weights_bytes(self, tp: int) -> int:
        server, model = self.server, self.model
        if server.weights_gib is not None:
            return int(server.weights_gib * GIB)
        dtype = model.weights_dtype or self.dtype if server.weights_dtype == "auto" else server.weights_dtype
        if dtype not in BYTES:
            raise refuse(
                "--weights-dtype", "auto, and the model's quantisation is not one that says it", ", ".join(BYTES)
            )
        parameters = model.parameters
        if server.algorithm == "NEXTN":
            # The draft loads an embedding and a head before it shares the target's, and SGLang measures in between.
            parameters += model.mtp_parameters + model.embeddings
        return int(parameters * BYTES[dtype]) // tp

    def parts(self, method: str, draft: Draft) -> dict[str, int]:
        """Bytes that the draft's states of one running request take, by kind."""
        layers, nodes = self.model.linear_layers, draft.nodes
        # SGLang lets the windows of a chain overlap on CUDA; NGRAM drafts are trees to it.
        overlapping = self.server.device == "cuda" and draft.topk == 1 and self.server.algorithm != "NGRAM"
        windows = layers * self.channels * conv_window_columns(nodes, self.window, overlapping) * self.activation_bytes
        if method == "snapshot":
            return {"states": nodes * self.slot["state"], "conv windows": windows}
        if method == "replayssm":
            slots, heads = self.server.slots_per_request, self.value_heads
            ring = {
                "raw v": heads * self.model.value_dim * self.activation_bytes,
                "raw k": self.key_heads * self.model.key_dim * self.activation_bytes,
                "beta": heads * 4,
                "gates": heads * 4,
            }
            # Every state slot has a ring, those of cached prefixes too.
            return {**{k: slots * layers * nodes * v for k, v in ring.items()}, "conv windows": windows}
        return stash_row_bytes(
            activation_bytes=self.activation_bytes, layers=layers, nodes=nodes, key_heads=self.key_heads,
            value_heads=self.value_heads, key_dim=self.model.key_dim, value_dim=self.model.value_dim,
            conv_dim=self.channels,
        )  # fmt: skip

    def unserved(self, method: str, draft: Draft) -> Optional[str]:
        if method == "replayssm" and (draft.topk > 1 or self.server.algorithm == "NGRAM"):
            return "chains only"
        return None

    def reserve(self, draft: Draft) -> int:
        """Tokens of KV cache that SGLang allocates ahead of a running request: the next drafts, twice."""
        nodes = max(draft.nodes, (draft.steps or 0) * draft.topk)
        return 2 * (max(nodes, NGRAM_BREADTH) if self.server.algorithm == "NGRAM" else nodes)

    def fit(self, method: str, draft: Draft, free: bool = False) -> Fit:
        """`free`: as if the draft's states took no memory, which is what the widest draft is measured against."""
        server, ratio, nodes = self.server, self.server.slots_per_request, draft.nodes
        parts = self.parts(method, draft)
        reason = self.unserved(method, draft)
        if reason is not None:
            return Fit(method, nodes, {}, 0, 0, 0, 0, 0, "method", None, reason)

        per_slot = sum(v for k, v in parts.items() if k != "conv windows") // ratio if method == "replayssm" else 0
        row = {"snapshot": nodes * self.slot_bytes, "replayssm": 0, "treewy": sum(parts.values())}[method]
        charged = row + ratio * per_slot
        if free:
            row = per_slot = 0
        budget = self.rest_bytes * server.mamba_full_memory_ratio / (1 + server.mamba_full_memory_ratio)
        slot = self.slot_bytes + per_slot
        if self.rest_bytes <= 0:
            return Fit(method, nodes, parts, charged, 0, 0, 0, 0, "weights")
        raised_from = None
        if server.max_mamba_cache_size is not None:
            slots = server.max_mamba_cache_size
        elif server.disable_radix_cache:
            slots = server.requests
        elif method == "snapshot" and not free:
            slots = snapshot_slots_within(budget, slot_bytes=slot, nodes=nodes, slots_per_request=ratio)
        else:
            costs = dict(
                slot_bytes=slot, row_bytes=row, slots_per_request=ratio, requested=server.requests, rows=lambda n: n
            )
            slots = slots_within(int(budget), **costs)
            if method == "treewy" and server.mamba_full_memory_ratio == Server.mamba_full_memory_ratio:
                request_tokens = server.context_length + (0 if free else self.reserve(draft))
                raised = slots_beside_contexts(
                    self.rest_bytes, least=slots, token_bytes=self.kv_bytes_per_token, request_tokens=request_tokens,
                    **costs,
                )  # fmt: skip
                slots, raised_from = raised, slots if raised > slots else None
        rows = min(server.requests, slots // ratio)
        # SGLang's snapshots have a padding row, as the slots have.
        used = (slots + 1) * slot + (rows + (method == "snapshot")) * row
        tokens = max(0, (self.rest_bytes - used) // self.kv_bytes_per_token) if self.kv_bytes_per_token else 1 << 62
        max_running = min(rows, tokens // 2)
        running = min(max_running, tokens // server.context_length)
        if running == server.requests:
            limit = "requests"
        else:
            limit = "kv" if running < slots // ratio else "state" if raised_from is None else "both"
        return Fit(
            method, nodes, parts, charged, running, max_running, slots, tokens, limit, raised_from=raised_from
        )

    def widest(self, method: str, draft: Draft) -> Optional[int]:
        """The largest number of nodes before the one that first costs a request; None where nothing runs anyway."""
        best = self.fit(method, draft, free=True).running
        if best == 0 or self.unserved(method, draft) is not None:
            return None
        nodes = 0
        while nodes < MAX_NODES and self.fit(method, draft.with_nodes(nodes + 1)).running >= best:
            nodes += 1
        return nodes


def check_shape(model: Model, tp: int) -> None:
    """Refuse what --enable-treewy refuses at start for the shape of the Gated DeltaNet layers."""
    where = f"--model {model.name}:"
    if model.linear_layers < 1:
        raise PlanError(f"{where} the Gated DeltaNet layers are {model.linear_layers}; allowed: 1 or more")
    if model.key_dim != model.value_dim or model.key_dim not in HEAD_DIMS:
        raise PlanError(
            f"{where} head dimensions are K={model.key_dim}, V={model.value_dim}; allowed: equal, one of 64, 128, 256"
        )
    if model.value_heads % model.key_heads:
        raise PlanError(
            f"{where} linear_num_value_heads is {model.value_heads}; allowed: a multiple of {model.key_heads}"
        )
    if model.conv_width not in CONV_WIDTHS:
        raise PlanError(f"{where} linear_conv_kernel_dim is {model.conv_width}; allowed: 2, 3, 4")
    if model.key_heads % tp:
        allowed = ", ".join(map(str, divisors(model.key_heads)))
        raise refuse("--tp", tp, f"{allowed}, which divide {model.key_heads} key heads")


def plan(model: Model, draft: Draft, server: Server = Server()) -> Plan:
    """Raises PlanError for what no server could be started with."""
    sizes = Sizes(model, server)
    if server.algorithm == "NEXTN" and draft.nodes > 1 and not model.mtp_layers:
        raise refuse("--algorithm", "NEXTN, and the model has no MTP layers", "NGRAM")
    fits = {m: dataclasses.replace(sizes.fit(m, draft), widest=sizes.widest(m, draft)) for m in METHODS}
    return Plan(
        model, server, draft, sizes.state_dtype, sizes.dtype, sizes.tp, sizes.slot, sizes.kv_bytes_per_token,
        sizes.weights_bytes, sizes.rest_bytes, fits,
    )  # fmt: skip
