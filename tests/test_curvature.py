"""What a rounding of O finds of itself in the gradient."""

import re
import subprocess
import sys

import torch
from conftest import ROOT
from helpers import TINY, train, write_corpus

sys.path.insert(0, str(ROOT / "scripts"))
from curvature import rounded


def test_rounds_as_bf16_and_without_bias():
    torch.manual_seed(0)
    x = torch.randn(100_000)
    assert torch.equal(rounded(x, 7, stochastic=False), x.bfloat16().float())
    error = rounded(x, 2, stochastic=True) - x
    assert error.abs().max() > 0.1
    assert abs(error.mean() / (error.std() / len(x) ** 0.5)) < 4
    assert rounded(torch.zeros(2), 2, stochastic=False).tolist() == [0, 0]


def curvature(*args) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "scripts" / "curvature.py"), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_an_error_meets_itself_in_the_gradient(tmp_path):
    """The second derivative is positive on average; a bit less, and its term is fourfold."""
    corpus = write_corpus(tmp_path / "corpus")
    train(*TINY, f"--dataset={corpus}", f"--out_dir={tmp_path / 'run'}")
    result = curvature(tmp_path / "run", "--batches=6", "--bits", 2, 3)
    assert result.returncode == 0, result.stderr
    number = r"([+-][\d.]+)% ± ([\d.]+)%"
    rows = re.findall(rf"\| \d \| \w+ \| {number} \| {number} \|", result.stdout)
    curved = [float(row[2]) for row in rows]  # nearest, stochastic for two bits, then for three
    assert all(float(row[2]) > 4 * float(row[3]) for row in rows), result.stdout
    assert curved[1] > 1.3 * curved[0]
    assert 2.5 < curved[1] / curved[3] < 6


def test_no_run(tmp_path):
    result = curvature(tmp_path / "none")
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
