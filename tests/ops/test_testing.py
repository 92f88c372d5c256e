"""The comparators reject what they must, and their messages say where."""

import pytest
import torch

from treewy_sglang.testing import (
    FACTOR, assert_same_bits, assert_within_yardstick, make_inputs, poison,
)  # fmt: skip

F32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture
def numbers():
    """truth, yardstick and a passing result of shape [request 4, node 8, head 500, v 16]."""
    g = torch.Generator().manual_seed(0)
    truth = torch.randn(4, 8, 500, 16, generator=g, dtype=torch.float64)
    noise = lambda: 1e-6 * torch.randn(truth.shape, generator=g, dtype=torch.float64)
    return truth, (truth + noise()).float(), (truth + noise()).float()


def judge(actual, truth, yardstick, dtype=F32, **kw):
    assert_within_yardstick(actual, truth, yardstick, name="out", group_dims=(0, 2), dtype=dtype, **kw)


def test_accepts_the_same_error(numbers):
    truth, yardstick, actual = numbers
    judge(actual, truth, yardstick)


def test_rejects_one_nan(numbers):
    truth, yardstick, actual = numbers
    actual[2, 3, 77, 5] = float("nan")
    with pytest.raises(AssertionError, match=r"1 of .* worst at \[2, 3, 77, 5\]: actual nan, expected"):
        judge(actual, truth, yardstick)


@pytest.mark.parametrize("value", [float("inf"), float("-inf")])
def test_rejects_infinity(numbers, value):
    truth, yardstick, actual = numbers
    actual[0, 0, 0, 0] = value
    with pytest.raises(AssertionError, match=r"worst at \[0, 0, 0, 0\]"):
        judge(actual, truth, yardstick)


def test_rejects_one_wrong_row_in_one_head_of_two_thousand(numbers):
    """A global norm would not see this row: it is 16 of 256000 numbers and off by a hundred yardsticks."""
    truth, yardstick, actual = numbers
    actual[1, 4, 321] += 1e-4
    assert float((actual.double() - truth).norm() / truth.norm()) < 1e-5
    with pytest.raises(AssertionError, match=r"16 of .* worst at \[1, 4, 321, \d+\]"):
        judge(actual, truth, yardstick)


def test_a_noisy_head_does_not_excuse_another(numbers):
    truth, yardstick, actual = numbers
    yardstick[1, :, 7] += 1.0  # this head's yardstick is useless
    actual[1, 0, 7, 0] += 0.5  # within it
    judge(actual, truth, yardstick)
    actual[1, 0, 8, 0] += 1e-3
    with pytest.raises(AssertionError, match=r"1 of .* worst at \[1, 0, 8, 0\]"):
        judge(actual, truth, yardstick)


def test_factor_is_the_limit():
    truth = torch.zeros(1, 1, 1, 2, dtype=torch.float64)
    yardstick = torch.tensor([1e-3, 0.0]).reshape(1, 1, 1, 2)
    judge(torch.tensor([0.0, FACTOR * 0.99e-3]).reshape(1, 1, 1, 2), truth, yardstick)
    with pytest.raises(AssertionError):
        judge(torch.tensor([0.0, FACTOR * 1.01e-3]).reshape(1, 1, 1, 2), truth, yardstick)


def test_names_both_values():
    truth, yardstick = torch.full((1, 1, 1, 1), 2.0, dtype=torch.float64), torch.full((1, 1, 1, 1), 2.0)
    with pytest.raises(AssertionError, match="actual 3, expected 2, error 1"):
        judge(torch.full((1, 1, 1, 1), 3.0), truth, yardstick)


def test_rejects_wrong_dtype_and_shape(numbers):
    truth, yardstick, actual = numbers
    with pytest.raises(AssertionError, match="dtype is torch.bfloat16, expected torch.float32"):
        judge(actual.to(BF16), truth, yardstick)
    with pytest.raises(AssertionError, match="dtype is torch.float32, expected torch.bfloat16"):
        judge(actual, truth, yardstick, dtype=BF16)
    with pytest.raises(AssertionError, match="shapes differ"):
        judge(actual[:3], truth, yardstick)
    with pytest.raises(AssertionError, match="truth must be float64"):
        judge(actual, truth.float(), yardstick)


def test_rejects_a_broken_truth(numbers):
    truth, yardstick, actual = numbers
    truth[0, 0, 0, 0] = float("nan")
    with pytest.raises(AssertionError, match="no test"):
        judge(actual, truth, yardstick)


def test_storage_rounding_is_allowed_once(numbers):
    truth, yardstick, actual = numbers
    judge(actual.to(BF16), truth, yardstick, dtype=BF16)
    twice = (actual.to(BF16).view(torch.int16) + 1).view(BF16)  # one bfloat16 ulp further
    with pytest.raises(AssertionError):
        judge(twice, truth, yardstick, dtype=BF16)


def test_same_bits():
    x = torch.randn(3, 5)
    x[1, 2] = float("nan")
    assert_same_bits(x.clone(), x, name="x")  # NaN equals itself here
    y = x.clone()
    y[2, 4] = torch.nextafter(y[2, 4], torch.tensor(9.0))
    with pytest.raises(AssertionError, match=r"x: 1 of 15 elements differ; first at \[2, 4\]: .*, expected"):
        assert_same_bits(y, x, name="x")
    with pytest.raises(AssertionError, match=r"first at \[0\]"):
        assert_same_bits(torch.tensor([-0.0]), torch.tensor([0.0]), name="zero")
    with pytest.raises(AssertionError, match="float32"):
        assert_same_bits(x, x.double(), name="x")
    with pytest.raises(AssertionError, match=r"\(3, 4\)"):
        assert_same_bits(x[:, :4], x, name="x")


def test_poison():
    assert poison(torch.zeros(2)).isnan().all()
    assert poison(torch.zeros(2, dtype=torch.int32)).tolist() == [-(2**31)] * 2


def test_inputs_are_awkward():
    x = make_inputs(N=4, T=5, H=2, HV=4, K=64, layers=2, conv=True and False, padding=(2,))
    assert not x.q.is_contiguous() and x.q.stride(-1) == 1
    assert x.pool.stride(1) > x.pool[0, 0].numel()
    assert x.state_indices.tolist() != sorted(x.state_indices.tolist())
    assert x.state_indices[2] == -1
    assert x.out().isnan().all() and x.stash().u.isnan().all()
