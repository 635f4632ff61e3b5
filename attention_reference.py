"""
Flash attention's arithmetic in plain PyTorch, rounding point by rounding point.

`Precision` names the places where an attention call may round to BF16; `reference_forward` and
`reference_backward` compute with exactly those roundings on any device. They are the yardstick of
the Triton kernels in flash_attn_stable.py, and what runs in their place on a CPU.

One row of scores s = scale · q Kᵀ is taken in logical tiles of `key_tile` keys. With r_m the
maximum of a tile over its visible keys (Algorithm 1 of arXiv 2510.04212):

    m   = max(m_old, shift(r_m))        shift: r_m itself, or the paper's fix (`tile_maximum`)
    P̄   = exp(s − m)                    FP32; BF16 as operand of P̄V
    l   = e^(m_old − m) l + Σ P̄         rounding point row_sum
    O   = e^(m_old − m) O + P̄V          rounding points accumulator (twice) and pv
    O/l                                 rounding point output
    LSE = m + log l                     FP32

and backward, with no rounding at tile borders:

    P  = exp(s − LSE)                   FP32; BF16 as operand of PᵀdO
    dP = dO Vᵀ                          rounding point dp
    δ  = rowsum(dO ∘ O)                 FP32
    dS = P · scale · (dP − δ)           BF16 as operand of dS K and dSᵀ Q

Shape suffixes: B batch, H heads, T length, D head width, N keys of one tile.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache

import torch
from torch import Tensor

BF16, FP32 = "bf16", "fp32"
LOG2E, LN2 = 1.4426950408889634, 0.6931471805599453


@dataclass(frozen=True)
class Precision:
    """Where one attention call rounds to BF16 (round to nearest even), and how it shifts.

    Matrix products take BF16 operands and accumulate in FP32 whatever is chosen here. Each rounding
    point is "fp32" (left alone) or "bf16". Three instances have names, see `PRECISIONS`;
    `Precision.parse` reads the form a config uses.
    """

    scores: str = FP32  # S = QKᵀ, and again after · scale; forward and backward
    row_max: str = FP32  # r_m and m
    row_sum: str = FP32  # l, after each tile
    pv: str = FP32  # P̄V of one tile
    accumulator: str = FP32  # O before the division: after the rescaling, and after + P̄V
    output: str = BF16  # O / l; δ is computed from the rounded O
    dp: str = FP32  # dP = dO Vᵀ
    key_tile: int | str = 64  # keys in a logical tile: a multiple of 16, or "full"
    stable: str = "off"  # off: m is the maximum; paper: the fix of section 4, Algorithm 1
    beta: float = 2.0  # the fix's factor for a repeated positive maximum, > 1
    tie_tolerance: float = 0.0  # keys this close below the maximum count as repeats of it
    row_sum_floor: float = (
        0.0  # a tile's Σ P̄ is raised to this: the authors' code never divides by 0
    )

    def __post_init__(self):
        for name in ROUNDING_POINTS:
            if getattr(self, name) not in (BF16, FP32):
                raise ValueError(f"{name} is 'bf16' or 'fp32', not {getattr(self, name)!r}")
        tile = self.key_tile
        if tile != "full" and not (type(tile) is int and tile >= 16 and tile % 16 == 0):
            raise ValueError(f"key_tile is a positive multiple of 16 or 'full', not {tile!r}")
        if self.stable not in ("off", "paper"):
            raise ValueError(f"stable is 'off' or 'paper', not {self.stable!r}")
        if not 1 < self.beta < float("inf"):
            raise ValueError(f"beta is a finite number above 1, not {self.beta!r}")
        if not 0 <= self.tie_tolerance < float("inf"):
            raise ValueError(f"tie_tolerance is a finite number ≥ 0, not {self.tie_tolerance!r}")
        if not 0 <= self.row_sum_floor < 1:
            raise ValueError(f"row_sum_floor is a number from 0 to 1, not {self.row_sum_floor!r}")

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
                changes[key] = value if value == "full" else types[key](value)
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


ROUNDING_POINTS = ("scores", "row_max", "row_sum", "pv", "accumulator", "output", "dp")

_ALL_BF16 = dict.fromkeys(ROUNDING_POINTS, BF16)

PRECISIONS = {
    # The authors' published PyTorch code under autocast and torch.compile.
    "official": Precision(**_ALL_BF16, key_tile=512, tie_tolerance=1e-3, row_sum_floor=1e-10),
    # The paper's Algorithm 1 with one tile as long as the sequence.
    "paper": Precision(**_ALL_BF16, key_tile="full"),
    # FlashAttention-2: FP32 everywhere but the operands of the products and O.
    "fa2": Precision(),
}


def reference_forward(
    q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, causal: bool, scale: float, precision: Precision
) -> tuple[Tensor, Tensor]:
    """Attention with the roundings of `precision` (Algorithm 1 of arXiv 2510.04212).

    Args:
        q_BHTD, k_BHTD, v_BHTD: BF16.
        causal: whether row i sees keys 0…i only.
        scale: factor on QKᵀ, > 0.

    Returns:
        O [B, H, T, D], BF16 (FP32 with output="fp32"), and LSE [B, H, T], FP32 natural log.
    """
    q_BHTD, k_BHTD, v_BHTD = q_BHTD.float(), k_BHTD.float(), v_BHTD.float()
    m_BHT = q_BHTD.new_full(q_BHTD.shape[:3], -torch.inf)
    l_BHT = torch.zeros_like(m_BHT)
    acc_BHTD = torch.zeros_like(q_BHTD)

    for rows, keys, s_BHTN in score_tiles(q_BHTD, k_BHTD, causal, scale, precision):
        m_old = m_BHT[:, :, rows]
        m = torch.maximum(m_old, tile_maximum(s_BHTN, precision))
        p_BHTN = _exp(s_BHTN - m[..., None])  # FP32 argument and result
        alpha = _exp(m_old - m)
        tile_sum = p_BHTN.sum(-1).clamp(min=precision.row_sum_floor)
        l_BHT[:, :, rows] = _round(alpha * l_BHT[:, :, rows] + tile_sum, precision.row_sum)
        pv_BHTD = _round(_round(p_BHTN, BF16) @ v_BHTD[:, :, keys], precision.pv)
        acc = _round(alpha[..., None] * acc_BHTD[:, :, rows], precision.accumulator)
        acc_BHTD[:, :, rows] = _round(acc + pv_BHTD, precision.accumulator)
        m_BHT[:, :, rows] = m

    o_BHTD = acc_BHTD / l_BHT[..., None]
    if precision.output == BF16:
        o_BHTD = o_BHTD.bfloat16()
    return o_BHTD, m_BHT + torch.log2(l_BHT) * LN2


def reference_backward(
    do_BHTD: Tensor,
    q_BHTD: Tensor,
    k_BHTD: Tensor,
    v_BHTD: Tensor,
    o_BHTD: Tensor,
    lse_BHT: Tensor,
    causal: bool,
    scale: float,
    precision: Precision,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `reference_forward`, recomputed from its O and LSE; same fix or not.

    Args:
        do_BHTD: gradient of O, in O's dtype.
        others: as given to and returned by `reference_forward`.

    Returns:
        dQ, dK, dV [B, H, T, D], BF16, accumulated in FP32 and rounded once.
    """
    do_BHTD, o_BHTD = do_BHTD.float(), o_BHTD.float()
    q_BHTD, k_BHTD, v_BHTD = q_BHTD.float(), k_BHTD.float(), v_BHTD.float()
    do_operand = _round(do_BHTD, BF16)
    delta_BHT1 = (do_BHTD * o_BHTD).sum(-1, keepdim=True)
    dq_BHTD, dk_BHTD, dv_BHTD = (torch.zeros_like(x) for x in (q_BHTD, k_BHTD, v_BHTD))

    for rows, keys, s_BHTN in score_tiles(q_BHTD, k_BHTD, causal, scale, precision):
        do = do_operand[:, :, rows]
        p_BHTN = _exp(s_BHTN - lse_BHT[:, :, rows, None])
        dp_BHTN = _round(do @ v_BHTD[:, :, keys].mT, precision.dp)
        ds_BHTN = _round(p_BHTN * scale * (dp_BHTN - delta_BHT1[:, :, rows]), BF16)
        dv_BHTD[:, :, keys] = _round(p_BHTN, BF16).mT @ do
        dk_BHTD[:, :, keys] = ds_BHTN.mT @ q_BHTD[:, :, rows]
        dq_BHTD[:, :, rows] += ds_BHTN @ k_BHTD[:, :, keys]

    return dq_BHTD.bfloat16(), dk_BHTD.bfloat16(), dv_BHTD.bfloat16()


def score_tiles(
    q_BHTD: Tensor, k_BHTD: Tensor, causal: bool, scale: float, precision: Precision
) -> Iterator[tuple[slice, slice, Tensor]]:
    """The logical tiles of S: the rows that see any of a tile's keys, the keys, their scores.

    Args:
        q_BHTD, k_BHTD: BF16 values in FP32.

    Yields:
        rows, keys, and S [B, H, rows, keys] in FP32, −inf where a row does not see a key.
    """
    length = q_BHTD.shape[2]
    tile = length if precision.key_tile == "full" else precision.key_tile
    position = torch.arange(length, device=q_BHTD.device)
    for start in range(0, length, tile):
        keys = slice(start, min(start + tile, length))
        rows = slice(start if causal else 0, length)
        s_BHTN = _round(q_BHTD[:, :, rows] @ k_BHTD[:, :, keys].mT, precision.scores)
        s_BHTN = _round(s_BHTN * scale, precision.scores)
        if causal:
            hidden = position[keys] > position[rows, None]
            s_BHTN = s_BHTN.masked_fill(hidden, -torch.inf)
        yield rows, keys, s_BHTN


def tile_maximum(s_BHTN: Tensor, precision: Precision) -> Tensor:
    """What a tile proposes for m: its row maximum r_m, or with the paper's fix, where r_m occurs
    more than once, β·r_m if r_m > 0 and 0 if r_m < 0 (arXiv 2510.04212, Algorithm 1).

    Args:
        s_BHTN: scores of one tile, FP32, −inf where masked.

    Returns:
        [B, H, T] FP32; −inf for rows that see no key of the tile.
    """
    r_m = _round(s_BHTN.amax(-1), precision.row_max)
    if precision.stable == "off":
        return r_m
    near = (s_BHTN >= (r_m - precision.tie_tolerance)[..., None]) & (s_BHTN > -torch.inf)
    tied = near.sum(-1) > 1
    r_m = torch.where(tied & (r_m > 0), _round(precision.beta * r_m, precision.row_max), r_m)
    return torch.where(tied & (r_m < 0), 0.0, r_m)


def _exp(x: Tensor) -> Tensor:
    """exp by way of the base-2 exponential, as GPUs compute it."""
    return torch.exp2(x * LOG2E)


def _round(x: Tensor, to: str) -> Tensor:
    return x.bfloat16().float() if to == BF16 else x
