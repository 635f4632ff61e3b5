"""
How rounding O biases δ: not by a bias of its own, but by what it does to the gradient.

    python scripts/curvature.py OUT_DIR [--batches=50] [--bits 2 3 4 5]

OUT_DIR holds a run with a checkpoint. O of one layer at a time gets the error e of rounding it to
so many mantissa bits; all else is FP32. Then δ = rowsum(dO ∘ O) is off by

    rowsum(dO ∘ e) = rowsum(dO₀ ∘ e) + rowsum((dO − dO₀) ∘ e)

with dO₀ the gradient without e. The first term is zero on average if e is not biased. The second is
eᵀHe, with H the second derivative of the loss: e meets itself in the gradient that it causes.
Printed are means over rows and layers, relative to the RMS of δ, ± standard error over batches.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from batches import Batches
from checkpoints import initial_model
from config import TrainConfig
from model import GPT, CausalSelfAttention


def rounded(x: Tensor, bits: int, stochastic: bool) -> Tensor:
    """x with so many mantissa bits: to nearest, or up with the probability of what is cut off."""
    mantissa, exponent = torch.frexp(x)
    mantissa = mantissa * 2 ** (bits + 1)
    mantissa = (mantissa + torch.rand_like(x)).floor() if stochastic else mantissa.round()
    return torch.ldexp(mantissa / 2 ** (bits + 1), exponent)


def output_and_gradient(
    model: GPT, layer: CausalSelfAttention, x: Tensor, y: Tensor, e: Tensor | float
) -> tuple[Tensor, Tensor]:
    """O of a layer, to which e is added, and its gradient. [B, H, T, D]"""
    attend, outputs = layer.attend, []

    def attend_with_error(*qkv: Tensor) -> Tensor:
        outputs.append(attend(*qkv) + e)
        return outputs[-1]

    layer.attend = attend_with_error
    try:
        (do,) = torch.autograd.grad(model(x, y)[1], outputs)
    finally:
        layer.attend = attend
    return outputs[0].detach(), do


def terms(model: GPT, x: Tensor, y: Tensor, rounding: Callable) -> tuple[float, float]:
    """Both terms of one batch, means over rows and layers, relative to the RMS of δ."""
    found = []
    for block in model.transformer.h:
        o, do = output_and_gradient(model, block.attn, x, y, 0.0)
        e = rounding(o) - o
        _, do_e = output_and_gradient(model, block.attn, x, y, e)
        size = (do * o).sum(-1).square().mean().sqrt()
        both = ((gradient * e).sum(-1).mean() / size for gradient in (do, do_e - do))
        found.append([term.item() for term in both])
    return tuple(map(statistics.fmean, zip(*found, strict=True)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--batches", type=int, default=50)
    parser.add_argument("--bits", type=int, nargs="+", default=[2, 3, 4, 5])
    args = parser.parse_args()
    try:
        saved = TrainConfig(**json.loads((args.out_dir / "config.json").read_text()))
        exact = dict(attention="math", dropout=0.0, init_from="resume")
        config = replace(saved, out_dir=str(args.out_dir), **exact)
        model, _ = initial_model(config)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    model = model.to(config.device).float().eval()
    batches = Batches(config, model.config.vocab_size)
    tokens = [
        batch.to(config.device)
        for i in range(args.batches)
        for batch in batches.evaluation("val", i)
    ]
    print("| bits | rounding | rowsum(dO₀ ∘ e) | eᵀHe |\n|---|---|---|---|")
    for bits in args.bits:
        for stochastic in (False, True):
            torch.manual_seed(0)
            rounding = partial(rounded, bits=bits, stochastic=stochastic)
            values = [terms(model, x[:, :-1], x[:, 1:], rounding) for x in tokens]
            cells = [
                f"{statistics.fmean(v):+.4%} ± {statistics.stdev(v) / len(v) ** 0.5:.4%}"
                for v in zip(*values, strict=True)
            ]
            name = "stochastic" if stochastic else "nearest"
            print(f"| {bits} | {name} | " + " | ".join(cells) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
