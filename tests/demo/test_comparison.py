"""What the demo calls the same answer, a near tie, and wrong."""

import pytest

from treewy_sglang.demo.command import NEAR_TIE, Answer, Result, table, verdict
from treewy_sglang.demo.server import CHAIN3, PLAIN


def answer(text, margins=None):
    return Answer(text, list(text) if margins else [], margins or [], len(text))


def results(plain, drafted):
    return Result(PLAIN, plain, 3, 1.0), Result(CHAIN3, drafted, 3, 1.0)


def test_float32_excuses_nothing():
    plain, drafted = results([answer("abc"), answer("abd")], [answer("abc"), answer("abc")])
    assert drafted.compare(plain, "float32") == (1, 0, 1)
    plain.answers[1].pieces, plain.answers[1].margins = list("abd"), [1.0, 1.0, 1e-7]
    drafted.answers[1].pieces = list("abc")
    assert drafted.compare(plain, "float32") == (1, 0, 1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("factor, expected", [(1.0, (0, 1, 0)), (1.01, (0, 0, 1))])
def test_a_near_tie_is_one_of_the_reference_at_the_first_difference(dtype, factor, expected):
    margin = NEAR_TIE[dtype] * factor
    plain, drafted = results([answer("abcd", [9.0, 9.0, margin, 0.0])], [answer("abxx", [0.0, 0.0, 0.0, 0.0])])
    assert drafted.compare(plain, dtype) == expected


def test_a_shorter_answer_is_wrong():
    plain, drafted = results([answer("abc", [0.0] * 3)], [answer("ab", [0.0] * 2)])
    assert drafted.compare(plain, "bfloat16") == (0, 0, 1)


def test_words_of_the_table():
    assert [verdict(7, 0, 0), verdict(6, 1, 0), verdict(5, 1, 1)] == ["yes (7/7)", "near ties (6/7)", "NO (5/7)"]
    plain, drafted = results([answer("abc")], [answer("abd")])
    assert "NO (0/1)" in table([plain, drafted], "float32") and "(reference)" in table([plain, drafted], "float32")
