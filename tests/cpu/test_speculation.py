"""Draft trees, token and slot helpers on CPU against plain Python."""

import random

import pytest
import torch

from treewy_sglang.sglang.cpu import sampling, speculation


def random_parents(nodes, rng):
    return [-1] + [rng.randrange(t) for t in range(1, nodes)]


def chain(nodes):
    return [t - 1 for t in range(nodes)]


def star(nodes):
    return [-1] + [0] * (nodes - 1)


SHAPES = {
    "one": lambda rng: [-1],
    "chain": lambda rng: chain(6),
    "star": lambda rng: star(9),
    "random": lambda rng: random_parents(17, rng),
    "large": lambda rng: random_parents(64, rng),
}


def plain_mask(parents):
    rows = []
    for t in range(len(parents)):
        row, at = [False] * len(parents), t
        while at >= 0:
            row[at] = True
            at = parents[at]
        rows.append(row)
    return torch.tensor(rows)


def plain_links(parents):
    nodes = len(parents)
    children = [[c for c in range(nodes) if parents[c] == p] for p in range(nodes)]
    first = [c[0] if c else -1 for c in children]
    sibling = [-1] * nodes
    for c in children:
        for left, right in zip(c, c[1:]):
            sibling[left] = right
    return first, sibling


@pytest.mark.parametrize("shape", SHAPES)
def test_three_spellings_of_a_tree(shape):
    rng = random.Random(5)
    trees = [SHAPES[shape](rng) for _ in range(3)]
    parents = torch.tensor(trees)
    mask = speculation.ancestor_mask(parents)
    first, sibling = speculation.links_from_parents(parents)
    for row, tree in enumerate(trees):
        assert torch.equal(mask[row], plain_mask(tree))
        assert (first[row].tolist(), sibling[row].tolist()) == plain_links(tree)
    assert torch.equal(speculation.parents_from_mask(mask), parents)


def eagle_selection(topk, depth, nodes, rng):
    """Candidates as EAGLE numbers them, a random ancestor-closed pick of them, and the parents that this means."""
    # level 0: candidates 0..topk-1 below the root; level d: topk chosen nodes of level d-1 with topk children each
    origin = {c: None for c in range(topk)}  # candidate -> candidate it hangs off
    parent_list, level = [-1], list(range(topk))
    count = topk
    for _ in range(1, depth):
        chosen = rng.sample(level, topk) if len(level) >= topk else level
        parent_list += chosen
        level = []
        for c in chosen:
            for _ in range(topk):
                origin[count] = c
                level.append(count)
                count += 1
    picked = set()
    while len(picked) < nodes - 1:
        ready = [c for c in origin if c not in picked and (origin[c] is None or origin[c] in picked)]
        picked.add(rng.choice(ready))
    picked = sorted(picked)
    parents = [-1] + [0 if origin[c] is None else picked.index(origin[c]) + 1 for c in picked]
    return parent_list, picked, parents


@pytest.mark.parametrize("mode", [speculation.FULL_MASK, speculation.QLEN_ONLY, speculation.QLEN_ONLY_BITPACKING])
@pytest.mark.parametrize("topk, depth, nodes", [(4, 4, 16), (8, 6, 64), (2, 1, 3), (1, 3, 4)])
def test_build_tree(mode, topk, depth, nodes):
    if mode == speculation.QLEN_ONLY_BITPACKING:
        topk, nodes = min(topk, 4), min(nodes, 32)  # a word has that many bits
    rng = random.Random(topk * 100 + nodes)
    made = [eagle_selection(topk, depth, nodes, rng) for _ in range(3)]
    width = max(len(m[0]) for m in made)
    parent_list = torch.tensor([m[0] + [-1] * (width - len(m[0])) for m in made])
    selected = torch.tensor([m[1] for m in made])
    lengths = torch.tensor([7, 1, 30])
    if mode == speculation.FULL_MASK:
        mask = torch.ones(int((lengths + nodes).sum()) * nodes, dtype=torch.bool)
    elif mode == speculation.QLEN_ONLY:
        mask = torch.ones(3 * nodes * nodes, dtype=torch.bool)
    else:
        mask = torch.zeros(3 * nodes, dtype=torch.int64)
    index, child, sibling = (torch.full((3, nodes), -9) for _ in range(3))
    positions = torch.full((3 * nodes,), -9)
    speculation.build_tree(
        parent_list, selected, lengths, mask, positions, index, child, sibling, topk, depth, nodes, mode
    )
    start = 0
    for row, (_, _, parents) in enumerate(made):
        truth = plain_mask(parents)
        assert positions.view(3, nodes)[row].tolist() == (truth.sum(1) - 1 + lengths[row]).tolist()
        assert (child[row].tolist(), sibling[row].tolist()) == plain_links(parents)
        if mode == speculation.FULL_MASK:
            length = int(lengths[row])
            block = mask[start : start + nodes * (length + nodes)].view(nodes, -1)
            assert bool(block[:, :length].all()) and torch.equal(block[:, length:], truth)
            start += block.numel()
        elif mode == speculation.QLEN_ONLY:
            assert torch.equal(mask.view(3, nodes, nodes)[row], truth)
        else:
            bits = (mask.view(3, nodes)[row][:, None] >> torch.arange(nodes)) & 1
            assert torch.equal(bits.bool(), truth)
    assert torch.equal(index, torch.arange(3 * nodes).view(3, nodes))


def test_build_tree_refuses_an_unknown_mode():
    with pytest.raises(ValueError, match="tree_mask_mode is 7"):
        one = torch.zeros(1, 1, dtype=torch.int64)
        speculation.build_tree(
            one, one, torch.tensor([3]), torch.ones(4), torch.zeros(2), torch.zeros(1, 2), torch.zeros(1, 2),
            torch.zeros(1, 2), 1, 1, 2, 7,
        )  # fmt: skip


def test_reconstruct_tree():
    rng = random.Random(0)
    trees = [random_parents(12, rng), chain(12)]
    mask = torch.stack([plain_mask(t) for t in trees])
    lengths = torch.tensor([3, 9], dtype=torch.int32)
    positions = torch.empty(24, dtype=torch.int64)
    index, child, sibling = (torch.empty(2, 12, dtype=torch.int64) for _ in range(3))
    speculation.reconstruct_tree(mask.flatten(), lengths, positions, index, child, sibling, 2, 12)
    for row, tree in enumerate(trees):
        assert (child[row].tolist(), sibling[row].tolist()) == plain_links(tree)
        assert positions.view(2, 12)[row].tolist() == (mask[row].sum(1) - 1 + lengths[row]).tolist()
    assert torch.equal(index, torch.arange(24).view(2, 12))


def links(trees):
    found = [plain_links(t) for t in trees]
    return torch.tensor([f[0] for f in found]), torch.tensor([f[1] for f in found])


def run_verify(trees, tokens, wanted, depth):
    rows, nodes = tokens.shape
    child, sibling = links(trees)
    predicts = torch.full((rows * nodes,), -5, dtype=torch.int32)
    accept = torch.full((rows, depth), -1, dtype=torch.int32)
    count = torch.full((rows,), -5, dtype=torch.int32)
    index = torch.arange(rows * nodes).view(rows, nodes)
    speculation.verify_greedy(predicts, accept, count, tokens, index, child, sibling, wanted)
    return predicts, accept, count


def test_verify_follows_the_path_that_is_not_a_prefix():
    # 0 -> 1, 2, 3; 2 -> 4, 5; 5 -> 6
    tree = [-1, 0, 0, 0, 2, 2, 5]
    tokens = torch.tensor([[9, 10, 11, 12, 13, 14, 15]])
    wanted = torch.tensor([[11, 0, 14, 0, 0, 15, 77]])
    predicts, accept, count = run_verify([tree], tokens, wanted, 5)
    assert accept.tolist() == [[0, 2, 5, 6, -1]]
    assert count.tolist() == [3]
    assert [predicts[i].item() for i in (0, 2, 5, 6)] == [11, 14, 15, 77]
    assert predicts[1] == -5


def test_verify_takes_only_the_root_and_stops_at_the_width():
    tokens = torch.tensor([[9, 1, 2, 3], [9, 1, 2, 3]])
    wanted = torch.tensor([[5, 0, 0, 0], [1, 2, 3, 4]])
    predicts, accept, count = run_verify([chain(4), chain(4)], tokens, wanted, 3)
    assert accept.tolist() == [[0, -1, -1], [4, 5, 6]]
    assert count.tolist() == [0, 2]
    assert predicts.tolist() == [5, -5, -5, -5, 1, 2, 3, -5]


def test_token_and_slot_helpers():
    bonus = torch.empty(3, dtype=torch.int32)
    speculation.fill_bonus_tokens(torch.arange(12), torch.tensor([1, 4, 2], dtype=torch.int32), bonus, 4)
    assert bonus.tolist() == [0, 7, 9]

    packed = torch.full((6,), -1)
    speculation.fill_accept_out_cache_loc(
        torch.tensor([[0, 2, -1], [4, -1, -1]], dtype=torch.int32), torch.arange(100, 106), packed
    )
    assert packed.tolist() == [100, 102, 104, -1, -1, -1]

    table = torch.zeros(4, 10, dtype=torch.int32)
    requests = torch.tensor([3, 1, 0])
    start, end = torch.tensor([2, 0, 5], dtype=torch.int32), torch.tensor([5, 0, 6], dtype=torch.int32)
    speculation.assign_req_to_token_pool(requests, table, start, end, torch.tensor([11, 12, 13, 14]), 10)
    assert table[3].tolist() == [0, 0, 11, 12, 13, 0, 0, 0, 0, 0]
    assert table[0, 5] == 14 and int(table.sum()) == 50

    back = torch.full((5,), -1)
    speculation.assign_extend_cache_locs(requests, table, start, end, back, 10)
    assert back.tolist() == [11, 12, 13, 14, -1]

    table = torch.arange(40, dtype=torch.int32).view(4, 10)
    out = torch.empty(8, dtype=torch.int64)
    speculation.assign_draft_cache_locs_contiguous(torch.tensor([2, 0]), table, torch.tensor([1, 4]), out, 10, 2, 2)
    assert out.tolist() == [21, 22, 23, 24, 4, 5, 6, 7]


def test_sampling_renormalises():
    probs = torch.tensor([[0.1, 0.4, 0.3, 0.2], [0.25, 0.25, 0.25, 0.25]])
    kept = sampling.top_k_renorm(probs, torch.tensor([2, 1]))
    torch.testing.assert_close(kept, torch.tensor([[0, 4 / 7, 3 / 7, 0], [1.0, 0, 0, 0]]))
    kept = sampling.top_p_renorm(probs, torch.tensor([0.65, 0.5]))
    torch.testing.assert_close(kept, torch.tensor([[0, 4 / 7, 3 / 7, 0], [0.5, 0.5, 0, 0]]))
    assert torch.equal(sampling.top_p_renorm(probs, 1e-9)[0], torch.tensor([0.0, 1, 0, 0]))
    assert torch.equal(sampling.top_k_renorm(probs, 9), probs)


def test_tree_sampling_gives_the_target_distribution():
    """Over a grid of coins, the first and second emitted tokens are distributed as the target says, whatever the draft."""
    tree = [-1, 0, 0, 1]  # the root drafts tokens 2 and 0; below token 2 stands token 1
    tokens = torch.tensor([[3, 2, 0, 1]])
    target = torch.tensor([[[0.30, 0.25, 0.20, 0.25], [0.1, 0.6, 0.2, 0.1], [0.25, 0.25, 0.25, 0.25], [0.0, 0.5, 0.5, 0.0]]])
    child, sibling = links([tree])
    steps = 40
    first, second = torch.zeros(4), torch.zeros(4)
    grid = [(i + 0.5) / steps for i in range(steps)]
    for c0 in grid:
        for c1 in grid:
            for last in grid:
                predicts = torch.full((4,), -1, dtype=torch.int32)
                accept = torch.full((1, 3), -1, dtype=torch.int32)
                count = torch.zeros(1, dtype=torch.int32)
                coins = torch.tensor([[c0, c1, 0.5, 0.5]])
                sampling.tree_sample(
                    predicts, accept, count, tokens, torch.arange(4).view(1, 4), child, sibling, coins,
                    torch.tensor([last]), target, torch.zeros_like(target),
                )  # fmt: skip
                first[predicts[0]] += 1
                if count[0] >= 1 and accept[0, 1] == 1:
                    second[predicts[1]] += 1
    torch.testing.assert_close(first / first.sum(), target[0, 0], atol=0.02, rtol=0)
    torch.testing.assert_close(second / second.sum(), target[0, 1], atol=0.02, rtol=0)


def test_tree_sampling_with_one_hot_targets_is_greedy():
    rng = random.Random(2)
    trees = [random_parents(16, rng) for _ in range(4)]
    tokens = torch.tensor([[rng.randrange(5) for _ in range(16)] for _ in trees])
    wanted = torch.tensor([[rng.randrange(5) for _ in range(16)] for _ in trees])
    greedy = run_verify(trees, tokens, wanted, 6)
    child, sibling = links(trees)
    predicts, accept, count = torch.full_like(greedy[0], -5), torch.full_like(greedy[1], -1), torch.full_like(greedy[2], -5)
    target = torch.nn.functional.one_hot(wanted, 5).float()
    sampling.tree_sample(
        predicts, accept, count, tokens, torch.arange(64).view(4, 16), child, sibling, torch.rand(4, 16),
        torch.rand(4), target, torch.zeros_like(target),
    )  # fmt: skip
    assert torch.equal(accept, greedy[1]) and torch.equal(count, greedy[2]) and torch.equal(predicts, greedy[0])
