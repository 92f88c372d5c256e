"""Attention over a paged pool against float64 loops."""

import random

import pytest
import torch

from treewy_sglang.sglang.cpu import paged, speculation


def truth(q, k_cache, v_cache, seen, scaling):
    """One query [HQ, D] over the slots it sees, float64."""
    heads, group = q.shape[0], q.shape[0] // k_cache.shape[1]
    out = []
    for h in range(heads):
        key, value = k_cache[seen, h // group].double(), v_cache[seen, h // group].double()
        weight = (key @ q[h].double() * scaling).softmax(0)
        out.append(weight @ value)
    return torch.stack(out)


class Pool:
    def __init__(self, seed=0, slots=120, HK=2, D=32, DV=32, dtype=torch.float32):
        generator = torch.Generator().manual_seed(seed)
        self.k = torch.randn(slots, HK, D, generator=generator).to(dtype)
        self.v = torch.randn(slots, HK, DV, generator=generator).to(dtype)
        self.free = torch.randperm(slots, generator=generator).tolist()
        self.table = torch.zeros(6, 40, dtype=torch.int32)
        self.generator = generator

    def request(self, row, length):
        slots = [self.free.pop() for _ in range(length)]
        self.table[row, :length] = torch.tensor(slots, dtype=torch.int32)
        return slots


def check(out, expected, dtype=torch.float32):
    tolerance = dict(rtol=2e-6, atol=2e-6) if dtype is torch.float32 else dict(rtol=8e-3, atol=8e-3)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), torch.stack(expected), **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode(dtype):
    pool = Pool(dtype=dtype)
    pool.table[2, 5:] = 10**6  # rows are longer than their text; the rest may hold anything
    rows = {2: pool.request(2, 5), 0: pool.request(0, 1), 4: pool.request(4, 17)}
    q = torch.randn(3, 6, 32, generator=pool.generator).to(dtype)
    plan = paged.make_plan(pool.table, torch.tensor([2, 0, 4]), torch.tensor([5, 1, 17], dtype=torch.int32))
    out = paged.attend(q, pool.k, pool.v, plan, 0.2)
    check(out, [truth(q[i], pool.k, pool.v, rows[r], 0.2) for i, r in enumerate((2, 0, 4))], dtype)


def test_tree_verification():
    rng = random.Random(1)
    nodes, pool = 9, Pool(DV=16)
    lengths = [5, 0, 12]
    text = [pool.request(r, n) for r, n in enumerate(lengths)]
    extra = [[pool.free.pop() for _ in range(nodes)] for _ in lengths]
    parents = torch.tensor([[-1] + [rng.randrange(t) for t in range(1, nodes)] for _ in lengths])
    mask = speculation.ancestor_mask(parents)
    q = torch.randn(3 * nodes, 4, 32, generator=pool.generator)
    visible = paged.tree_visible(mask.flatten(), 3, nodes)
    plan = paged.make_plan(pool.table, torch.arange(3), torch.tensor(lengths), torch.tensor(extra), visible)
    out = paged.attend(q, pool.k, pool.v, plan, 0.3)
    expected = []
    for r in range(3):
        for t in range(nodes):
            seen = text[r] + [extra[r][j] for j in range(nodes) if mask[r, t, j]]
            expected.append(truth(q[r * nodes + t], pool.k, pool.v, seen, 0.3))
    check(out, expected)


def test_chain_needs_no_mask():
    assert torch.equal(paged.tree_visible(None, 2, 4), torch.ones(1, 4, 4).tril().bool())
    assert torch.equal(paged.tree_visible(torch.empty(0), 2, 4), torch.ones(1, 4, 4).tril().bool())
    with pytest.raises(ValueError, match="17 elements; 2 requests with 4 nodes need 32"):
        paged.tree_visible(torch.ones(17), 2, 4)


@pytest.mark.parametrize("branches, steps", [(1, 1), (4, 1), (3, 4)])
def test_branches_of_a_draft(branches, steps):
    pool = Pool()
    text = [pool.request(0, 3), pool.request(1, 8)]
    drafts = torch.tensor([[[pool.free.pop() for _ in range(steps)] for _ in range(branches)] for _ in range(2)])
    q = torch.randn(2 * branches, 2, 32, generator=pool.generator)
    plan = paged.make_plan(
        pool.table, torch.arange(2), torch.tensor([3, 8]), drafts.reshape(2, -1), paged.branch_visible(branches, steps)
    )
    out = paged.attend(q, pool.k, pool.v, plan, 1.0)
    expected = [
        truth(q[r * branches + b], pool.k, pool.v, text[r] + drafts[r, b].tolist(), 1.0)
        for r in range(2)
        for b in range(branches)
    ]
    check(out, expected)
