"""parents_from_links, and the same on the host."""

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ops_common import storage

import treewy_sglang
from treewy_sglang import ops, tree
from treewy_sglang.testing import assert_same_bits, poison


def run(trees, device, dtype=torch.int64, with_sets=True):
    links = [tree.links_from_parents(t) for t in trees]
    T = len(trees[0])
    cut = lambda rows: torch.tensor(rows, dtype=dtype, device=device)
    wide = poison(torch.empty(len(trees), T + 5, dtype=torch.int32, device=device))
    parents = wide[:, 2 : T + 2]
    sets = poison(torch.empty(len(trees), T, (T + 31) // 32, dtype=torch.int32, device=device)) if with_sets else None
    ops.parents_from_links(cut([a for a, _ in links]), cut([b for _, b in links]), parents, sets)
    edges = torch.cat([wide[:, :2], wide[:, T + 2 :]], 1)
    assert_same_bits(edges, poison(edges.clone()), name="around parents")
    return parents, sets


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("T", [1, 2, 3, 4, 8, 9, 16, 17, 31, 32, 33, 64, 65, 127, 128])
def test_every_shape_and_size(device, T, dtype):
    rng = random.Random(T)
    trees = [make(T, rng) for make in tree.SHAPES.values()]
    parents, sets = run(trees, device, dtype)
    assert parents.tolist() == trees
    assert sets.tolist() == [tree.ancestor_words(t) for t in trees]
    parents, _ = run(trees, device, dtype, with_sets=False)
    assert parents.tolist() == trees


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_tree(device, data):
    T = data.draw(st.integers(1, 128), label="T")
    rng = random.Random(data.draw(st.integers(0, 10**6), label="seed"))
    trees = [tree.random_tree(T, rng, forest=data.draw(st.booleans())) for _ in range(2)]
    parents, sets = run(trees, device)
    assert parents.tolist() == trees
    assert sets.tolist() == [tree.ancestor_words(t) for t in trees]
    for t in trees:
        assert tree.parents_from_links(*tree.links_from_parents(t)) == t


def test_links_with_row_strides(device):
    trees = [tree.random_tree(7, 1), tree.random_tree(7, 2)]
    links = [tree.links_from_parents(t) for t in trees]
    big = torch.full((2, 2, 20), 99, device=device)
    big[0, :, 3:10] = torch.tensor([a for a, _ in links])
    big[1, :, 3:10] = torch.tensor([b for _, b in links])
    parents = torch.empty(2, 7, dtype=torch.int32, device=device)
    before = storage(big).clone()
    ops.parents_from_links(big[0, :, 3:10], big[1, :, 3:10], parents)
    assert parents.tolist() == trees
    assert_same_bits(storage(big), before, name="links")


BAD = {
    "child out of range": ([1, 9, -1, -1], [-1, -1, -1, -1]),
    "child below -1": ([1, -2, -1, -1], [-1, -1, -1, -1]),
    "sibling out of range": ([1, -1, -1, -1], [-1, 4, -1, -1]),
    "child is its parent": ([0, -1, -1, -1], [-1, -1, -1, -1]),
    "child before its parent": ([1, 2, 1, -1], [-1, -1, -1, -1]),
    "sibling before the parent": ([1, 2, -1, -1], [-1, -1, 1, -1]),
    "two parents": ([1, 2, -1, -1], [-1, 2, -1, -1]),
    "sibling loop": ([1, -1, -1, -1], [-1, 2, 1, -1]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_links_are_counted(device, name):
    """The bad row gets -1 everywhere and is counted once; the rows beside it are right."""
    good = tree.random_tree(4, 3)
    links = [tree.links_from_parents(good), BAD[name], tree.links_from_parents(good)]
    parents = poison(torch.empty(3, 4, dtype=torch.int32, device=device))
    sets = poison(torch.empty(3, 4, 1, dtype=torch.int32, device=device))
    as_tensor = lambda i: torch.tensor([link[i] for link in links], device=device)
    ops.parents_from_links(as_tensor(0), as_tensor(1), parents, sets)
    assert parents.tolist() == [good, [-1] * 4, good]
    assert sets[1].flatten().tolist() == [1, 2, 4, 8]
    assert treewy_sglang.check_errors(device)["link"] == 1
    with pytest.raises(ValueError, match="next_token|next_sibling"):
        tree.parents_from_links(*BAD[name])
