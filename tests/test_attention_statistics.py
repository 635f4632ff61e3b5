"""What is measured of attention inside a run."""

import re
import sys

import pytest
import torch
from conftest import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
from delta_error import measure

from attention_statistics import attention_statistics
from model import GPT, GPTConfig

SMALL = dict(block_size=32, vocab_size=64, n_layer=3, n_head=2, n_embd=32, attention="flash")


def statistics(device, **config):
    torch.manual_seed(0)
    model = GPT(GPTConfig(**(SMALL | config))).to(device)
    tokens = torch.randint(64, (4, model.config.block_size + 1), device=device)
    measured = attention_statistics(model, lambda: model(tokens[:, :-1], tokens[:, 1:])[1])
    assert all(p.grad is None for p in model.parameters())
    return measured


@pytest.mark.parametrize("attention", ["flash,sdpa,flash", "sdpa", "math"])
def test_each_layer_has_its_numbers(attention, device):
    measured = statistics(device, attention=attention)
    assert {len(values) for values in measured.values()} == {3}
    assert set(measured) == {"ds_mean", "ds_std", "delta_error", "wq_norm", "max_score", "tied"}
    assert all(0 <= share <= 1 for share in measured["tied"])


def test_heads_of_a_layer_may_differ(device):
    """Only where S is rounded do maxima repeat, of the first head or of the second."""
    tied = {
        text: statistics(device, precision=text, block_size=512)["tied"][0]
        for text in ("official", "official/fa2@0", "official/fa2@1", "fa2")
    }
    assert tied["fa2"] == 0
    assert tied["official/fa2@0"] > 0
    assert tied["official/fa2@1"] > 0
    assert tied["official"] == pytest.approx(tied["official/fa2@0"] + tied["official/fa2@1"])


def test_rows_of_ds_sum_to_zero_where_delta_agrees(device):
    """The coarser O, the larger the sums; none with δ = rowsum(dP ∘ P) / rowsum(P)."""
    stds = {
        text: max(statistics(device, precision=text)["ds_std"])
        for text in ("paper,delta=dp_p", "paper", "paper,mantissa_bits=3,rounding=stochastic")
    }
    assert stds["paper,delta=dp_p"] < 1e-5
    assert stds["paper"] > 1e-4
    assert stds["paper,mantissa_bits=3,rounding=stochastic"] > 4 * stds["paper"]


def test_error_of_delta_is_seen(device):
    """A δ that is 10 % too large leaves rows of dS that sum to −10 % of δ."""
    torch.manual_seed(0)
    off = statistics(device, precision="fa2,output=fp32,delta_error=0.1")
    exact = statistics(device, precision="fa2,output=fp32")
    assert max(exact["ds_std"]) < 0.01 < min(off["ds_std"])
    assert off["delta_error"] == pytest.approx([0.1] * 3, abs=0.01)


def test_noise_and_offset_of_delta_are_seen(device):
    """Noise differs from row to row with nothing in common, an offset has one sign."""
    torch.manual_seed(0)
    noise = statistics(device, precision="fa2,output=fp32,delta_noise=0.1")
    assert min(noise["ds_std"]) > 0.01
    assert max(map(abs, noise["delta_error"])) < 0.02
    for sign in (1, -1):
        offset = statistics(device, precision=f"fa2,output=fp32,delta_offset={sign * 0.1}")
        assert max(-sign * x for x in offset["ds_mean"]) > 0.01
        assert min(-sign * x for x in offset["ds_mean"]) > 0


def test_error_of_delta_without_training(device):
    cell = measure("fa2,output=fp32,delta_error=0.1", 64, 1.0, seed=0, device=device)
    assert re.match(r"\+(9\.9|10\.0)\d ± 0\.\d\d / 10\.", cell), cell


@pytest.mark.parametrize("precision", ["official", "official,rounding=stochastic"])
def test_random_state_and_attention_stay(precision, device):
    torch.manual_seed(1)
    model = GPT(GPTConfig(**SMALL, dropout=0.0, precision=precision)).to(device)
    tokens = torch.randint(64, (2, 33), device=device)
    attends = [block.attn.attend for block in model.transformer.h]
    state = torch.get_rng_state()
    loss = lambda: model(tokens[:, :-1], tokens[:, 1:])[1]  # noqa: E731
    attention_statistics(model, loss)
    assert torch.equal(state, torch.get_rng_state())
    assert attends == [block.attn.attend for block in model.transformer.h]
    with pytest.raises(ZeroDivisionError):
        attention_statistics(model, lambda: 1 / 0)
    assert attends == [block.attn.attend for block in model.transformer.h]
