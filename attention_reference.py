"""
Flash attention's arithmetic in plain PyTorch, rounding point by rounding point.

`reference_forward` and `reference_backward` compute with exactly the roundings that a `Precision`
names, on any device; precision.py has the equations. They are the yardstick of the Triton kernels
in flash_attn_stable.py, and what runs in their place on a CPU.

Shape suffixes: B batch, H heads, T length, D head width, N keys of one tile.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import wraps

import torch
from torch import Tensor

from precision import BF16, FP32, FP32_OUTPUT, Precision, fp32_output, of_heads

LOG2E, LN2 = 1.4426950408889634, 0.6931471805599453
MIX = (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35)  # MurmurHash3's, and the golden ratio's
SPREAD = 0x79B1  # of the odd numbers tried, one with little bias left (scripts/rounding_bias.py)


def _without_autocast(function: Callable) -> Callable:
    """Under autocast the FP32 products of the reference would be made in 16 bits."""

    @wraps(function)
    def run(first: Tensor, *args, **kwargs):
        with torch.autocast(first.device.type, enabled=False):
            return function(first, *args, **kwargs)

    return run


@_without_autocast
def reference_forward(
    q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, causal: bool, scale: float,
    precision: Precision | str, seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention with the roundings of `precision` (Algorithm 1 of arXiv 2510.04212).

    Args:
        q_BHTD, k_BHTD, v_BHTD: BF16 or FP16.
        causal: whether row i sees keys 0…i only.
        scale: factor on QKᵀ, > 0.
        precision: of all heads, or text that `precision.of_heads` reads.
        seed: one INT64 element, the key of stochastic rounding.

    Returns:
        O [B, H, T, D], in the dtype of q (FP32 if a head has output="fp32"), and LSE [B, H, T],
        FP32, in base 2.
    """
    arithmetics = of_heads(str(precision), q_BHTD.shape[1])
    dtype = torch.float32 if fp32_output(str(precision)) else q_BHTD.dtype
    o_BHTD = torch.empty_like(q_BHTD, dtype=dtype)
    lse_BHT = q_BHTD.new_empty(q_BHTD.shape[:3], dtype=torch.float32)
    for P, heads in by_arithmetic(arithmetics):
        qkv = (x[:, heads] for x in (q_BHTD, k_BHTD, v_BHTD))
        draw = _Draw(seed, q_BHTD, heads) if P.stochastic else None
        o, lse = _forward(*qkv, causal, scale, P, draw)
        o_BHTD[:, heads], lse_BHT[:, heads] = o.to(dtype), lse
    return o_BHTD, lse_BHT


@_without_autocast
def reference_backward(
    do_BHTD: Tensor, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, o_BHTD: Tensor,
    lse_BHT: Tensor, causal: bool, scale: float, precision: Precision | str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of `reference_forward`, recomputed from its O and LSE; same fix or not.

    Args:
        do_BHTD: gradient of O, in O's dtype.
        others: as given to and returned by `reference_forward`.

    Returns:
        dQ, dK, dV [B, H, T, D] in the dtype of q, accumulated in FP32 and rounded once; δ
        [B, H, T], FP32.
    """
    inputs = (do_BHTD, q_BHTD, k_BHTD, v_BHTD, o_BHTD, lse_BHT)
    gradients = [*(torch.empty_like(q_BHTD) for _ in range(3)), torch.empty_like(lse_BHT)]
    for P, heads in by_arithmetic(of_heads(str(precision), q_BHTD.shape[1])):
        of_head = _backward(*(x[:, heads] for x in inputs), causal, scale, P)
        for all_heads, gradient in zip(gradients, of_head, strict=True):
            all_heads[:, heads] = gradient.to(all_heads.dtype)
    return tuple(gradients)


def by_arithmetic(arithmetics: tuple[Precision, ...]) -> Iterator[tuple[Precision, list[int]]]:
    """Each distinct arithmetic of a layer's heads, and which heads have it."""
    for P in dict.fromkeys(arithmetics):
        yield P, [head for head, other in enumerate(arithmetics) if other == P]


def _forward(q_BHTD, k_BHTD, v_BHTD, causal, scale, P: Precision, draw) -> tuple[Tensor, Tensor]:
    """`reference_forward` for heads of one arithmetic; O is FP32 that holds rounded values."""
    dtype = q_BHTD.dtype
    q_BHTD, k_BHTD, v_BHTD = q_BHTD.float(), k_BHTD.float(), v_BHTD.float()
    m_BHT = q_BHTD.new_full(q_BHTD.shape[:3], -torch.inf)
    l_BHT = torch.zeros_like(m_BHT)
    acc_BHTD = torch.zeros_like(q_BHTD)

    def rounded(x: Tensor, point: str, word: int, tile: int, rows: slice) -> Tensor:
        """x [B, H, rows, D] as the points pv, accumulator and output round."""
        if point != BF16:
            return x
        random = draw.words(tile, rows)[word] if draw else None
        return _round_output(x, P, dtype, random)

    tiles = score_tiles(q_BHTD, k_BHTD, causal, scale, P, dtype)
    for tile, (rows, keys, s_BHTN) in enumerate(tiles):
        m_old = m_BHT[:, :, rows]
        m = torch.maximum(m_old, tile_maximum(s_BHTN, P, dtype))
        p_BHTN = _exp(s_BHTN - m[..., None])  # FP32 argument and result
        alpha = _exp(m_old - m)
        p_16 = _round(p_BHTN, BF16, dtype)
        tile_sum = (p_16 if P.p_sum == BF16 else p_BHTN).sum(-1).clamp(min=P.row_sum_floor)
        l_BHT[:, :, rows] = _round(alpha * l_BHT[:, :, rows] + tile_sum, P.row_sum, dtype)
        if P.p_operand == FP32:
            p_16 += _round(p_BHTN - p_16, BF16, dtype)
        pv = rounded(p_16 @ v_BHTD[:, :, keys], P.pv, 0, tile, rows)
        acc = rounded(alpha[..., None] * acc_BHTD[:, :, rows], P.accumulator, 1, tile, rows)
        acc_BHTD[:, :, rows] = rounded(acc + pv, P.accumulator, 2, tile, rows)
        m_BHT[:, :, rows] = m

    o_BHTD = rounded(acc_BHTD / l_BHT[..., None], P.output, 3, 0, slice(None))
    return o_BHTD, m_BHT * LOG2E + torch.log2(l_BHT)


def _backward(do_BHTD, q_BHTD, k_BHTD, v_BHTD, o_BHTD, lse_BHT, causal, scale, P: Precision):
    """`reference_backward` for heads of one arithmetic, in FP32."""
    dtype = q_BHTD.dtype
    if P.delta == "o_fp32":
        o_BHTD, _ = _forward(q_BHTD, k_BHTD, v_BHTD, causal, scale, replace(P, **FP32_OUTPUT), None)
    do_BHTD, o_BHTD = do_BHTD.float(), o_BHTD.float()
    q_BHTD, k_BHTD, v_BHTD = q_BHTD.float(), k_BHTD.float(), v_BHTD.float()
    do_operand = _round(do_BHTD, BF16, dtype)

    def tiles() -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
        """Rows, keys, P and dP of each tile."""
        for rows, keys, s_BHTN in score_tiles(q_BHTD, k_BHTD, causal, scale, P, dtype):
            p_BHTN = _exp(s_BHTN - lse_BHT[:, :, rows, None] * LN2)
            dp_BHTN = do_operand[:, :, rows] @ v_BHTD[:, :, keys].mT
            yield rows, keys, p_BHTN, _round(dp_BHTN, P.dp, dtype)

    delta_BHT1 = delta_of_output(do_BHTD, o_BHTD, P)
    epsilon_BHT1 = torch.zeros_like(delta_BHT1)
    if P.delta == "dp_p":  # ε = rowsum(P ∘ (dP − δ)) / rowsum(P), and δ + ε is the new δ
        p_sum = torch.zeros_like(delta_BHT1)
        for rows, _, p_BHTN, dp_BHTN in tiles():
            ds_BHTN = p_BHTN * (dp_BHTN - delta_BHT1[:, :, rows])
            epsilon_BHT1[:, :, rows] += ds_BHTN.sum(-1, keepdim=True)
            p_sum[:, :, rows] += p_BHTN.sum(-1, keepdim=True)
        epsilon_BHT1 = torch.where(p_sum > 0, epsilon_BHT1 / p_sum, 0.0)  # a row may underflow

    dq_BHTD, dk_BHTD, dv_BHTD = (torch.zeros_like(x) for x in (q_BHTD, k_BHTD, v_BHTD))
    for rows, keys, p_BHTN, dp_BHTN in tiles():
        delta, epsilon = delta_BHT1[:, :, rows], epsilon_BHT1[:, :, rows]
        p_operand = _round(p_BHTN, BF16, dtype)
        ds_BHTN = _round(p_BHTN * scale * (dp_BHTN - (delta + epsilon)), BF16, dtype)
        dv_BHTD[:, :, keys] = p_operand.mT @ do_operand[:, :, rows]
        dk_BHTD[:, :, keys] = ds_BHTN.mT @ q_BHTD[:, :, rows]
        if P.delta == "dp_p":  # ε is known last there: its share of dQ is a product of its own
            ds_BHTN = _round(p_BHTN * scale * (dp_BHTN - delta), BF16, dtype)
            dq_BHTD[:, :, rows] -= epsilon * scale * (p_operand @ k_BHTD[:, :, keys])
        dq_BHTD[:, :, rows] += ds_BHTN @ k_BHTD[:, :, keys]
    return dq_BHTD, dk_BHTD, dv_BHTD, (delta_BHT1 + epsilon_BHT1)[..., 0]


def delta_of_output(do_BHTD: Tensor, o_BHTD: Tensor, P: Precision) -> Tensor:
    """δ = rowsum(dO ∘ O) [B, H, T, 1] with the errors on purpose that `P` names; FP32 inputs.

    √(Σ (dO ∘ O)²) is what independent errors of O's elements sum to. The noise is a number that is
    uniform over rows times it, drawn from the bits of dO: the same wherever it is computed.
    """
    x_BHTD = do_BHTD * o_BHTD
    delta_BHT1 = x_BHTD.sum(-1, keepdim=True) * (1 + P.delta_error)
    if P.delta_offset or P.delta_noise:
        odd = torch.arange(1, 2 * x_BHTD.shape[-1], 2, device=x_BHTD.device) * MIX[0]
        h = (do_BHTD.contiguous().view(torch.int32) * odd).sum(-1, keepdim=True)
        for shift, factor in zip((16, 13, 16), (*MIX[1:], 1), strict=True):
            h &= 0xFFFFFFFF
            h = (h ^ h >> shift) * factor
        uniform = ((h & 0xFFFFFFFF) >> 8).float() * 2.0**-23 - 1
        size = x_BHTD.square().sum(-1, keepdim=True).sqrt()
        delta_BHT1 += ((3**0.5 * P.delta_noise) * uniform + P.delta_offset) * size
    return delta_BHT1


def score_tiles(
    q_BHTD: Tensor, k_BHTD: Tensor, causal: bool, scale: float, precision: Precision,
    dtype: torch.dtype = torch.bfloat16,
) -> Iterator[tuple[slice, slice, Tensor]]:  # fmt: skip
    """The logical tiles of S: the rows that see any of a tile's keys, the keys, their scores.

    Args:
        q_BHTD, k_BHTD: 16-bit values in FP32.
        dtype: the 16-bit format.

    Yields:
        rows, keys, and S [B, H, rows, keys] in FP32, −inf where a row does not see a key.
    """
    length = q_BHTD.shape[2]
    tile = length if precision.key_tile == "full" else precision.key_tile
    position = torch.arange(length, device=q_BHTD.device)
    for start in range(0, length, tile):
        keys = slice(start, min(start + tile, length))
        rows = slice(start if causal else 0, length)
        s_BHTN = _round(q_BHTD[:, :, rows] @ k_BHTD[:, :, keys].mT, precision.scores, dtype)
        s_BHTN = _round(s_BHTN * scale, precision.scores, dtype)
        if causal:
            hidden = position[keys] > position[rows, None]
            s_BHTN = s_BHTN.masked_fill(hidden, -torch.inf)
        yield rows, keys, s_BHTN


def tile_maximum(
    s_BHTN: Tensor, precision: Precision, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """What a tile proposes for m: its row maximum r_m, or with a fix, where r_m occurs more than
    once, another shift, which softmax does not see but rounding does.

    "paper" (arXiv 2510.04212, Algorithm 1): β·r_m if r_m > 0, 0 if r_m < 0. A row with
    |r_m| (β − 1) or |r_m| above 87 underflows as a whole, and r_m = 0 is left alone.

    "bounded": r_m + c in FP32, whatever r_m is, with c from [0, 2 log 2) (`bounded_shift`). The
    largest P̄ of a row then lies in (1/4, 1]: no row of finite scores sums to zero. Why rounding
    loses its bias: where P̄ = 1 at two keys, the sum of their V has one bit too many; half of all
    sums are ties, and what the other keys add decides all of them alike. Here P̄ = e^−c instead,
    spread evenly over two octaves by the bits of r_m: the significands of P̄V and of l, and what is
    cut off from them, are spread evenly as well, so that ties have no weight and what the other
    keys add carries as many sums over a border upward as it leaves below one.

    Args:
        s_BHTN: scores of one tile, FP32, −inf where masked.
        dtype: the 16-bit format of row_max="bf16".

    Returns:
        [B, H, T] FP32; −inf for rows that see no key of the tile.
    """
    r_m = _round(s_BHTN.amax(-1), precision.row_max, dtype)
    if precision.stable == "off":
        return r_m
    near = (s_BHTN >= (r_m - precision.tie_tolerance)[..., None]) & (s_BHTN > -torch.inf)
    tied = near.sum(-1) > 1
    if precision.stable == "bounded":
        return torch.where(tied, r_m + bounded_shift(r_m), r_m)
    shifted = _round(precision.beta * r_m, precision.row_max, dtype)
    return torch.where(tied, torch.where(r_m > 0, shifted, 0.0), r_m)


def bounded_shift(r_m: Tensor) -> Tensor:
    """c of stable="bounded", FP32 from 0 to 2 log 2: the upper 16 bits of r_m, a BF16 number, times
    an odd one, so that neighbouring maxima get values far apart and all values occur."""
    bits = r_m.view(torch.int32) >> 16 & 0xFFFF
    return ((bits * SPREAD + SPREAD) & 0xFFFF).float() * (2 * LN2 / 65536)


def _exp(x: Tensor) -> Tensor:
    """exp by way of the base-2 exponential, as GPUs compute it."""
    return torch.exp2(x * LOG2E)


def _round(x: Tensor, to: str, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).float() if to == BF16 else x


def _round_output(x: Tensor, P: Precision, dtype: torch.dtype, random: Tensor | None) -> Tensor:
    """FP32 values as the O points round: to `mantissa_bits`, by chance if `random` is given."""
    kept = 10 if dtype == torch.float16 and P.mantissa_bits == 7 else P.mantissa_bits
    cut = 23 - kept
    bits = x.view(torch.int32).long()
    if random is not None:
        bits += random & (1 << cut) - 1
    elif kept < 7:
        bits += (1 << cut - 1) - 1 + (bits >> cut & 1)
    else:
        return x.to(dtype).float()
    cut_off = (bits >> cut << cut).to(torch.int32).view(torch.float32)
    return torch.where(x.isnan(), x, cut_off).to(dtype).float()


class _Draw:
    """The random bits of stochastic rounding: Philox 4×32-10 (Salmon et al. 2011), keyed by a seed,
    counting elements of O and logical tiles, so that no two roundings share a word."""

    def __init__(self, seed: Tensor, q_BHTD: Tensor, heads: list[int]):
        self.seed = int(seed)
        index = torch.arange(q_BHTD.numel(), device=q_BHTD.device)
        self.index = index.view(q_BHTD.shape)[:, heads]

    def words(self, tile: int, rows: slice) -> tuple[Tensor, ...]:
        """Four words of 32 bits, INT64 [B, H, rows, D], for each element of some rows."""
        index = self.index[:, :, rows]
        c = [index & WORD, index >> 32, torch.full_like(index, tile), index * 0]
        key, key_high = self.seed & WORD, self.seed >> 32 & WORD
        for _ in range(10):
            high_a, low_a = _multiply(0xD2511F53, c[0])
            high_b, low_b = _multiply(0xCD9E8D57, c[2])
            c = [high_b ^ c[1] ^ key, low_b, high_a ^ c[3] ^ key_high, low_a]
            key, key_high = key + 0x9E3779B9 & WORD, key_high + 0xBB67AE85 & WORD
        return tuple(c)


WORD = 0xFFFFFFFF


def _multiply(a: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """The high and low word of a · x, both of 32 bits, without overflow of INT64."""
    low, high = (a & 0xFFFF) * x, (a >> 16) * x
    middle = (low >> 16) + high
    return middle >> 16, (middle & 0xFFFF) << 16 | low & 0xFFFF
