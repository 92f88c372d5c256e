"""The proof at start: the self-test accepts working operators in every dtype and shape, and refuses any that are not."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")

from treewy_sglang import ops
from treewy_sglang.sglang import startup
from treewy_sglang.sglang.config import TreeWYRefused

SMALL = dict(
    device="cpu", key_heads=2, value_heads=4, dim=64, conv_width=4, dtype=torch.float32, state_dtype=torch.float32
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("state_dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_working_operators_pass(dtype, state_dtype, dim):
    startup.self_test(**{**SMALL, "dtype": dtype, "state_dtype": state_dtype, "dim": dim})


@pytest.mark.parametrize("width", [2, 3, 4])
def test_bias_widths_and_gate_dtypes(width):
    startup.self_test(
        **{**SMALL, "dtype": torch.bfloat16, "conv_width": width},
        bias=True,
        a_log_dtype=torch.bfloat16,
        dt_bias_dtype=torch.bfloat16,
    )


def test_it_takes_less_than_a_second_in_the_shape_of_qwen3_next():
    seconds = startup.self_test(**{**SMALL, "key_heads": 16, "value_heads": 32, "dim": 128, "dtype": torch.bfloat16})
    assert seconds < 1.0


def test_a_commit_that_does_nothing_is_found(monkeypatch):
    monkeypatch.setattr(ops, "commit", lambda *args, **kwargs: None)
    with pytest.raises(TreeWYRefused, match="answer wrongly on cpu: state off by"):
        startup.self_test(**SMALL)


def test_a_leaking_sibling_is_found(monkeypatch):
    verify = ops.tree_conv_verify

    def leaking(*args):
        args = list(args)
        args[10] = args[10].clone()
        args[10][0, 2] = 1  # node 2 takes its sibling for its parent
        verify(*args)

    monkeypatch.setattr(ops, "tree_conv_verify", leaking)
    with pytest.raises(TreeWYRefused, match="outputs off by"):
        startup.self_test(**SMALL)


def test_outputs_that_are_not_numbers_are_found(monkeypatch):
    verify = ops.tree_conv_verify

    def broken(*args):
        verify(*args)
        args[11][3, 0, 0] = float("nan")

    monkeypatch.setattr(ops, "tree_conv_verify", broken)
    with pytest.raises(TreeWYRefused, match="outputs off by nan"):
        startup.self_test(**SMALL)


def test_a_missing_operator_is_named(monkeypatch):
    def missing(*args):
        raise NotImplementedError("treewy::tree_conv_verify was not built for CUDA")

    monkeypatch.setattr(ops, "tree_conv_verify", missing)
    with pytest.raises(TreeWYRefused, match="do not run on cpu here: treewy::tree_conv_verify was not built"):
        startup.self_test(**SMALL)


def test_a_shape_without_a_kernel_is_found_at_start():
    with pytest.raises(TreeWYRefused, match="do not run on cpu here: .*96"):
        startup.self_test(**{**SMALL, "dim": 96})


def test_another_pool_or_backend_is_refused(monkeypatch):
    runner = SimpleNamespace(req_to_token_pool=SimpleNamespace(mamba_pool=object()))
    with pytest.raises(TreeWYRefused, match="state pool is a object without a stash"):
        startup.prove(runner)
    from treewy_sglang.sglang.pool import TreeWYMambaPool

    pool = TreeWYMambaPool.__new__(TreeWYMambaPool)
    runner.req_to_token_pool.mamba_pool, runner.attn_backend = pool, object()
    with pytest.raises(TreeWYRefused, match="without a stash"):
        startup.prove(runner)
    pool.stash = object()
    with pytest.raises(TreeWYRefused, match="attention backend is a object, not TreeWY's"):
        startup.prove(runner)
    from treewy_sglang.sglang.backend import TreeWYHybridLinearAttnBackend

    backend = TreeWYHybridLinearAttnBackend.__new__(TreeWYHybridLinearAttnBackend)
    backend.linear_attn_backend, runner.attn_backend = object(), backend
    with pytest.raises(TreeWYRefused, match="linear attention backend is a object"):
        startup.prove(runner)
