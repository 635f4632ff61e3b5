"""
Emulate tensor cores that truncate their FP32 sums, on the rows of scripts/rounding_bias.py.

    python scripts/truncated_sums.py [--rows=4000]

P̄V of fa2's arithmetic, 16 keys at a time: products and the sum so far are aligned to the largest
exponent, cut toward zero `guard` bits beyond FP32, and added. Signed mean error of O, V < 0, beside
that of exact sums; the H200's own is in records.
"""

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
from rounding_bias import WIDTH, tied_rows

GROUP = 16  # keys that one instruction adds


def cut(x: Tensor, exponent: Tensor) -> Tensor:
    """x toward zero to a multiple of 2^exponent."""
    unit = torch.exp2(exponent)
    return torch.trunc(x / unit) * unit


def exponent_of(x: Tensor) -> Tensor:
    return torch.floor(torch.log2(x.abs().clamp(min=1e-300)))


def truncated_product(p: Tensor, v: Tensor, guard: int) -> Tensor:
    """p v in FP64 that holds what such a tensor core has, [heads, 1, rows, WIDTH]."""
    total = torch.zeros(*p.shape[:-1], v.shape[-1], dtype=torch.float64)
    for keys in torch.arange(p.shape[-1]).split(GROUP):
        products = p[..., keys, None] * v[..., None, keys, :]
        terms = torch.cat([total.unsqueeze(-2), products], -2)
        largest = exponent_of(terms).amax(-2, keepdim=True)
        total = cut(terms, largest - 23 - guard).sum(-2)
        total = cut(total, exponent_of(total) - 23)
    return total


def errors(rows: int, ties: int, gap: float) -> list[float]:
    """Mean error of O with exact sums, then with 0, 1 and 2 guard bits."""
    _, k, v, _ = tied_rows(rows, ties, gap, seed=0)
    s, v = k.double().mT[:, :, :WIDTH], v.double()
    p = torch.exp(s - s.amax(-1, keepdim=True))
    row_sum, operand = p.float().sum(-1, keepdim=True).double(), p.bfloat16().double()
    exact = torch.softmax(s, -1) @ v
    products = [operand @ v, *(truncated_product(operand, v, guard) for guard in range(3))]
    return [((pv / row_sum).float().bfloat16() - exact).mean().item() for pv in products]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("--rows", type=int, default=4000)
    rows = parser.parse_args().rows
    if rows < WIDTH:
        print(f"error: --rows must be at least {WIDTH}, got {rows}", file=sys.stderr)
        return 2
    print("| others below r_m by | maxima | exact sums | 0 guard bits | 1 | 2 |")
    print("|---" * 6 + "|")
    for gap in (8.0, 10.0, 12.0, 14.0):
        for ties in (1, 2, 3, 4):
            cells = " | ".join(f"{mean:+.1e}" for mean in errors(rows, ties, gap))
            print(f"| {gap:g} | {ties} | {cells} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
