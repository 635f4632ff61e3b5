"""The paper's mechanism as a statistic: rows with a repeated maximum, all values of one sign."""

import sys

import pytest
from conftest import ROOT

from attention_reference import Precision

sys.path.insert(0, str(ROOT / "scripts"))
from rounding_bias import signed_error, tied_rows


def measure(arithmetic, device, ties=2, gap=12.0, seed=0):
    """On a GPU of the kernel, on a CPU of the reference; 8,000 rows × 16 features."""
    return signed_error(*tied_rows(8000, ties, gap, seed), Precision.parse(arithmetic), device)


@pytest.mark.parametrize("gap", [10.0, 12.0, 14.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_two_maxima_bias_the_original_and_not_the_stabilized(gap, seed, device):
    """The other keys weigh 1e-3 (gap 10), 2e-4 (gap 12), 1e-5 (gap 14) of the row together.

    Hopper's tensor cores truncate the FP32 sum, which decides what is left of a tie under fa2: a
    bias toward zero, +1.6e-3 at gap 14, that FP32 sums on a CPU do not have.
    """
    original, error = measure("paper", device, gap=gap, seed=seed)
    stable, _ = measure("paper,stable=paper", device, gap=gap, seed=seed)
    fa2, _ = measure("fa2", device, gap=gap, seed=seed)
    assert original < -10 * error
    assert -5e-3 < original < -3e-3
    assert abs(stable) < abs(original) / 10
    assert abs(fa2) < abs(original) / (10 if device == "cpu" else 2)


def test_no_bias_where_nothing_is_repeated_and_the_rest_weighs_nothing(device):
    mean, _ = measure("paper", device, ties=1)
    assert abs(mean) < 1e-5


def test_row_sum_biases_a_single_maximum_and_the_fix_leaves_it(device):
    original, error = measure("paper", device, ties=1, gap=8.0)
    assert original < -10 * error
    assert measure("paper,stable=paper", device, ties=1, gap=8.0)[0] == original
    assert abs(measure("paper,row_sum=fp32", device, ties=1, gap=8.0)[0]) < abs(original) / 10
