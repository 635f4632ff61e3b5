"""
Flash attention in Triton whose every rounding point is chosen, original and stabilized.

`flash_attention` computes softmax(scale · Q Kᵀ) V and its gradients; the attention matrix is never
stored. Where it rounds is data (`Precision`), compiled into the kernel; its equations are in
precision.py. The original and the fixes differ in one helper, `_tile_maximum`.

What decides the rounding is the logical tile of `key_tile` keys. The physical tile is this file's
own affair: one that holds a whole logical tile keeps its scores in registers; a longer logical tile
is read twice, once for its maximum and once for P̄V.

    key   meaning                       dtype in memory           in registers
    T, D  length; head width (BD: the next power of two)
    BM    queries of a physical tile; BN: its keys
    q,k,v [B, H, T, D]                  BF16 or FP16              operands of tl.dot
    s, p  scores, P̄ or P [BM, BN]       never stored              FP32; P̄, P 16 bits as operand
    m, l  row maximum, row sum [BM]     never stored              FP32 (holding rounded values)
    o     output [B, H, T, D]           as q, or FP32 by choice   FP32 (holding rounded values)
    lse   (m + log l) log₂ e [B, H, T]  FP32                      FP32
    delta δ [B, H, T]                   FP32                      FP32
    dq…   gradients [B, H, T, D]        as q                      FP32

attention_blocks.py holds what kernels share, flash_attn_backward.py the backward kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor, library
from torch.autograd.function import once_differentiable

from attention_blocks import (
    INTERPRETED,
    LN2,
    LOG2E,
    dot,
    empty_like_heads,
    held,
    load_rows,
    of_head,
    on,
    operand,
    place,
    product_transposed,
    random_words,
    rounded,
    rounded_output,
    rounded_scores,
    store_rows,
    tl,
    triton,
    unit_of,
    unmasked_keys,
    visible,
    with_dense_rows,
)
from attention_reference import SPREAD, reference_backward, reference_forward
from attention_tiles import arithmetic_of_head, arithmetics, forward_tiles, shared_memory
from flash_attn_backward import triton_backward
from precision import FP32_OUTPUT, Precision, changed, fp32_output, of_heads

MAX_HEAD_DIM = 128
SPREAD = tl.constexpr and tl.constexpr(SPREAD)


@triton.jit
def _exp_below(b_s, b_m, unit, C: tl.constexpr):
    """P̄ = exp(S − m) in FP32 (eq. 5 of the paper). Of scores in FP32 the factor is folded into the
    difference, as in FlashAttention-2, which leaves the exponent wrong by up to |m| 2⁻²⁴."""
    if C.P.scores == "bf16":  # the difference of rounded values is exact, exp(0) is 1
        return tl.exp2((b_s - (b_m * (1.0 / unit))[:, None]) * (unit * LOG2E))
    return tl.exp2(b_s * (unit * LOG2E) - (b_m * LOG2E)[:, None])


@triton.jit
def _tile_scores(
    b_q, k, start_q, start_k, stride_k, T, MASKED: tl.constexpr, C: tl.constexpr, N: tl.constexpr
):
    """QKᵀ of N keys, −inf where a query does not see a key."""
    b_s = product_transposed(b_q, load_rows(k, start_k, stride_k, T, C, N), C)
    if MASKED:
        b_s = tl.where(visible(start_q, start_k, T, C, N), b_s, float("-inf"))
    return b_s


@triton.jit
def _top_two(b_r, b_r2, C: tl.constexpr):
    """The largest and second largest score of each row (equal where the maximum is repeated), given
    those of each column of its tiles."""
    b_top = tl.max(b_r, 1)
    b_second = b_top
    if C.P.stable != "off":
        b_is_top = b_r == b_top[:, None]
        b_second = tl.max(tl.where(b_is_top, b_r2, b_r), 1)
        b_second = tl.where(tl.sum(b_is_top.to(tl.int32), 1) > 1, b_top, b_second)
    return b_top, b_second


@triton.jit
def _tile_maximum(b_r, b_r2, unit, C: tl.constexpr):
    """What a tile proposes for m: its maximum, or with a fix, where it is repeated, more: see
    `attention_reference.tile_maximum`."""
    b_r *= unit
    if C.P.row_max == "bf16":
        b_r = rounded(b_r, C)
    if C.P.stable != "off":
        b_tied = (b_r2 * unit >= b_r - C.P.tie_tolerance) & (b_r2 > float("-inf"))
        if C.P.stable == "bounded":
            b_bits = b_r.to(tl.uint32, bitcast=True) >> 16
            b_bits = (b_bits * SPREAD + SPREAD) & 0xFFFF
            b_shifted = b_r + b_bits.to(tl.float32) * (2 * LN2 / 65536)
        else:
            b_shifted = b_r * C.P.beta
            if C.P.row_max == "bf16":
                b_shifted = rounded(b_shifted, C)
            b_shifted = tl.where(b_r > 0, b_shifted, 0.0)
        b_r = tl.where(b_tied, b_shifted, b_r)
    return b_r


@triton.jit
def _summand(b_p, C: tl.constexpr):
    """P̄ as l sums it."""
    if C.P.p_sum == "bf16":
        b_p = operand(b_p, C).to(tl.float32)
    return b_p


@triton.jit
def _p_dot_v(b_p, b_v, b_acc, C: tl.constexpr):
    """b_acc + P̄V in FP32."""
    if C.P.p_operand == "fp32":
        b_high = operand(b_p, C)
        b_acc = dot(b_p - b_high.to(tl.float32), b_v, b_acc, C)
        return dot(b_high, b_v, b_acc, C)
    return dot(b_p, b_v, b_acc, C)


@triton.jit
def _add_sum(b_l, b_alpha, b_sum, b_r, C: tl.constexpr):
    """l after a tile with Σ P̄ = b_sum. The floor is for rows that see a key of the tile."""
    if C.P.row_sum_floor > 0:
        b_sum = tl.where(b_r > float("-inf"), tl.maximum(b_sum, C.P.row_sum_floor), b_sum)
    b_l = b_alpha * b_l + b_sum
    if C.P.row_sum == "bf16":
        b_l = rounded(b_l, C)
    return b_l


@triton.jit
def _add_product(b_acc, b_alpha, b_pv, seed, b_index, tile, C: tl.constexpr):
    """The accumulator after the P̄V of a logical tile."""
    b_random, b_random2, b_random3, _ = random_words(seed, b_index, tile, C)
    if C.P.pv == "bf16":
        b_pv = rounded_output(b_pv, b_random, C)
    b_acc = b_acc * b_alpha[:, None]
    if C.P.accumulator == "bf16":
        b_acc = rounded_output(b_acc, b_random2, C)
        return rounded_output(b_acc + b_pv, b_random3, C)
    return b_acc + b_pv


@triton.jit
def _keep_two(b_r, b_r2, b_s, C: tl.constexpr):
    """The two largest of three scores, given two in order; b_r alone where no fix asks for b_r2.

    Scores that are rounded to BF16 anyway are compared as such, two in a register.
    """
    if b_r.dtype == tl.float32:
        if C.P.stable != "off":
            b_r2 = tl.maximum(b_r2, tl.minimum(b_r, b_s))
        b_r = tl.maximum(b_r, b_s)
    else:
        b_even, b_odd = tl.split(tl.reshape(b_s, [b_s.shape[0], b_s.shape[1] // 2, 2]))
        if C.P.stable == "off":
            b_r = tl.inline_asm_elementwise(
                "{ .reg .b32 s; cvt.rn.bf16x2.f32 s, $3, $2; max.bf16x2 $0, $1, s; }",
                "=r,r,r,r", [b_r, b_even, b_odd], dtype=tl.uint32, is_pure=True, pack=1,
            )  # fmt: skip
        else:
            b_r, b_r2 = tl.inline_asm_elementwise(
                "{ .reg .b32 s, less; cvt.rn.bf16x2.f32 s, $5, $4; min.bf16x2 less, $2, s;"
                " max.bf16x2 $0, $2, s; max.bf16x2 $1, $3, less; }",
                "=&r,=&r,r,r,r,r", [b_r, b_r2, b_even, b_odd], dtype=(tl.uint32, tl.uint32),
                is_pure=True, pack=1,
            )  # fmt: skip
    return b_r, b_r2


@triton.jit
def _unpacked_two(b_r, b_r2, C: tl.constexpr):
    """Two BF16 scores in each 32 bits → FP32, after columns that one thread holds are merged."""
    for _ in tl.static_range(4):
        if b_r.shape[1] > 4 and C.P.stable != "off":
            b_left, b_right = _halves(b_r)
            b_left2, b_right2 = _halves(b_r2)
            b_r, b_r2 = tl.inline_asm_elementwise(
                "{ .reg .b32 less, more; min.bf16x2 less, $2, $3; max.bf16x2 more, $4, $5;"
                " max.bf16x2 $0, $2, $3; max.bf16x2 $1, less, more; }",
                "=&r,=&r,r,r,r,r", [b_left, b_right, b_left2, b_right2],
                dtype=(tl.uint32, tl.uint32), is_pure=True, pack=1,
            )  # fmt: skip
    return _unpacked(b_r), _unpacked(b_r2)


@triton.jit
def _halves(b_x):
    """The left and the right half of the columns of b_x."""
    b_x = tl.reshape(b_x, [b_x.shape[0], 2, b_x.shape[1] // 2])
    return tl.split(tl.permute(b_x, (0, 2, 1)))


@triton.jit
def _unpacked(b_x):
    """[BM, N] → [BM, 2 N]."""
    b_low = (b_x << 16).to(tl.float32, bitcast=True)
    b_high = (b_x & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.reshape(tl.join(b_low, b_high), [b_x.shape[0], 2 * b_x.shape[1]])


@triton.jit
def _maximum_pass(
    b_r, b_r2, b_q, k, start_q, lo, hi, stride_k, T, MASKED: tl.constexpr, C: tl.constexpr
):
    """The first reading of a long logical tile: of each row and column of a physical tile, the two
    largest scores over keys lo … hi − 1. [BM, BN_max]"""
    for start in range(lo, hi, C.BN_max):
        b_s = _tile_scores(b_q, k, start_q, start, stride_k, T, MASKED, C, C.BN_max)
        b_r, b_r2 = _keep_two(b_r, b_r2, b_s, C)
    return b_r, b_r2


@triton.jit
def _columns_summed(b_p):
    """[BM, N] → [BM, 8]: of each row, what one thread holds."""
    return tl.sum(tl.reshape(b_p, [b_p.shape[0], b_p.shape[1] // 8, 8]), 1)


@triton.jit
def _product_pass(
    b_sum, b_pv, b_m, b_q, k, v, start_q, lo, hi, stride_k, stride_v, scale, T,
    MASKED: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The second reading: Σ P̄, [BM, 8] yet to be summed, and P̄V in FP32 over keys lo … hi − 1."""
    for start in range(lo, hi, C.BN):
        b_s = _tile_scores(b_q, k, start_q, start, stride_k, T, MASKED, C, C.BN)
        b_p = _exp_below(rounded_scores(b_s, scale, C), b_m, unit_of(scale, C), C)
        b_sum += _columns_summed(_summand(b_p, C))
        b_pv = _p_dot_v(b_p, load_rows(v, start, stride_v, T, C, C.BN), b_pv, C)
    return b_sum, b_pv


@triton.jit
def _single_pass(
    b_acc, b_l, b_m, b_q, k, v, start_q, lo, hi, stride_k, stride_v, scale, T, seed, b_index,
    MASKED: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Keys lo … hi − 1 where a physical tile is a logical tile: scores are computed once."""
    for start in range(lo, hi, C.BN):
        b_s = _tile_scores(b_q, k, start_q, start, stride_k, T, MASKED, C, C.BN)
        b_s = rounded_scores(b_s, scale, C)
        unit = unit_of(scale, C)
        b_r, b_r2 = _top_two(b_s, float("-inf"), C)
        b_m_new = tl.maximum(b_m, _tile_maximum(b_r, b_r2, unit, C))
        b_p = _exp_below(b_s, b_m_new, unit, C)
        b_v = load_rows(v, start, stride_v, T, C, C.BN)
        b_alpha = tl.exp2((b_m - b_m_new) * LOG2E)
        b_l = _add_sum(b_l, b_alpha, tl.sum(_summand(b_p, C), 1), b_r, C)
        if C.P.pv == "fp32" and C.P.accumulator == "fp32":  # P̄V need not exist on its own
            b_acc = _p_dot_v(b_p, b_v, b_acc * b_alpha[:, None], C)
        else:
            b_pv = _p_dot_v(b_p, b_v, tl.full([C.BM, C.BD], 0.0, dtype=tl.float32), C)
            b_acc = _add_product(b_acc, b_alpha, b_pv, seed, b_index, start // C.BN, C)
        b_m = b_m_new
    return b_acc, b_l, b_m


@triton.jit
def _two_passes(
    b_acc, b_l, b_m, b_q, k, v, start_q, tile, end, i_tile, stride_k, stride_v, scale, T, seed,
    b_index, C: tl.constexpr,
):  # fmt: skip
    """Keys tile … end − 1, one logical tile."""
    packed: tl.constexpr = C.P.scores == "bf16" and not C.fp16 and not INTERPRETED
    if packed:
        b_r = tl.full([C.BM, C.BN_max // 2], 0xFF80FF80, dtype=tl.uint32)  # −inf twice
    else:
        b_r = tl.full([C.BM, C.BN_max], float("-inf"), dtype=tl.float32)
    b_r2 = b_r
    for MASKED in tl.static_range(2):
        mid = tl.minimum(tl.maximum(unmasked_keys(start_q, T, C, C.BN_max), tile), end)
        lo, hi = (mid, end) if MASKED else (tile, mid)
        b_r, b_r2 = _maximum_pass(b_r, b_r2, b_q, k, start_q, lo, hi, stride_k, T, MASKED, C)
    if packed:
        b_r, b_r2 = _unpacked_two(b_r, b_r2, C)
    b_r, b_r2 = _top_two(b_r, b_r2, C)
    b_r, b_r2 = rounded_scores(b_r, scale, C), rounded_scores(b_r2, scale, C)
    b_m_new = tl.maximum(b_m, _tile_maximum(b_r, b_r2, unit_of(scale, C), C))
    b_sum = tl.full([C.BM, 8], 0.0, dtype=tl.float32)
    b_pv = tl.full([C.BM, C.BD], 0.0, dtype=tl.float32)
    for MASKED in tl.static_range(2):
        mid = tl.minimum(tl.maximum(unmasked_keys(start_q, T, C, C.BN), tile), end)
        lo, hi = (mid, end) if MASKED else (tile, mid)
        b_sum, b_pv = _product_pass(
            b_sum, b_pv, b_m_new, b_q, k, v, start_q, lo, hi, stride_k, stride_v, scale, T,
            MASKED, C,
        )  # fmt: skip
    b_alpha = tl.exp2((b_m - b_m_new) * LOG2E)
    b_l = _add_sum(b_l, b_alpha, tl.sum(b_sum, 1), b_r, C)
    return _add_product(b_acc, b_alpha, b_pv, seed, b_index, i_tile, C), b_l, b_m_new


@triton.jit
def _forward(
    q, k, v, o, lse, stride_q, stride_k, stride_v, stride_o, scale, start_q, i_bh, H, T, seed,
    A: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """O and LSE of BM queries of one head."""
    C: tl.constexpr = A.of[KIND]
    k = of_head(k, i_bh, H, stride_k)
    v = of_head(v, i_bh, H, stride_v)
    b_q = held(load_rows(of_head(q, i_bh, H, stride_q), start_q, stride_q, T, C, C.BM), C)
    o_q = start_q + tl.arange(0, C.BM)
    b_index = (i_bh * T + o_q)[:, None] * C.D + tl.arange(0, C.BD)[None, :]
    if C.P.stochastic:
        seed = tl.load(seed)

    end = tl.minimum(start_q + C.BM, T) if C.causal else T
    b_m = tl.full([C.BM], float("-inf"), dtype=tl.float32)
    b_l = tl.full([C.BM], 0.0, dtype=tl.float32)
    b_acc = tl.full([C.BM, C.BD], 0.0, dtype=tl.float32)
    if C.BN_max:
        key_tile = T if C.P.key_tile == "full" else C.P.key_tile
        for tile in range(0, end, key_tile):
            b_acc, b_l, b_m = _two_passes(
                b_acc, b_l, b_m, b_q, k, v, start_q, tile, tl.minimum(tile + key_tile, end),
                tile // key_tile, stride_k, stride_v, scale, T, seed, b_index, C,
            )  # fmt: skip
    else:
        for MASKED in tl.static_range(2):
            mid = unmasked_keys(start_q, T, C, C.BN)
            lo, hi = (mid, end) if MASKED else (0, mid)
            b_acc, b_l, b_m = _single_pass(
                b_acc, b_l, b_m, b_q, k, v, start_q, lo, hi, stride_k, stride_v, scale, T, seed,
                b_index, MASKED, C,
            )  # fmt: skip

    b_o = tl.div_rn(b_acc, tl.broadcast_to(b_l[:, None], [C.BM, C.BD]))
    if C.P.output == "bf16":
        b_o = rounded_output(b_o, random_words(seed, b_index, 0, C)[3], C)
    store_rows(of_head(o, i_bh, H, stride_o), b_o, start_q, stride_o, T, C, C.BM)
    tl.store(lse + i_bh * T + o_q, b_m * LOG2E + tl.log2(b_l), mask=o_q < T)


@triton.jit
def _forward_kernel(
    q, k, v, o, lse, stride_q, stride_k, stride_v, stride_o, scale, H, T, seed, kinds,
    A: tl.constexpr,
):  # fmt: skip
    """Grid: (B · H · ⌈T / BM⌉,). kinds: each head's index into A.of."""
    BM: tl.constexpr = A.of[0].BM
    n_m = tl.cdiv(T, BM)
    i_m, i_h, i_bh = place(tl.program_id(0), n_m, H)
    start_q = (n_m - 1 - i_m) * BM  # causal: the longest rows first
    N: tl.constexpr = A.n
    for i in tl.static_range(N):
        if N == 1 or tl.load(kinds + i_h) == i:
            _forward(
                q, k, v, o, lse, stride_q, stride_k, stride_v, stride_o, scale, start_q, i_bh, H,
                T, seed, A, i,
            )  # fmt: skip


def triton_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, precision: str,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`reference_forward` by the Triton kernel, for CUDA tensors of any strides."""
    B, H, T, D = q.shape
    q, k, v = with_dense_rows(q, k, v)
    o, lse = _empty_outputs(q, precision)
    A = arithmetics(precision, H, T, D, causal, scale, q.dtype)
    kinds = arithmetic_of_head(precision, H, q.device) if A.n > 1 else None
    with on(q.device):
        A, options = forward_tiles(A, T, shared_memory(q.device))
        _forward_kernel[(B * H * triton.cdiv(T, A.of[0].BM),)](
            q, k, v, o, lse, q.stride(), k.stride(), v.stride(), o.stride(), scale, H, T, seed,
            kinds, A=A, **options,
        )  # fmt: skip
    return o, lse


def output_for_delta(q, k, v, o, causal: bool, scale: float, precision: str) -> Tensor:
    """O, or where a head has delta="o_fp32", that head's O recomputed in FP32."""
    wanted = [P.delta == "o_fp32" for P in of_heads(precision, q.shape[1])]
    if not any(wanted):
        return o
    recomputed, _ = triton_forward(q, k, v, causal, scale, changed(precision, **FP32_OUTPUT))
    if all(wanted):
        return recomputed
    return torch.where(torch.tensor(wanted, device=q.device)[:, None, None], recomputed, o)


@torch.no_grad()
def output_and_deltas(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, causal: bool, scale: float, precision: str,
    *others: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    """O, and δ of its backward pass; of each other arithmetic δ of a backward pass of the same O.

    Args:
        q, k, v, do: [B, H, T, D], as of `flash_attention`; do is the gradient of its result.
    """
    seed = _seed(q) if _canonical(precision, q.shape[1])[1] else None
    forward, backward = reference_forward, reference_backward
    if q.is_cuda:
        forward, backward = triton_forward, triton_backward
    o, lse = forward(q, k, v, causal, scale, precision, seed)
    deltas = []
    for text in (precision, *others):
        of_delta = output_for_delta(q, k, v, o, causal, scale, text) if q.is_cuda else o
        deltas.append(backward(do.to(o.dtype), q, k, v, of_delta, lse, causal, scale, text)[3])
    return o, *deltas


def delta_gap(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, causal: bool, scale: float, precision: str
) -> tuple[Tensor, Tensor]:
    """What δ of the backward pass lacks to agree with its P and dP: Σ_j dS_j / (scale · Σ_j P_j) =
    rowsum(dP ∘ P) / rowsum(P) − δ, and δ itself, FP32 [B, H, T]. Arguments: `output_and_deltas`.
    """
    no_error = dict(delta_error=0.0, delta_offset=0.0, delta_noise=0.0)
    agreeing = changed(precision, delta="dp_p", **no_error)
    _, delta, other = output_and_deltas(q, k, v, do, causal, scale, precision, agreeing)
    return other - delta, delta


def _empty_outputs(q: Tensor, precision: str) -> tuple[Tensor, Tensor]:
    dtype = torch.float32 if fp32_output(precision) else q.dtype
    return empty_like_heads(q, dtype), q.new_empty(q.shape[:3], dtype=torch.float32)


def _laid_out(x: Tensor) -> Tensor:
    """A result of the reference in the layout of the kernels' results."""
    return empty_like_heads(x).copy_(x)


# custom_op would check each result for aliases, slower than launching the kernels.
OPS = library.Library("flash_attn_stable", "DEF")
OPS.define(
    "forward(Tensor q, Tensor k, Tensor v, bool causal, float scale, str precision, Tensor? seed)"
    " -> (Tensor, Tensor)"
)
OPS.define(
    "backward(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, bool causal,"
    " float scale, str precision) -> (Tensor, Tensor, Tensor)"
)


@library.impl(OPS, "forward", "CUDA")
def _forward_cuda(q, k, v, causal, scale, precision, seed):
    return triton_forward(q, k, v, causal, scale, precision, seed)


@library.impl(OPS, "forward", "CPU")
def _forward_cpu(q, k, v, causal, scale, precision, seed):
    o, lse = reference_forward(q, k, v, causal, scale, precision, seed)
    return _laid_out(o), lse


@library.register_fake("flash_attn_stable::forward", lib=OPS)
def _forward_fake(q, k, v, causal, scale, precision, seed):
    return _empty_outputs(q, precision)


@library.impl(OPS, "backward", "CUDA")
def _backward_cuda(do, q, k, v, o, lse, causal, scale, precision):
    o = output_for_delta(q, k, v, o, causal, scale, precision)
    return triton_backward(do, q, k, v, o, lse, causal, scale, precision)[:3]


@library.impl(OPS, "backward", "CPU")
def _backward_cpu(do, q, k, v, o, lse, causal, scale, precision):
    gradients = reference_backward(do, q, k, v, o, lse, causal, scale, precision)
    return tuple(map(_laid_out, gradients[:3]))


@library.register_fake("flash_attn_stable::backward", lib=OPS)
def _backward_fake(do, q, k, v, o, lse, causal, scale, precision):
    return tuple(empty_like_heads(q) for _ in range(3))


class _FlashAttention(torch.autograd.Function):
    """Compiled code calls the operators. Other code calls what they call: their dispatch, and an
    autograd registered with them, would take the host as long as all the rest."""

    @staticmethod
    def forward(ctx, q, k, v, *options):
        if torch.compiler.is_compiling():
            forward = torch.ops.flash_attn_stable.forward.default
        else:
            forward = _forward_cuda if q.is_cuda else _forward_cpu
        o, lse = forward(q, k, v, *options)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.options = options[:-1]  # all but the seed
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        if torch.compiler.is_compiling():
            backward = torch.ops.flash_attn_stable.backward.default
        else:
            backward = _backward_cuda if do.is_cuda else _backward_cpu
        return *backward(do, *ctx.saved_tensors, *ctx.options), None, None, None, None


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, scale: float | None = None,
    precision: Precision | str = "official", seed: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """softmax(scale · q kᵀ) v with the roundings of `precision`, differentiable once.

    CUDA tensors run the Triton kernels, CPU tensors the same arithmetic in PyTorch. For
    torch.compile the call is one custom operator forward and one backward, no graph break.

    Args:
        q, k, v: [B, H, T, D], BF16 or FP16, on one device, any strides; D from 16 to 128. Copied
            where a row's D numbers are not side by side, and only there.
        causal: row i sees keys 0…i.
        scale: factor on q kᵀ, > 0; 1/√D if None.
        precision: a `Precision` or its text, as "paper,stable=paper,beta=7"; the text may give
            heads different ones, see `precision.of_heads`.
        seed: of stochastic rounding, one INT64 element on q's device, another for each call; drawn
            from torch's generator of that device if None.

    Returns:
        [B, H, T, D], dtype of q (FP32 if a head has output="fp32"), stored as [B, T, H, D].

    Raises:
        ValueError: another shape, dtype, device, scale or seed; an unknown arithmetic.
    """
    shapes = [tuple(x.shape) for x in (q, k, v)]
    if q.dim() != 4 or 0 in q.shape or len(set(shapes)) > 1:
        raise ValueError(f"q, k and v must be of one shape [B, H, T, D] without a 0, got {shapes}")
    if not 16 <= q.shape[3] <= MAX_HEAD_DIM:
        raise ValueError(f"head width must be 16 to {MAX_HEAD_DIM}, got {q.shape[3]}")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"q, k and v must all be bfloat16 or all float16, got {q.dtype}, {k.dtype}, {v.dtype}"
        )
    devices = {str(x.device) for x in (q, k, v)}
    if len(devices) > 1 or q.device.type not in ("cuda", "cpu"):
        raise ValueError(f"q, k and v must be on one CUDA device or the CPU, got {devices}")
    if scale is None:
        scale = q.shape[3] ** -0.5
    if not 0 < scale < float("inf"):
        raise ValueError(f"scale must be a finite number above 0, got {scale}")
    text, stochastic = _canonical(precision, int(q.shape[1]))
    if not stochastic:
        seed = None
    elif seed is None:
        seed = _seed(q)
    elif seed.numel() != 1 or seed.dtype != torch.int64 or seed.device != q.device:
        raise ValueError(f"seed must be one int64 on {q.device}, got {seed}")
    return _FlashAttention.apply(q, k, v, causal, float(scale), text, seed)


def _seed(q: Tensor) -> Tensor:
    return torch.randint(2**63 - 1, (1,), device=q.device)


@torch.compiler.assume_constant_result
def _canonical(precision: Precision | str, heads: int) -> tuple[str, bool]:
    """The text an operator takes, and whether it draws random bits; torch.compile runs this once
    instead of tracing it."""
    text = str(precision)
    return text, any(P.stochastic for P in of_heads(text, heads))
