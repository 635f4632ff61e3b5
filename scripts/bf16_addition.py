"""
One biased BF16 addition, bit by bit: why -4.703990459 becomes -4.71875.

    python scripts/bf16_addition.py [--terms X …] [--remainder X]

Section 3.3 of arXiv 2510.04212 adds two values of V, at keys where P̄ = 1, and the small remainder
of the other keys. From the paper: -2.40625, a remainder of about 0.00087, all FP32 bits of the sum
-4.703990459442139, and -4.71875. Derived here from these, by subtraction: the other value,
-2.296875, and the remainder's exact size, 1815 · 2^-21. A tie alone goes to the even neighbour, up
as often as down; a remainder of the sum's sign, however small, sends every tie away from zero.

Own terms are rounded to BF16 first, the remainder is not. The sum is exact and rounded once; a
kernel adds in FP32, which is exact too for the paper's numbers. -0 counts as 0.
"""

import argparse
import math
import sys
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction

import torch

PAPER_TERMS = [Fraction("-2.40625"), Fraction("-2.296875")]
PAPER_REMAINDER = Fraction(-1815, 2**21)
INFINITY = 0x7F80  # the word of +inf
PLACES = 48  # binary places printed at most


@dataclass(frozen=True)
class Rounding:
    """An exact number and its BF16 neighbour."""

    exact: Fraction
    sign: int  # 1 if negative
    exponent: int  # of the leading bit; -126 for subnormal numbers and 0
    kept: int  # the leading 8 bits, as an integer: 1.0000000 is 128
    guard: int  # the first bit that falls out, half an ulp: the paper's "rounding bit"
    round: int  # the second
    sticky: int  # 1 if any bit after these is 1
    up: int  # 1 if rounded away from zero
    word: int  # the 16 bits of the result
    result: Fraction | float  # a float only if infinite


def round_to_bf16(exact: Fraction) -> Rounding:
    """Round to nearest, ties to even, in integers; beyond the largest number to infinity."""
    size, sign = abs(exact), int(exact < 0)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent = max(exponent - (size < Fraction(2) ** exponent), -126) if size else -126
    quarters = size / Fraction(2) ** (exponent - 9)  # of an ulp
    kept, guard, second = int(quarters) >> 2, int(quarters) >> 1 & 1, int(quarters) & 1
    sticky = int(quarters.denominator > 1)
    up = guard & (second | sticky | kept & 1)
    word = min((exponent + 126 << 7) + kept + up, INFINITY)  # a carry raises the exponent
    result = (-1) ** sign * (kept + up) * Fraction(2) ** (exponent - 7)
    if word == INFINITY:
        result = -math.inf if sign else math.inf
    word |= sign << 15
    return Rounding(exact, sign, exponent, kept, guard, second, sticky, up, word, result)


def torch_word(exact: Fraction) -> int | None:
    """The 16 bits that torch rounds the FP32 number to; None if FP32 does not hold it exactly."""
    x = torch.tensor(float(exact), dtype=torch.float32)
    if not x.isfinite() or Fraction(x.item()) != exact:
        return None
    return x.bfloat16().view(torch.int16).item() & 0xFFFF


def decimal(x: Fraction | float) -> str:
    return f"{float(x)}" if float(x) == x else f"about {float(x)}"


def binary(x: Fraction, exponent: int) -> str:
    """Sign and bits of x / 2^exponent, with at least 7 binary places."""
    size = abs(x) / Fraction(2) ** exponent
    places = max(size.denominator.bit_length() - 1, 7)
    bits = f"{int(size * 2**places):0{places + 1}b}"
    cut = f"… and {places - PLACES} more" if places > PLACES else ""
    return f"{'-' if x < 0 else '+'}{bits[:-places]}.{bits[-places:][:PLACES]}{cut}"


def addition(terms: list[Fraction], remainder: Fraction) -> list[str]:
    """The BF16 terms, the sum with all addends aligned to the largest exponent, and its shift."""
    roundings = [round_to_bf16(x) for x in terms]
    top, total = max(r.exponent for r in roundings), sum(terms) + remainder
    width = max(len(decimal(x)) for x in terms)
    lines = ["term in BF16, word, sign, exponent, significand"]
    for r in roundings:
        bits = f"{'+-'[r.sign]}  2^{r.exponent:<4}  {binary(r.exact, r.exponent)[1:]}"
        lines.append(f"  {decimal(r.exact):<{width}}  0x{r.word:04x}  {bits}")
    rows = [binary(x, top) for x in [*terms, *[remainder] * (remainder != 0), total]]
    point = max(row.index(".") for row in rows)
    rows = [" " * (2 + point - row.index(".")) + row for row in rows]
    rows.insert(-1, "  " + "-" * (max(map(len, rows)) - 2))
    shift = round_to_bf16(total).exponent - top
    note = "no shift" if total else "the addends cancel: the sum is 0"
    if shift > 0:
        note = f"significand overflows: {8 + shift} bits, BF16 keeps 8: shift right by {shift}"
    elif shift < 0 and total:
        note = f"leading bits cancel: shift left by {-shift}"
    return [*lines, f"aligned, in units of 2^{top}", *rows, note]


def outcome(title: str, exact: Fraction) -> list[str]:
    """Bits kept and lost of the exact sum, the decision, the result and its error."""
    r, word = round_to_bf16(exact), torch_word(exact)
    away = "away from zero, more " + ("negative" if r.sign else "positive")
    lost = f"guard {r.guard}, round {r.round}, sticky {r.sticky}"
    if isinstance(r.result, float):
        decision = "beyond the largest BF16 number: overflow"
    elif lost == "guard 1, round 0, sticky 0":
        decision = f"tie, to even: last kept bit {r.kept & 1}, {away if r.up else 'toward zero'}"
    elif r.result != exact:
        decision = f"above half an ulp: {away}" if r.up else "below half an ulp: toward zero"
    else:
        decision = "exact: nothing falls out"
    agrees = {None: "FP32 does not hold the sum", r.word: "the same"}.get(word, "differs")
    error = r.result - exact
    return [
        f"{title}: {decimal(exact)} = {binary(exact, r.exponent)} x 2^{r.exponent}",
        f"  kept {r.kept >> 7}.{r.kept & 127:07b}; {lost}",
        f"  {decision}",
        f"  result {decimal(r.result)} = 0x{r.word:04x}; torch's FP32 to BF16: {agrees}",
        f"  error {float(error):+} = {float(error / Fraction(2) ** (r.exponent - 7)):+.4g} ulp",
    ]


def number(text: str) -> Fraction:
    with suppress(ValueError, OverflowError):  # no number, nan; infinity
        exact = Fraction(float(text))
        if isinstance(round_to_bf16(exact).result, Fraction):
            return exact
    raise argparse.ArgumentTypeError(f"{text.strip()!r} is no finite number in BF16's range")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.error = lambda message: parser.exit(2, f"error: {message}\n")
    parser.add_argument("--terms", type=number, nargs="+", help="BF16 values to add")
    parser.add_argument("--remainder", type=number, help="added exactly, not rounded first")
    # argparse takes -1e-3 for an option, but not after a space
    args = parser.parse_args([a if a[:2] in ("--", "-h") else f" {a}" for a in arguments])
    given, remainder = args.terms or PAPER_TERMS, args.remainder
    if remainder is None:
        remainder = Fraction(0) if args.terms else PAPER_REMAINDER
    terms = [round_to_bf16(x).result for x in given]
    for x in dict.fromkeys(x for x in given if x not in terms):
        print(f"{float(x)} is no BF16 value: rounded to {float(round_to_bf16(x).result)} first")
    lines = addition(terms, remainder) + outcome("sum of the terms", sum(terms))
    if remainder:
        lines += outcome(f"with the remainder {float(remainder)}", sum(terms) + remainder)
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
