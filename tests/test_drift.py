"""The error of dW_Q, and whether it adds up."""

import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from helpers import TINY, train, write_corpus

from model import GPT, GPTConfig

sys.path.insert(0, str(ROOT / "scripts"))
from drift import adds_up, gradient_errors

COARSE = "paper,mantissa_bits=2"


def test_it_is_the_error_of_the_gradient():
    """In the last layer, where all else is alike: dW_Q less that with a δ that agrees."""
    shape = dict(block_size=64, vocab_size=50, n_layer=2, n_head=2, n_embd=32)
    tokens = torch.randint(50, (4, 65), generator=torch.Generator().manual_seed(0))
    found = {}
    for delta in ("o", "dp_p"):
        torch.manual_seed(0)
        model = GPT(GPTConfig(**shape, attention="flash", precision=f"{COARSE},delta={delta}"))
        found[delta] = gradient_errors(model, tokens, torch.float32)
    error = found["o"][0][-1]
    difference = found["o"][1][-1] - found["dp_p"][1][-1]
    assert (error - difference).norm() < 0.1 * difference.norm()  # dS and dQ are rounded to BF16
    assert difference.norm() > 0.01 * found["o"][1][-1].norm()
    assert not any(x.any() for x in found["dp_p"][0])


def test_adds_up():
    torch.manual_seed(0)
    noise = torch.randn(100, 8, 8)
    mean, error = adds_up(noise)
    assert abs(mean) < 3 * error
    mean, error = adds_up(torch.ones(8, 8) + noise)
    assert abs(mean - 0.5) < 3 * error
    assert error < 0.05


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drift")
    corpus = write_corpus(folder / "corpus")
    train(*TINY, f"--dataset={corpus}", f"--out_dir={folder / 'run'}")
    return folder / "run"


def drift(*args) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "scripts" / "drift.py"), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_an_offset_of_delta_adds_up_and_noise_does_not(run):
    exact = "fa2,key_tile=full,output=fp32"
    arithmetics = [f"{exact},delta_offset=0.01", f"{exact},delta_noise=0.1", "paper,delta=dp_p"]
    result = drift(run, "--batches=12", "--precision", *arithmetics)
    assert result.returncode == 0, result.stderr
    rows = [line.split(" | ") for line in result.stdout.splitlines()[2:]]
    cosines = {}
    for arithmetic, _, _, cosine, *_ in rows:
        cosines.setdefault(arithmetic.strip("|` "), []).append(cosine)
    offset, noise, agreeing = (cosines[arithmetic] for arithmetic in arithmetics)
    assert all(float(x.split(" ± ")[0]) > 0.5 for x in offset), result.stdout
    for mean, error in (map(float, x.split(" ± ")) for x in noise):
        assert abs(mean) < 4 * error
    assert set(agreeing) == {"–"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--precision", "paper,rounding=stochastic"], "of another draw than its dO"),
        (["--precision", "papr"], "papr"),
        (["--batches=2"], "--batches must be at least 3, got 2"),
    ],
)
def test_bad_input(flags, message, run):
    result = drift(run, *flags)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
