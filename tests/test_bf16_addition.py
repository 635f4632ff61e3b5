"""The BF16 rounding in integers against the paper's example and against torch's."""

import subprocess
import sys
from fractions import Fraction

import pytest
import torch
from conftest import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
from bf16_addition import PAPER_REMAINDER, PAPER_TERMS, binary, main, round_to_bf16, torch_word

TIE = sum(PAPER_TERMS)
SUM = TIE + PAPER_REMAINDER


def bits_dropped(r):
    return r.guard, r.round, r.sticky


def words_agree(x):
    """Whether each FP32 number of x rounds to torch's word; -0 is left out."""
    expected = (x.bfloat16().view(torch.int16).int() & 0xFFFF).tolist()
    numbers = x.tolist()
    return all(
        round_to_bf16(Fraction(number)).word == word
        for number, word in zip(numbers, expected, strict=True)
        if number or word == 0
    )


def test_the_papers_sum_bit_for_bit():
    """Numbers and bits as printed in section 3.3 of arXiv 2510.04212."""
    assert float(SUM) == -4.703990459442139
    assert binary(SUM, 2) == "-1." + "0010110" + "1" + "000011100010111"
    r = round_to_bf16(SUM)
    assert (r.sign, r.exponent, r.kept) == (1, 129 - 127, 0b10010110)
    assert (*bits_dropped(r), r.up) == (1, 0, 1, 1)
    assert r.word == 0b1_10000001_0010111
    assert r.result == Fraction("-4.71875")
    assert float(r.result - SUM) == -0.014759540557861328
    assert torch_word(SUM) == r.word


def test_the_tie_alone_goes_to_the_even_neighbour():
    r = round_to_bf16(TIE)
    assert (*bits_dropped(r), r.up) == (1, 0, 0, 0)
    assert (r.word, r.result) == (0xC096, Fraction("-4.6875"))
    odd = round_to_bf16(TIE - Fraction(1, 32))
    assert (*bits_dropped(odd), odd.up) == (1, 0, 0, 1)
    assert (odd.word, odd.result) == (0xC098, Fraction("-4.75"))


def test_the_operands_that_are_derived_follow_from_the_paper():
    """-2.40625, a remainder of about 0.00087 and the sum leave no other BF16 and FP32 operand."""
    grid = Fraction(1, 64)  # the spacing of BF16 in [2, 4)
    rest = SUM - Fraction("-2.40625") + Fraction("0.00087")
    assert round(rest / grid) * grid == PAPER_TERMS[1]
    first = torch.tensor(float(PAPER_TERMS[0] + PAPER_REMAINDER))
    assert first.item() == PAPER_TERMS[0] + PAPER_REMAINDER
    neighbours = [first.nextafter(torch.tensor(limit)) for limit in (-9.0, 9.0)]
    sums = [(x + float(PAPER_TERMS[1])).item() for x in (first, *neighbours)]
    assert [total == SUM for total in sums] == [True, False, False]


def test_a_remainder_turns_unbiased_ties_into_biased_ones():
    """All pairs of negative numbers of one exponent: every second sum is a tie."""
    sums = [Fraction(-a - b, 64) for a in range(128, 256) for b in range(128, 256)]
    ties = [x for x in sums if bits_dropped(round_to_bf16(x)) == (1, 0, 0)]
    assert len(ties) == len(sums) // 2
    assert sum(round_to_bf16(x).result - x for x in ties) == 0
    for x in ties:
        assert round_to_bf16(x - Fraction(1, 2**60)).result == x - Fraction(1, 64)
        assert round_to_bf16(x + Fraction(1, 2**60)).result == x + Fraction(1, 64)


def test_every_exponent_rounds_as_torch_does():
    """Exact numbers, ties and their neighbours, at the ends of the significand and in between."""
    generator = torch.Generator().manual_seed(0)
    high = torch.arange(0xFF)[:, None] << 7
    inside = torch.randint(128, (0xFF, 8), generator=generator)
    high = torch.cat([high, high + 1, high + 126, high + 127, high + inside], 1)
    low = torch.tensor([0, 1, 0x3FFF, 0x4000, 0x7FFF, 0x8000, 0x8001, 0xC000, 0xFFFF])
    words = (high[..., None] << 16 | low).flatten().int()
    assert words_agree(words.view(torch.float32))
    assert words_agree((words | -(2**31)).view(torch.float32))


def test_random_numbers_round_as_torch_does():
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(-(2**31), 2**31, (20_000,), generator=generator).int()
    x = words.view(torch.float32)
    assert words_agree(x[x.isfinite()])


def test_sums_round_as_torch_adds():
    """Exponents at most 16 apart: FP32 holds the sum of two BF16 numbers exactly."""
    generator = torch.Generator().manual_seed(2)
    a, b = torch.randn(2, 5000, generator=generator)
    scale = torch.randint(-8, 9, (5000,), generator=generator)
    a, b = a.bfloat16(), (b.clamp(-4, 4) * 2.0**scale).bfloat16()
    apart = (a.float().frexp().exponent - b.float().frexp().exponent).abs()
    keep = (apart <= 16) & (a + b != 0)
    for x, y, total in zip(a[keep].tolist(), b[keep].tolist(), (a + b)[keep].tolist(), strict=True):
        assert round_to_bf16(Fraction(x) + Fraction(y)).result == total


@pytest.mark.parametrize(
    ("exact", "word"),
    [
        (Fraction(0), 0x0000),
        (Fraction(1, 2**133), 0x0001),  # the smallest subnormal number
        (Fraction(1, 2**134), 0x0000),  # half of it: a tie
        (Fraction(-3, 2**134), 0x8002),
        (Fraction(-1, 2**200), 0x8000),
        (Fraction(2**134 - 1, 2**260), 0x0080),  # rounds up to the smallest normal number
        (Fraction(255 * 2**120), 0x7F7F),  # the largest number
        (Fraction(511 * 2**119 - 1), 0x7F7F),
        (Fraction(-511 * 2**119), 0xFF80),  # half an ulp beyond: infinity
        (Fraction(2**400), 0x7F80),
    ],
)
def test_ends_of_the_range(exact, word):
    assert round_to_bf16(exact).word == word


def test_command_shows_the_papers_example():
    command = [sys.executable, str(ROOT / "scripts" / "bf16_addition.py")]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for text in (
        "-2.40625   0xc01a  -  2^1     1.0011010",
        "-2.296875  0xc013  -  2^1     1.0010011",
        "  -10.0101101000011100010111\nsignificand overflows: 9 bits",
        "shift right by 1",
        "kept 1.0010110; guard 1, round 0, sticky 0\n  tie, to even: last kept bit 0, toward zero",
        "result -4.6875 = 0xc096; torch's FP32 to BF16: the same",
        "error +0.015625 = +0.5 ulp",
        "-4.703990459442139 = -1.00101101000011100010111 x 2^2",
        "kept 1.0010110; guard 1, round 0, sticky 1\n  above half an ulp: away from zero",
        "result -4.71875 = 0xc097; torch's FP32 to BF16: the same",
        "error -0.014759540557861328 = -0.4723 ulp",
    ):
        assert text in out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--terms 1.5 -1.5", "the addends cancel: the sum is 0"),
        ("--terms 0 -0.0", "result 0.0 = 0x0000"),
        ("--terms 1 -0.99609375", "leading bits cancel: shift left by 8"),
        ("--terms 0.1 1", "0.1 is no BF16 value: rounded to 0.10009765625 first"),
        ("--terms 1 1e-40 --remainder -1e-3", "FP32 does not hold the sum"),
        ("--terms 3e38 3e38", "result inf = 0x7f80"),
        ("--terms -1e-39 -2e-39", "-  2^-126  0."),
        ("--terms 2 0.5 -0.0078125", "no shift"),
        ("--terms 1 --remainder 0.00390625", "tie, to even: last kept bit 0, toward zero"),
        ("--remainder=0.0001", "below half an ulp: toward zero"),
    ],
)
def test_other_terms(arguments, text, capsys):
    assert main(arguments.split()) == 0
    assert text in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    ["--terms", "--terms 1 x", "--terms nan", "--terms -inf", "--terms 3.4e38", "--term=1e999",
     "--remainder 1 2", "--remainder -1e400", "--unknown 1", "7"],
)  # fmt: skip
def test_bad_input_is_one_line_and_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(arguments.split())
    out, err = capsys.readouterr()
    assert (exit_.value.code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
