"""The split of a memory budget between state slots and stash rows."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treewy_sglang.sglang.sizing import Plan, cap_warning, raised_line, start_line
from treewy_sglang.sizes import slots_beside_contexts, slots_within

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


memories = st.fixed_dictionaries(
    dict(
        memory=st.integers(0, GIB) | st.integers(8 * GIB, 64 * GIB),
        share=st.floats(0, 0.7),
        slot_bytes=st.integers(MIB, 200 * MIB),
        row_bytes=st.integers(MIB // 16, 80 * MIB),
        slots_per_request=st.sampled_from([1, 3, 4, 5]),
        requested=st.integers(1, 30) | st.integers(100, 400),
        padding=st.sampled_from([1, 8]),
        token_bytes=st.sampled_from([0, 512, 22528, 131072]),
        request_tokens=st.integers(64, 8192) | st.integers(8192, 300_000),
        most_tokens=st.none() | st.integers(1000, 10_000_000),
    )
)


@settings(max_examples=400, deadline=None)
@given(memories)
def test_slots_beside_full_contexts(given_):
    """At least the split's slots; beyond these only whole requests that fit with their contexts, and as many as do."""
    sizes = dict(given_)
    memory, share, padding = sizes.pop("memory"), sizes.pop("share"), sizes.pop("padding")
    rows = lambda n: -(-n // padding) * padding  # noqa: E731
    ratio, requested = sizes["slots_per_request"], sizes["requested"]
    split_only = {k: sizes[k] for k in ("slot_bytes", "row_bytes", "slots_per_request", "requested")}
    least = slots_within(int(memory * share), **split_only, rows=rows)
    slots = slots_beside_contexts(memory, least=least, **sizes, rows=rows)

    def takes(running):
        tokens = min(running * sizes["request_tokens"], sizes["most_tokens"] or 1 << 60)
        return (running * ratio + 1) * sizes["slot_bytes"] + rows(running) * sizes["row_bytes"] + tokens * sizes["token_bytes"]

    assert slots >= least
    if slots > least:
        assert slots % ratio == 0 and slots // ratio <= requested and takes(slots // ratio) <= memory
    # Tried one by one, without the search's own assumption that more requests never take less.
    more = range(slots // ratio + 1, requested + 1)
    assert all(takes(n) > memory for n in more)


def raised(**changes):
    """35B, chain of 4, about 24 GiB: the split gives 184 slots, 36 requests."""
    values = dict(
        memory=24 * GIB, least=184, slot_bytes=64389120, row_bytes=4446720, slots_per_request=5, requested=256,
        rows=lambda n: n, token_bytes=22528, request_tokens=4104,
    )  # fmt: skip
    values.update(changes)
    return slots_beside_contexts(values.pop("memory"), **values)


def test_slots_are_raised_up_to_the_requests_asked_for():
    assert raised() == 61 * 5
    assert raised(requested=40) == 40 * 5
    assert raised(requested=36) == raised(requested=1) == 184
    assert raised(most_tokens=50_000) > raised() == raised(most_tokens=10_000_000)


def test_long_contexts_change_nothing():
    assert raised(request_tokens=262152) == 184
    assert raised(request_tokens=30_000) == 184  # fewer contexts than 36 fit: nothing to gain, and nothing is taken away


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
        default_slots=100,
        ratio=0.9,
        rest_bytes=20 * GIB,
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


def test_the_line_about_raised_slots():
    assert raised_line(plan()) is None
    assert raised_line(plan(context_tokens=4104)) is None
    words = raised_line(plan(slots=120, rows=40, context_tokens=4104))
    for expected in ("from 100 to 120", "40 running requests instead of 33", f"{40 * 4104} tokens", "--mamba-full-memory-ratio", "0.9"):
        assert expected in words, words
    assert "\n" not in words and "5000 tokens" in raised_line(plan(slots=120, context_tokens=4104, token_limit=5000))


def test_warning_after_slots_were_weighed_against_the_cache():
    balanced = plan(slots=120, rows=40, context_tokens=4104)
    words = cap_warning(balanced, running=40)
    for expected in (
        "40 of the 48", "120 state slots at 3 per running request", "41 contexts of 4104 tokens", "lower --context-length",
        "--max-mamba-cache-size above 120",
    ):  # fmt: skip
        assert expected in words, words
    # States take 121 * 60 + 40 * 4 = 7420 MiB: of 20 GiB, 0.57 times what is left; of 12000 MiB, 1.6201 times.
    assert "--mamba-full-memory-ratio above 0.9 " in words
    tight = plan(slots=120, rows=40, context_tokens=4104, rest_bytes=12000 * MIB)
    assert "--mamba-full-memory-ratio above 1.63 " in cap_warning(tight, running=40)
    limited = cap_warning(plan(slots=120, rows=40, context_tokens=4104, token_limit=100_000), running=40)
    assert "a KV cache of 100000 tokens" in limited and "lower --max-total-tokens" in limited and "--context-length" not in limited
    far = cap_warning(plan(slots=120, rows=40, context_tokens=4104, token_limit=10**6), running=40)
    assert "lower --context-length" in far


def test_warning_where_the_split_was_fixed_does_not_name_the_context():
    assert "--context-length" not in cap_warning(plan(), running=33)
    # Slots for 40 requests, and a KV cache for fewer.
    words = cap_warning(plan(slots=120, rows=40), running=33)
    assert "(the KV cache)" in words and "state slots" not in words
