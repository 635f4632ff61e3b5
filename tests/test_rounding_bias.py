"""The paper's mechanism as a statistic: rows with a repeated maximum, all values of one sign.

On a GPU of the kernels, on a CPU of the reference; 8,000 rows. The other keys weigh 1e-3 (gap 10),
2e-4 (gap 12), 1e-5 (gap 14) of a row together.
"""

import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
from rounding_bias import signed_errors, tied_rows


def measure(arithmetic, device, ties=2, gap=12.0, seed=0, sign=-1):
    """(mean, standard error) of the error of O, and of δ."""
    return signed_errors(*tied_rows(8000, ties, gap, seed, sign), arithmetic, device)


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("gap", [10.0, 12.0, 14.0])
def test_two_maxima_bias_the_original_and_not_the_stabilized(gap, sign, device):
    """Hopper's tensor cores truncate the FP32 sum, which decides what is left of a tie under fa2: a
    bias toward zero, 1.6e-3 at gap 14, that FP32 sums on a CPU do not have."""
    (original, error), (original_delta, _) = measure("paper", device, gap=gap, sign=sign)
    assert original * sign > 10 * error
    assert 3e-3 < original * sign < 5e-3
    assert 6 * original * sign < original_delta * sign  # dO sums to 8: errors of a row agree
    limits = {"paper,stable=paper": 10, "paper,stable=bounded": 10}
    limits["fa2"] = 10 if device == "cpu" else 2
    for arithmetic, limit in limits.items():
        (mean, _), (delta, _) = measure(arithmetic, device, gap=gap, sign=sign)
        assert abs(mean) < abs(original) / limit, arithmetic
        assert abs(delta) < abs(original_delta) / limit, arithmetic


@pytest.mark.parametrize("gap", [8.0, 12.0])
def test_three_maxima(gap, device):
    """The paper's fix leaves a third of the bias at gap 12, the bounded shift a tenth at most."""
    (original, _), _ = measure("paper", device, ties=3, gap=gap)
    (paper, _), _ = measure("paper,stable=paper", device, ties=3, gap=gap)
    (bounded, _), _ = measure("paper,stable=bounded", device, ties=3, gap=gap)
    assert abs(original) > 2e-3
    assert abs(bounded) < abs(original) / 8
    if gap == 12.0:
        assert abs(paper) > abs(original) / 4


def test_sign_follows_the_other_keys(device):
    """Four maxima: gap 6 and gap 8 are biased in opposite directions, V being the same."""
    (light, error), _ = measure("paper", device, ties=4, gap=6.0)
    (heavy, _), _ = measure("paper", device, ties=4, gap=8.0)
    assert light > 10 * error
    assert heavy < -10 * error


def test_no_bias_where_nothing_is_repeated_and_the_rest_weighs_nothing(device):
    (mean, _), _ = measure("paper", device, ties=1)
    assert abs(mean) < 1e-5


def test_row_sum_biases_a_single_maximum_and_the_fixes_leave_it(device):
    (original, error), _ = measure("paper", device, ties=1, gap=8.0)
    assert original < -10 * error
    for fix in ("paper", "bounded"):
        assert measure(f"paper,stable={fix}", device, ties=1, gap=8.0)[0][0] == original
    assert abs(measure("paper,row_sum=fp32", device, ties=1, gap=8.0)[0][0]) < abs(original) / 10


@pytest.mark.parametrize("ties", [1, 2, 3, 4])
def test_delta_that_agrees_with_p_and_dp_is_not_biased(ties, device):
    """Whatever O is: δ = rowsum(dP ∘ P) / rowsum(P) does not see it."""
    gap = 8.0 if ties == 1 else 12.0
    _, (original, _) = measure("paper", device, ties=ties, gap=gap)
    _, (agreeing, _) = measure("paper,delta=dp_p", device, ties=ties, gap=gap)
    _, (recomputed, _) = measure("paper,delta=o_fp32", device, ties=ties, gap=gap)
    assert abs(agreeing) < abs(original) / 8
    assert abs(recomputed) < abs(original) / 8
