"""Tree helpers and the host-side checks of the compiled module."""

import random

import pytest

import treewy_sglang
from treewy_sglang import tree


@pytest.mark.parametrize("T", [1, 2, 3, 5, 16, 128])
@pytest.mark.parametrize("shape", tree.SHAPES)
def test_shapes_are_trees(shape, T):
    parents = tree.SHAPES[shape](T, random.Random(T))
    assert len(parents) == T and tree.check_parents(parents) == parents
    if shape != "forest":
        assert parents.count(-1) == 1


def test_named_shapes():
    assert tree.chain(4) == [-1, 0, 1, 2]
    assert tree.star(4) == [-1, 0, 0, 0]
    assert tree.caterpillar(6) == [-1, 0, 0, 2, 2, 4]
    assert tree.top_k_tree(9, 4, 0)[:5] == [-1, 0, 0, 0, 0]


def test_ancestors():
    parents = [-1, 0, 0, 1, 3, -1]
    assert tree.ancestor_path(parents, 4) == [0, 1, 3, 4]
    assert tree.ancestor_words(parents) == [[1], [3], [5], [11], [27], [32]]
    assert tree.ancestor_words(tree.path(33))[32] == [-1, 1]


def test_links():
    assert tree.links_from_parents([-1, 0, 0, 1, 1]) == ([1, 3, -1, -1, -1], [-1, 2, -1, 4, -1])


@pytest.mark.parametrize(
    "parents,message",
    [
        ([0], r"parents\[0\] is 0; allowed: -1"),
        ([-1, 1], r"parents\[1\] is 1; allowed: -1 to 0"),
        ([-1, 0, -2], r"parents\[2\] is -2; allowed: -1 to 1"),
        ([], "0 nodes; allowed: 1 to 128"),
        ([-1] * 129, "129 nodes; allowed: 1 to 128"),
    ],
)
def test_bad_parents(parents, message):
    with pytest.raises(ValueError, match=message):
        tree.check_parents(parents)


def test_bad_links_name_the_entry():
    with pytest.raises(ValueError, match=r"next_token\[1\] is 7; allowed: -1 \(none\) to 2"):
        tree.parents_from_links([1, 7, -1], [-1, -1, -1])
    with pytest.raises(ValueError, match=r"next_token\[1\] is 2, a node that is a child of node 0 already"):
        tree.parents_from_links([1, 2, -1], [-1, 2, -1])
    with pytest.raises(ValueError, match=r"next_sibling\[2\] is 1, a child of node 1; allowed: more than its parent"):
        tree.parents_from_links([-1, 2, -1], [-1, -1, 1])
    with pytest.raises(ValueError, match="'next_sibling': 1 entries; allowed: 2"):
        tree.parents_from_links([1, -1], [-1])


def test_build_info():
    info = treewy_sglang.build_info()
    assert info["version"] == treewy_sglang.__version__
    assert info["max_nodes"] == 128 and info["max_conv_width"] == 4
    assert isinstance(info["cuda"], bool) and info["cuda"] == bool(info["architectures"])
    assert info["cpu_isa"] in ("baseline", "avx2", "avx512")
    assert info["git_commit"] and info["torch_version"] and info["compiler"]
