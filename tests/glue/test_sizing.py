"""The split of a memory budget between state slots and stash rows."""

import pytest

from treewy_sglang.sglang.sizing import Plan, cap_warning, slots_within, start_line

MIB = 1 << 20
GIB = 1 << 30


def split(budget, **changes):
    values = dict(slot_bytes=60 * MIB, row_bytes=4 * MIB, slots_per_request=3, requested=48, rows=lambda n: n)
    return slots_within(budget, **{**values, **changes})


def cost(slots, slot_bytes=60 * MIB, row_bytes=4 * MIB, slots_per_request=3, requested=48, rows=lambda n: n):
    return (slots + 1) * slot_bytes + rows(min(requested, slots // slots_per_request)) * row_bytes


@pytest.mark.parametrize("budget_gib", [0.1, 1, 3, 9.7, 40])
@pytest.mark.parametrize("row_mib", [1, 4, 70])
@pytest.mark.parametrize("ratio", [1, 3, 5])
@pytest.mark.parametrize("requested", [1, 48, 1000])
def test_it_is_the_most_that_fits(budget_gib, row_mib, ratio, requested):
    budget = int(budget_gib * GIB)
    same = dict(row_bytes=row_mib * MIB, slots_per_request=ratio, requested=requested)
    slots = split(budget, **same)
    assert slots == 0 or cost(slots, **same) <= budget
    assert cost(slots + 1, **same) > budget


def test_stash_rows_stop_at_the_running_requests_asked_for():
    budget = 40 * GIB
    slots = split(budget, requested=8)
    assert slots == (budget - 8 * 4 * MIB) // (60 * MIB) - 1


def test_rows_include_padding():
    padded = lambda n: -(-n // 8) * 8  # noqa: E731
    assert split(GIB, rows=padded) <= split(GIB)
    assert cost(split(GIB, rows=padded), rows=padded) <= GIB


def test_no_slot_fits():
    assert split(10 * MIB) == 0


@pytest.mark.parametrize("nodes, share", [(4, 0.97), (16, 0.90), (64, 0.70)])
def test_state_slots_of_qwen3_5_35b_beside_a_budget_without_scratch(nodes, share):
    """Qwen3.5-35B-A3B in bfloat16 with float32 states: 30 GDN layers, H=16, HV=32, K=V=128."""
    from treewy_sglang import Stash
    import torch

    layers, h, hv, dim = 30, 16, 32, 128
    channels = 2 * h * dim + hv * dim
    slot = layers * (hv * dim * dim * 4 + channels * 3 * 2)
    row = Stash.bytes_per_row(
        layers=layers, nodes=nodes, key_heads=h, value_heads=hv, key_dim=dim, value_dim=dim, conv_dim=channels,
        activation_dtype=torch.bfloat16,
    )  # fmt: skip
    same = dict(slot_bytes=slot, slots_per_request=3, requested=48)
    without_scratch = split(8 * GIB, row_bytes=0, **same)
    assert split(8 * GIB, row_bytes=row, **same) >= share * without_scratch


def plan(**changes):
    values = dict(
        slot_bytes=60 * MIB,
        row_bytes=4 * MIB,
        snapshot_bytes=960 * MIB,
        slots_per_request=3,
        requested=48,
        slots=100,
        rows=33,
        snapshot_slots=20,
    )
    return Plan(**{**values, **changes})


def test_start_line_says_before_and_after():
    line = start_line(plan(), nodes=16, running=33)
    for words in ("16 nodes", "4.00 MiB", "960.00 MiB", "100 state slots", "snapshots: 20", "33", "snapshots: 6"):
        assert words in line, line
    assert "\n" not in line


def test_warning_names_the_cause_and_the_options_that_raise_it():
    assert cap_warning(plan(slots=144), running=48) is None
    words = cap_warning(plan(), running=33)
    assert "33 of the 48" in words and "100 state slots" in words and "--mamba-full-memory-ratio" in words
    words = cap_warning(plan(slots=1000), running=20)
    assert "KV cache" in words and "--mem-fraction-static" in words
