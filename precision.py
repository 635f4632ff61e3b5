"""
Where attention rounds: `Precision` names every rounding point, `of_heads` reads a config's text.

One row of scores s = scale · q Kᵀ is taken in logical tiles of `key_tile` keys. With r_m the
maximum of a tile over its visible keys (Algorithm 1 of arXiv 2510.04212):

    m   = max(m_old, shift(r_m))        shift: r_m itself, or a fix (`stable`)
    P̄   = exp(s − m)                    FP32; rounding points p_operand of P̄V and p_sum of Σ P̄
    l   = e^(m_old − m) l + Σ P̄         rounding point row_sum
    O   = e^(m_old − m) O + P̄V          rounding points accumulator (twice) and pv
    O/l                                 rounding point output
    LSE = m + log l                     FP32, in base 2

and backward, with no rounding at tile borders:

    P  = exp(s − LSE)                   FP32; 16 bits as operand of PᵀdO
    dP = dO Vᵀ                          rounding point dp
    δ  = rowsum(dO ∘ O)                 FP32; or another, see `delta`
    dS = P · scale · (dP − δ)           16 bits as operand of dS K and dSᵀ Q
"""

from dataclasses import dataclass, fields, replace
from functools import lru_cache

BF16, FP32 = "bf16", "fp32"
ROUNDING_POINTS = (
    "scores", "row_max", "p_operand", "p_sum", "row_sum", "pv", "accumulator", "output", "dp",
)  # fmt: skip


@dataclass(frozen=True)
class Precision:
    """Where one attention call rounds to BF16 (to nearest, ties to even), and how it shifts.

    Matrix products take 16-bit operands and accumulate in FP32 whatever is chosen here. Each
    rounding point is "fp32" (left alone) or "bf16"; for FP16 inputs, "bf16" rounds to FP16 instead.
    Three instances have names, see `PRECISIONS`; `Precision.parse` reads the form a config uses.
    """

    scores: str = FP32  # S = QKᵀ, and again after · scale; forward and backward
    row_max: str = FP32  # r_m and m
    p_operand: str = BF16  # P̄ as multiplied by V; "fp32" is the sum of two 16-bit numbers
    p_sum: str = FP32  # P̄ as summed into l; "bf16", with p_operand="bf16": what V is multiplied by
    row_sum: str = FP32  # l, after each tile
    pv: str = FP32  # P̄V of one tile
    accumulator: str = FP32  # O before the division: after the rescaling, and after + P̄V
    output: str = BF16  # O / l; δ is computed from the rounded O
    dp: str = FP32  # dP = dO Vᵀ
    key_tile: int | str = 64  # keys in a logical tile: a multiple of 16, or "full"
    # how pv, accumulator and output round where they are "bf16"
    rounding: str = "nearest"  # nearest | stochastic: up with the probability of what is cut off
    mantissa_bits: int = 7  # 7: BF16 (or FP16) itself; 2 to 6: a coarser format
    # δ of the backward pass: o: from O as rounded; o_fp32: from an O recomputed with row_sum, pv,
    # accumulator and output in FP32; dp_p: rowsum(dP ∘ P) / rowsum(P), so rows of dS sum to zero
    delta: str = "o"
    # errors of δ on purpose: δ times 1 + delta_error; then, in units of √(Σ (dO ∘ O)²), one for all
    # rows, and one at random, as if each element of O were off by as much (standard deviation)
    delta_error: float = 0.0
    delta_offset: float = 0.0
    delta_noise: float = 0.0
    # m where a row's maximum r_m is repeated: off: r_m; paper: β·r_m if r_m > 0, 0 if r_m < 0
    # (section 4, Algorithm 1); bounded: r_m + c, 0 ≤ c < 2 log 2, attention_reference.tile_maximum
    stable: str = "off"
    beta: float = 2.0  # the paper's fix's factor, > 1
    tie_tolerance: float = 0.0  # keys this close below the maximum count as repeats of it
    # a tile's Σ P̄ is raised to this: the authors' code never divides by 0
    row_sum_floor: float = 0.0

    def __post_init__(self):
        choices = dict.fromkeys(ROUNDING_POINTS, (BF16, FP32)) | CHOICES
        for name, allowed in choices.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{name} is {' or '.join(map(repr, allowed))}, not {value!r}")
        tile = self.key_tile
        if tile != "full" and not (type(tile) is int and tile >= 16 and tile % 16 == 0):
            raise ValueError(f"key_tile is a positive multiple of 16 or 'full', not {tile!r}")
        if not (type(self.mantissa_bits) is int and 2 <= self.mantissa_bits <= 7):
            raise ValueError(f"mantissa_bits is an int from 2 to 7, not {self.mantissa_bits!r}")
        for name, least in (("delta_error", -1), ("delta_offset", -1), ("delta_noise", 0)):
            value = getattr(self, name)
            if not (least <= value < 1 and value != -1):
                raise ValueError(f"{name} is a number from {least} to 1, not {value!r}")
            if value and self.delta == "dp_p":
                raise ValueError(f"{name} is for δ = o or o_fp32, not dp_p")
        if not 1 < self.beta < float("inf"):
            raise ValueError(f"beta is a finite number above 1, not {self.beta!r}")
        if not 0 <= self.tie_tolerance < float("inf"):
            raise ValueError(f"tie_tolerance is a finite number ≥ 0, not {self.tie_tolerance!r}")
        if not 0 <= self.row_sum_floor < 1:
            raise ValueError(f"row_sum_floor is a number from 0 to 1, not {self.row_sum_floor!r}")

    @property
    def stochastic(self) -> bool:
        """Whether a call draws random bits."""
        points = (self.pv, self.accumulator, self.output)
        return self.rounding == "stochastic" and BF16 in points

    @staticmethod
    @lru_cache
    def parse(text: str) -> "Precision":
        """Read "official", "paper,stable=paper,beta=7" or "fa2,row_sum=bf16".

        A name of `PRECISIONS` first, then any fields that differ from it.

        Raises:
            ValueError: an unknown name or field, or a value that the field does not take.
        """
        name, *overrides = text.split(",")
        if name not in PRECISIONS:
            raise ValueError(f"unknown arithmetic {name!r}; known: {', '.join(PRECISIONS)}")
        types = {f.name: type(f.default) for f in fields(Precision)}
        changes = {}
        for item in overrides:
            key, equals, value = item.partition("=")
            if not equals or key not in types:
                raise ValueError(f"{item!r} is not field=value with a field of {', '.join(types)}")
            try:
                changes[key] = value if (key, value) == ("key_tile", "full") else types[key](value)
            except ValueError:
                raise ValueError(f"{key} takes {types[key].__name__}, not {value!r}") from None
        return replace(PRECISIONS[name], **changes)

    def __str__(self) -> str:
        """The shortest text that `parse` reads back as this instance."""

        def text(name):
            base = PRECISIONS[name]
            differing = [
                f.name for f in fields(self) if getattr(self, f.name) != getattr(base, f.name)
            ]
            return ",".join([name, *(f"{key}={getattr(self, key)}" for key in differing)])

        return min(map(text, PRECISIONS), key=lambda t: t.count(","))


CHOICES = {
    "rounding": ("nearest", "stochastic"),
    "delta": ("o", "o_fp32", "dp_p"),
    "stable": ("off", "paper", "bounded"),
}

FP32_OUTPUT = dict(row_sum=FP32, pv=FP32, accumulator=FP32, output=FP32, delta="o")  # for o_fp32

_ALL_BF16 = dict.fromkeys(ROUNDING_POINTS, BF16) | dict(p_sum=FP32)

PRECISIONS = {
    # The authors' published PyTorch code under autocast and torch.compile.
    "official": Precision(**_ALL_BF16, key_tile=512, tie_tolerance=1e-3, row_sum_floor=1e-10),
    # The paper's Algorithm 1 with one tile as long as the sequence.
    "paper": Precision(**_ALL_BF16, key_tile="full"),
    # FlashAttention-2: FP32 everywhere but the operands of the products and O.
    "fa2": Precision(),
}


@lru_cache
def of_heads(text: str, heads: int) -> tuple[Precision, ...]:
    """The arithmetic of each head of a layer.

    Args:
        text: one for all heads, as `Precision.parse` reads it, or further ones after a slash with
            the heads they are for, counted from 0: "official/fa2@0+6+7/paper,output=fp32@1".

    Raises:
        ValueError: as `Precision.parse`; a head the layer does not have, or named twice.
    """
    first, *others = text.split("/")
    arithmetics = [Precision.parse(first)] * heads
    named = set()
    for other in others:
        arithmetic, at, numbers = other.partition("@")
        for number in numbers.split("+"):
            if not (at and number.isdecimal() and int(number) < heads):
                raise ValueError(
                    f"{other!r} is not arithmetic@head+head… with heads 0 to {heads - 1}"
                )
            if int(number) in named:
                raise ValueError(f"head {number} has two arithmetics in {text!r}")
            named.add(int(number))
            arithmetics[int(number)] = Precision.parse(arithmetic)
    return tuple(arithmetics)


@lru_cache
def fp32_output(text: str) -> bool:
    """Whether O is stored in FP32: then heads that round it are exact in it as well."""
    return any(Precision.parse(part.split("@")[0]).output == FP32 for part in text.split("/"))


@lru_cache
def changed(text: str, **fields) -> str:
    """Each arithmetic of `text` with some fields replaced."""
    parts = [part.partition("@") for part in text.split("/")]
    return "/".join(f"{replace(Precision.parse(P), **fields)}{at}{heads}" for P, at, heads in parts)
