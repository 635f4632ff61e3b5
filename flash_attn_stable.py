"""
Flash attention in Triton whose every rounding point is chosen, original and stabilized.

`flash_attention` computes softmax(scale · Q Kᵀ) V and its gradients; the attention matrix is never
stored. Where it rounds to BF16 is data (`Precision`), compiled into the kernel; the equations are
in attention_reference.py. The original and the paper's fix differ in one helper, `_tile_maximum`.

What decides the rounding is the logical tile of `key_tile` keys. The physical tile is this file's
own affair: one that holds a whole logical tile keeps its scores in registers; a longer logical tile
is read twice, once for its maximum and once for P̄V.

    key   meaning                       dtype in memory           in registers
    T, D  length; head width (BD: the next power of two)
    BM    queries of a physical tile; BN: its keys
    q,k,v [B, H, T, D]                  BF16                      operands of tl.dot
    s, p  scores, P̄ or P [BM, BN]       never stored              FP32; P̄, P BF16 as operand
    m, l  row maximum, row sum [BM]     never stored              FP32 (holding BF16 values)
    o     output [B, H, T, D]           BF16, or FP32 by choice   FP32 (holding BF16 values)
    lse   m + log l [B, H, T]           FP32                      FP32
    delta rowsum(dO ∘ O) [B, H, T]      FP32                      FP32
    dq…   gradients [B, H, T, D]        BF16                      FP32

In the kernels i_ is an index, o_ an offset within a tile, b_ a block's value. Strides come as
tuples (batch, head, time, width).
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import torch
from torch import Tensor

from attention_reference import Precision, reference_backward, reference_forward
from attention_tiles import backward_tiles, constants, forward_tiles, shared_memory

try:
    import triton
    import triton.language as tl

    INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
    LOG2E = tl.constexpr(1.4426950408889634)
    LN2 = tl.constexpr(0.6931471805599453)
except ImportError:  # no Triton for this platform: CPU tensors run the reference
    triton, tl = SimpleNamespace(jit=lambda kernel: kernel), None

MAX_HEAD_DIM = 128


@triton.jit
def _bf16(b_x):
    """FP32 values rounded to BF16, to nearest even, still in FP32."""
    if INTERPRETED:  # its cast truncates
        b_u = b_x.to(tl.uint32, bitcast=True)
        b_u = (b_u + 0x7FFF + ((b_u >> 16) & 1)) & 0xFFFF0000
        return b_u.to(tl.float32, bitcast=True)
    return b_x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def _dot(b_a, b_b, b_acc):
    """b_acc + b_a b_b with BF16 operands, accumulated in FP32."""
    if INTERPRETED:  # its product of BF16 blocks is wrong; FP32 is exact on BF16 values
        return tl.dot(_bf16(b_a.to(tl.float32)), _bf16(b_b.to(tl.float32)), b_acc)
    return tl.dot(b_a.to(tl.bfloat16), b_b.to(tl.bfloat16), b_acc)


@triton.jit
def _of_head(x, i_bh, H, stride):
    """Where one head of one sequence begins."""
    return x + i_bh // H * stride[0] + i_bh % H * stride[1]


@triton.jit
def _rows(x, start, stride, T, C: tl.constexpr, N: tl.constexpr):
    """Pointers to rows start … start + N − 1 of a [T, D] matrix, [N, BD], and which exist."""
    o_t = tl.arange(0, N)
    o_d = tl.arange(0, C.BD)
    p_x = x + tl.cast(start, tl.int64) * stride[2]
    p_x += o_t[:, None] * stride[2] + o_d[None, :] * stride[3]
    m_x = (start + o_t < T)[:, None]
    if C.D < C.BD:
        m_x = m_x & (o_d < C.D)[None, :]
    return p_x, m_x


@triton.jit
def _load_rows(x, start, stride, T, C: tl.constexpr, N: tl.constexpr):
    """Rows start … start + N − 1 of a [T, D] matrix as [N, BD], zero outside it."""
    p_x, m_x = _rows(x, start, stride, T, C, N)
    return tl.load(p_x, mask=m_x, other=0.0)


@triton.jit
def _store_rows(x, b_x, start, stride, T, C: tl.constexpr, N: tl.constexpr):
    """The counterpart of `_load_rows`."""
    p_x, m_x = _rows(x, start, stride, T, C, N)
    if INTERPRETED and x.dtype.element_ty == tl.bfloat16:
        b_x = _bf16(b_x)
    tl.store(p_x, b_x.to(x.dtype.element_ty), mask=m_x)


@triton.jit
def _scores(b_a, b_b, scale, C: tl.constexpr):
    """A Bᵀ with the roundings of S. Scaled if S is rounded; if not, `_exp` scales in FP32."""
    b_s = _dot(b_a, tl.trans(b_b), tl.full([b_a.shape[0], b_b.shape[0]], 0.0, dtype=tl.float32))
    if C.P.scores == "bf16":
        b_s = _bf16(b_s) * scale
        if not C.exact_scale:  # a power of two rounds nothing
            b_s = _bf16(b_s)
    return b_s


@triton.jit
def _exp(b_s, b_shift, scale, C: tl.constexpr):
    """exp(S − shift) in FP32: P̄ with shift = m (eq. 5 of the paper), P with shift = LSE."""
    if C.P.scores == "bf16":  # both are BF16 values for P̄: the difference is exact, exp(0) is 1
        return tl.exp2((b_s - b_shift) * LOG2E)
    return tl.exp2(b_s * (scale * LOG2E) - b_shift * LOG2E)


@triton.jit
def _visible(start_q, start_k, T, C: tl.constexpr):
    """Which keys of a tile exist and are seen by which queries, [BM, BN]."""
    o_q = start_q + tl.arange(0, C.BM)
    o_k = start_k + tl.arange(0, C.BN)
    m_s = tl.broadcast_to((o_k < T)[None, :], [C.BM, C.BN])
    if C.causal:
        m_s = m_s & (o_q[:, None] >= o_k[None, :])
    return m_s


@triton.jit
def _tile_scores(
    b_q, k, start_q, start_k, stride_k, scale, T, MASKED: tl.constexpr, C: tl.constexpr
):
    """The scores of a physical tile, −inf where a query does not see a key."""
    b_s = _scores(b_q, _load_rows(k, start_k, stride_k, T, C, C.BN), scale, C)
    if MASKED:
        b_s = tl.where(_visible(start_q, start_k, T, C), b_s, float("-inf"))
    return b_s


@triton.jit
def _merge_maximum(b_r, b_r2, b_s, C: tl.constexpr):
    """The largest score of each row so far and, for the fix, the second largest (equal to it where
    the maximum is repeated)."""
    b_t = tl.max(b_s, 1)
    if C.P.stable != "off":
        b_is_max = b_s == b_t[:, None]
        b_t2 = tl.where(tl.sum(b_is_max.to(tl.int32), 1) > 1, b_t, float("-inf"))
        if C.P.tie_tolerance > 0 or C.P.scores != "bf16":  # rounding r_m may let more keys tie
            b_t2 = tl.maximum(b_t2, tl.max(tl.where(b_is_max, float("-inf"), b_s), 1))
        b_r2 = tl.maximum(tl.minimum(b_r, b_t), tl.maximum(b_r2, b_t2))
    return tl.maximum(b_r, b_t), b_r2


@triton.jit
def _tile_maximum(b_r, b_r2, scale, C: tl.constexpr):
    """What a tile proposes for m: its maximum, or with the paper's fix (Algorithm 1), where it is
    repeated, β·r_m if r_m > 0 and 0 if r_m < 0."""
    if C.P.scores != "bf16":  # see _scores
        b_r *= scale
        b_r2 *= scale
    if C.P.row_max == "bf16":
        b_r = _bf16(b_r)
    if C.P.stable == "paper":
        b_tied = (b_r2 >= b_r - C.P.tie_tolerance) & (b_r2 > float("-inf"))
        b_shifted = b_r * C.P.beta
        if C.P.row_max == "bf16":
            b_shifted = _bf16(b_shifted)
        b_r = tl.where(b_tied, tl.where(b_r > 0, b_shifted, 0.0), b_r)
    return b_r


@triton.jit
def _add_sum(b_l, b_alpha, b_sum, b_r, C: tl.constexpr):
    """l after a tile with Σ P̄ = b_sum. The floor is for rows that see a key of the tile."""
    if C.P.row_sum_floor > 0:
        b_sum = tl.where(b_r > float("-inf"), tl.maximum(b_sum, C.P.row_sum_floor), b_sum)
    b_l = b_alpha * b_l + b_sum
    if C.P.row_sum == "bf16":
        b_l = _bf16(b_l)
    return b_l


@triton.jit
def _add_product(b_acc, b_alpha, b_pv, C: tl.constexpr):
    """The accumulator after a tile's P̄V."""
    if C.P.pv == "bf16":
        b_pv = _bf16(b_pv)
    b_acc = b_acc * b_alpha[:, None]
    if C.P.accumulator == "bf16":
        return _bf16(_bf16(b_acc) + b_pv)
    return b_acc + b_pv


@triton.jit
def _maximum_pass(
    b_r, b_r2, b_q, k, start_q, lo, hi, stride_k, scale, T,
    MASKED: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Row maxima over keys lo … hi − 1, the first reading of a long logical tile."""
    for start in range(lo, hi, C.BN):
        b_s = _tile_scores(b_q, k, start_q, start, stride_k, scale, T, MASKED, C)
        b_r, b_r2 = _merge_maximum(b_r, b_r2, b_s, C)
    return b_r, b_r2


@triton.jit
def _product_pass(
    b_sum, b_pv, b_m, b_q, k, v, start_q, lo, hi, stride_k, stride_v, scale, T,
    MASKED: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Σ P̄ and P̄V in FP32 over keys lo … hi − 1, the second reading."""
    for start in range(lo, hi, C.BN):
        b_s = _tile_scores(b_q, k, start_q, start, stride_k, scale, T, MASKED, C)
        b_p = _exp(b_s, b_m[:, None], scale, C)
        b_sum += tl.sum(b_p, 1)
        b_pv = _dot(b_p, _load_rows(v, start, stride_v, T, C, C.BN), b_pv)
    return b_sum, b_pv


@triton.jit
def _single_pass(
    b_acc, b_l, b_m, b_q, k, v, start_q, lo, hi, stride_k, stride_v, scale, T,
    MASKED: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Keys lo … hi − 1 where a physical tile is a logical tile: scores are computed once."""
    b_none = tl.full([C.BM], float("-inf"), dtype=tl.float32)
    for start in range(lo, hi, C.BN):
        b_s = _tile_scores(b_q, k, start_q, start, stride_k, scale, T, MASKED, C)
        b_r, b_r2 = _merge_maximum(b_none, b_none, b_s, C)
        b_m_new = tl.maximum(b_m, _tile_maximum(b_r, b_r2, scale, C))
        b_p = _exp(b_s, b_m_new[:, None], scale, C)
        b_v = _load_rows(v, start, stride_v, T, C, C.BN)
        b_alpha = tl.exp2((b_m - b_m_new) * LOG2E)
        b_l = _add_sum(b_l, b_alpha, tl.sum(b_p, 1), b_r, C)
        if C.P.pv == "fp32" and C.P.accumulator == "fp32":  # P̄V need not exist on its own
            b_acc = _dot(b_p, b_v, b_acc * b_alpha[:, None])
        else:
            b_pv = _dot(b_p, b_v, tl.full([C.BM, C.BD], 0.0, dtype=tl.float32))
            b_acc = _add_product(b_acc, b_alpha, b_pv, C)
        b_m = b_m_new
    return b_acc, b_l, b_m


@triton.jit
def _forward_kernel(
    q, k, v, o, lse, stride_q, stride_k, stride_v, stride_o, scale, H, T, C: tl.constexpr,
):  # fmt: skip
    """O and LSE of BM queries of one head. Grid: (B · H · ⌈T / BM⌉,)."""
    n_m = tl.cdiv(T, C.BM)
    i_m = n_m - 1 - tl.program_id(0) % n_m  # causal: the longest rows first
    i_bh = (tl.program_id(0) // n_m).to(tl.int64)
    k = _of_head(k, i_bh, H, stride_k)
    v = _of_head(v, i_bh, H, stride_v)
    start_q = i_m * C.BM
    b_q = _load_rows(_of_head(q, i_bh, H, stride_q), start_q, stride_q, T, C, C.BM)

    # Keys [0, seen) need no mask; [seen, end) do.
    end = tl.minimum(start_q + C.BM, T) if C.causal else T
    seen = (start_q if C.causal else T) // C.BN * C.BN

    b_m = tl.full([C.BM], float("-inf"), dtype=tl.float32)
    b_l = tl.full([C.BM], 0.0, dtype=tl.float32)
    b_acc = tl.full([C.BM, C.BD], 0.0, dtype=tl.float32)
    if C.two_passes:
        key_tile = T if C.P.key_tile == "full" else C.P.key_tile
        for tile in range(0, end, key_tile):
            tile_end = tl.minimum(tile + key_tile, end)
            mid = tl.minimum(tl.maximum(seen, tile), tile_end)
            b_r = tl.full([C.BM], float("-inf"), dtype=tl.float32)
            b_r2 = b_r
            for MASKED in tl.static_range(2):
                lo, hi = (mid, tile_end) if MASKED else (tile, mid)
                b_r, b_r2 = _maximum_pass(
                    b_r, b_r2, b_q, k, start_q, lo, hi, stride_k, scale, T, MASKED, C
                )
            b_m_new = tl.maximum(b_m, _tile_maximum(b_r, b_r2, scale, C))
            b_sum = tl.full([C.BM], 0.0, dtype=tl.float32)
            b_pv = tl.full([C.BM, C.BD], 0.0, dtype=tl.float32)
            for MASKED in tl.static_range(2):
                lo, hi = (mid, tile_end) if MASKED else (tile, mid)
                b_sum, b_pv = _product_pass(
                    b_sum, b_pv, b_m_new, b_q, k, v, start_q, lo, hi, stride_k, stride_v, scale,
                    T, MASKED, C,
                )  # fmt: skip
            b_alpha = tl.exp2((b_m - b_m_new) * LOG2E)
            b_l = _add_sum(b_l, b_alpha, b_sum, b_r, C)
            b_acc = _add_product(b_acc, b_alpha, b_pv, C)
            b_m = b_m_new
    else:
        for MASKED in tl.static_range(2):
            lo, hi = (seen, end) if MASKED else (0, seen)
            b_acc, b_l, b_m = _single_pass(
                b_acc, b_l, b_m, b_q, k, v, start_q, lo, hi, stride_k, stride_v, scale, T,
                MASKED, C,
            )  # fmt: skip

    b_o = tl.div_rn(b_acc, tl.broadcast_to(b_l[:, None], [C.BM, C.BD]))  # → BF16 in the store
    _store_rows(_of_head(o, i_bh, H, stride_o), b_o, start_q, stride_o, T, C, C.BM)
    o_q = start_q + tl.arange(0, C.BM)
    tl.store(lse + i_bh * T + o_q, b_m + tl.log2(b_l) * LN2, mask=o_q < T)


@triton.jit
def _delta_kernel(o, do, delta, stride_o, stride_do, H, T, C: tl.constexpr):
    """δ = rowsum(dO ∘ O) in FP32, over O as it was rounded. Grid: (B · H · ⌈T / BM⌉,)."""
    n_m = tl.cdiv(T, C.BM)
    start = tl.program_id(0) % n_m * C.BM
    i_bh = (tl.program_id(0) // n_m).to(tl.int64)
    b_o = _load_rows(_of_head(o, i_bh, H, stride_o), start, stride_o, T, C, C.BM).to(tl.float32)
    b_do = _load_rows(_of_head(do, i_bh, H, stride_do), start, stride_do, T, C, C.BM).to(tl.float32)
    o_q = start + tl.arange(0, C.BM)
    tl.store(delta + i_bh * T + o_q, tl.sum(b_o * b_do, 1), mask=o_q < T)


@triton.jit
def _score_gradient(b_p, b_dp, b_delta, scale, C: tl.constexpr):
    """dS = P · scale · (dP − δ), rounded where it becomes an operand."""
    if C.P.dp == "bf16":
        b_dp = _bf16(b_dp)
    return b_p * scale * (b_dp - b_delta)


@triton.jit
def _dkdv_pass(
    b_dk, b_dv, b_k, b_v, q, do, lse, delta, start_k, lo, hi, stride_q, stride_do, scale, T,
    MASKED: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """dK += dSᵀ Q and dV += Pᵀ dO over queries lo … hi − 1. Queries beyond T have dO = δ = 0."""
    for start in range(lo, hi, C.BM):
        b_q = _load_rows(q, start, stride_q, T, C, C.BM)
        b_do = _load_rows(do, start, stride_do, T, C, C.BM)
        o_q = start + tl.arange(0, C.BM)
        b_lse = tl.load(lse + o_q, mask=o_q < T, other=0.0)
        b_delta = tl.load(delta + o_q, mask=o_q < T, other=0.0)
        b_pT = _exp(_scores(b_k, b_q, scale, C), b_lse[None, :], scale, C)  # [BN, BM]
        if MASKED:
            b_pT = tl.where(tl.trans(_visible(start, start_k, T, C)), b_pT, 0.0)
        b_dv = _dot(b_pT, b_do, b_dv)
        b_dpT = _dot(b_v, tl.trans(b_do), tl.full([C.BN, C.BM], 0.0, dtype=tl.float32))
        b_dsT = _score_gradient(b_pT, b_dpT, b_delta[None, :], scale, C)
        b_dk = _dot(b_dsT, b_q, b_dk)
    return b_dk, b_dv


@triton.jit
def _dkdv_kernel(
    q, k, v, do, lse, delta, dk, dv,
    stride_q, stride_k, stride_v, stride_do, stride_dk, stride_dv, scale, H, T, C: tl.constexpr,
):  # fmt: skip
    """dK and dV of BN keys of one head. Grid: (B · H · ⌈T / BN⌉,)."""
    n_n = tl.cdiv(T, C.BN)
    start_k = tl.program_id(0) % n_n * C.BN
    i_bh = (tl.program_id(0) // n_n).to(tl.int64)
    q = _of_head(q, i_bh, H, stride_q)
    do = _of_head(do, i_bh, H, stride_do)
    lse += i_bh * T
    delta += i_bh * T
    b_k = _load_rows(_of_head(k, i_bh, H, stride_k), start_k, stride_k, T, C, C.BN)
    b_v = _load_rows(_of_head(v, i_bh, H, stride_v), start_k, stride_v, T, C, C.BN)
    b_dk = tl.full([C.BN, C.BD], 0.0, dtype=tl.float32)
    b_dv = tl.full([C.BN, C.BD], 0.0, dtype=tl.float32)

    # Queries [start, seen) see some of these keys, [seen, T) all of them.
    start = start_k // C.BM * C.BM if C.causal else 0
    seen = tl.minimum(tl.cdiv(start_k + C.BN, C.BM) * C.BM, T) if C.causal else 0
    for MASKED in tl.static_range(2):
        lo, hi = (start, seen) if MASKED else (seen, T)
        b_dk, b_dv = _dkdv_pass(
            b_dk, b_dv, b_k, b_v, q, do, lse, delta, start_k, lo, hi, stride_q, stride_do, scale,
            T, MASKED, C,
        )  # fmt: skip

    _store_rows(_of_head(dk, i_bh, H, stride_dk), b_dk, start_k, stride_dk, T, C, C.BN)
    _store_rows(_of_head(dv, i_bh, H, stride_dv), b_dv, start_k, stride_dv, T, C, C.BN)


@triton.jit
def _dq_pass(
    b_dq, b_q, b_do, b_lse, b_delta, k, v, start_q, lo, hi, stride_k, stride_v, scale, T,
    MASKED: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """dQ += dS K over keys lo … hi − 1."""
    for start in range(lo, hi, C.BN):
        b_k = _load_rows(k, start, stride_k, T, C, C.BN)
        b_v = _load_rows(v, start, stride_v, T, C, C.BN)
        b_p = _exp(_scores(b_q, b_k, scale, C), b_lse[:, None], scale, C)
        if MASKED:
            b_p = tl.where(_visible(start_q, start, T, C), b_p, 0.0)
        b_dp = _dot(b_do, tl.trans(b_v), tl.full([C.BM, C.BN], 0.0, dtype=tl.float32))
        b_ds = _score_gradient(b_p, b_dp, b_delta[:, None], scale, C)
        b_dq = _dot(b_ds, b_k, b_dq)
    return b_dq


@triton.jit
def _dq_kernel(
    q, k, v, do, lse, delta, dq,
    stride_q, stride_k, stride_v, stride_do, stride_dq, scale, H, T, C: tl.constexpr,
):  # fmt: skip
    """dQ of BM queries of one head. Grid: (B · H · ⌈T / BM⌉,)."""
    n_m = tl.cdiv(T, C.BM)
    start_q = (n_m - 1 - tl.program_id(0) % n_m) * C.BM
    i_bh = (tl.program_id(0) // n_m).to(tl.int64)
    k = _of_head(k, i_bh, H, stride_k)
    v = _of_head(v, i_bh, H, stride_v)
    b_q = _load_rows(_of_head(q, i_bh, H, stride_q), start_q, stride_q, T, C, C.BM)
    b_do = _load_rows(_of_head(do, i_bh, H, stride_do), start_q, stride_do, T, C, C.BM)
    o_q = start_q + tl.arange(0, C.BM)
    b_lse = tl.load(lse + i_bh * T + o_q, mask=o_q < T, other=0.0)
    b_delta = tl.load(delta + i_bh * T + o_q, mask=o_q < T, other=0.0)
    b_dq = tl.full([C.BM, C.BD], 0.0, dtype=tl.float32)

    end = tl.minimum(start_q + C.BM, T) if C.causal else T
    seen = (start_q if C.causal else T) // C.BN * C.BN
    for MASKED in tl.static_range(2):
        lo, hi = (seen, end) if MASKED else (0, seen)
        b_dq = _dq_pass(
            b_dq, b_q, b_do, b_lse, b_delta, k, v, start_q, lo, hi, stride_k, stride_v, scale, T,
            MASKED, C,
        )  # fmt: skip
    _store_rows(_of_head(dq, i_bh, H, stride_dq), b_dq, start_q, stride_dq, T, C, C.BM)


def _on(device: torch.device):
    """Kernels launch on the current GPU: make it the tensors' own."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def triton_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, precision: Precision
) -> tuple[Tensor, Tensor]:
    """`reference_forward` by the Triton kernel, for CUDA tensors of any strides."""
    B, H, T, D = q.shape
    o, lse = _empty_outputs(q, precision)
    tile, options = forward_tiles(T, D, precision, shared_memory(q.device))
    C = constants(D, causal, scale, precision, **tile)
    with _on(q.device):
        _forward_kernel[(B * H * triton.cdiv(T, C.BM),)](
            q, k, v, o, lse, q.stride(), k.stride(), v.stride(), o.stride(), scale, H, T,
            C=C, **options,
        )  # fmt: skip
    return o, lse


def triton_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    causal: bool, scale: float, precision: Precision,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`reference_backward` by the Triton kernels. No atomics: a rerun gives the same bits."""
    B, H, T, D = q.shape
    (dkdv_tile, dkdv_options), (dq_tile, dq_options) = backward_tiles(D, shared_memory(q.device))
    delta = torch.empty_like(lse)
    dq, dk, dv = (_empty_like_heads(q) for _ in range(3))
    with _on(q.device):
        C = constants(D, causal, scale, precision, BM=128, BN=0)
        _delta_kernel[(B * H * triton.cdiv(T, C.BM),)](
            o, do, delta, o.stride(), do.stride(), H, T, C=C
        )
        C = constants(D, causal, scale, precision, **dkdv_tile)
        _dkdv_kernel[(B * H * triton.cdiv(T, C.BN),)](
            q, k, v, do, lse, delta, dk, dv,
            q.stride(), k.stride(), v.stride(), do.stride(), dk.stride(), dv.stride(), scale, H, T,
            C=C, **dkdv_options,
        )  # fmt: skip
        C = constants(D, causal, scale, precision, **dq_tile)
        _dq_kernel[(B * H * triton.cdiv(T, C.BM),)](
            q, k, v, do, lse, delta, dq,
            q.stride(), k.stride(), v.stride(), do.stride(), dq.stride(), scale, H, T,
            C=C, **dq_options,
        )  # fmt: skip
    return dq, dk, dv


def _empty_like_heads(q: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """[B, H, T, D] stored as [B, T, H, D]: the model's reshape to [B, T, H · D] copies nothing."""
    B, H, T, D = q.shape
    return torch.empty(B, T, H, D, dtype=dtype, device=q.device).transpose(1, 2)


def _laid_out(x: Tensor) -> Tensor:
    """A result of the reference in the layout of the kernels' results."""
    return _empty_like_heads(x, x.dtype).copy_(x)


def _empty_outputs(q: Tensor, precision: Precision) -> tuple[Tensor, Tensor]:
    dtype = torch.bfloat16 if precision.output == "bf16" else torch.float32
    return _empty_like_heads(q, dtype), q.new_empty(q.shape[:3], dtype=torch.float32)


# torch.library.custom_op would check each result for aliases, slower than launching the kernels.
OPS = torch.library.Library("flash_attn_stable", "DEF")
OPS.define(
    "forward(Tensor q, Tensor k, Tensor v, bool causal, float scale, str precision)"
    " -> (Tensor, Tensor)"
)
OPS.define(
    "backward(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, bool causal,"
    " float scale, str precision) -> (Tensor, Tensor, Tensor)"
)


@torch.library.impl(OPS, "forward", "CUDA")
def _forward_cuda(q, k, v, causal, scale, precision):
    return triton_forward(q, k, v, causal, scale, Precision.parse(precision))


@torch.library.impl(OPS, "forward", "CPU")
def _forward_cpu(q, k, v, causal, scale, precision):
    o, lse = reference_forward(q, k, v, causal, scale, Precision.parse(precision))
    return _laid_out(o), lse


@torch.library.register_fake("flash_attn_stable::forward", lib=OPS)
def _forward_fake(q, k, v, causal, scale, precision):
    return _empty_outputs(q, Precision.parse(precision))


@torch.library.impl(OPS, "backward", "CUDA")
def _backward_cuda(do, q, k, v, o, lse, causal, scale, precision):
    return triton_backward(do, q, k, v, o, lse, causal, scale, Precision.parse(precision))


@torch.library.impl(OPS, "backward", "CPU")
def _backward_cpu(do, q, k, v, o, lse, causal, scale, precision):
    P = Precision.parse(precision)
    return tuple(map(_laid_out, reference_backward(do, q, k, v, o, lse, causal, scale, P)))


@torch.library.register_fake("flash_attn_stable::backward", lib=OPS)
def _backward_fake(do, q, k, v, o, lse, causal, scale, precision):
    return tuple(_empty_like_heads(q) for _ in range(3))


def _save_for_backward(ctx, inputs, output):
    q, k, v, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx, do, _):
    gradients = torch.ops.flash_attn_stable.backward(do, *ctx.saved_tensors, *ctx.options)
    return *gradients, None, None, None


torch.library.register_autograd(
    "flash_attn_stable::forward", _differentiate, setup_context=_save_for_backward, lib=OPS
)


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True,
    scale: float | None = None, precision: Precision | str = "official",
) -> Tensor:  # fmt: skip
    """softmax(scale · q kᵀ) v with the roundings of `precision`, differentiable.

    CUDA tensors run the Triton kernels, CPU tensors the same arithmetic in PyTorch. The call is one
    custom operator forward and one backward: torch.compile takes it without a graph break.

    Args:
        q, k, v: [B, H, T, D], BF16, on one device, any strides; D from 16 to 128.
        causal: row i sees keys 0…i.
        scale: factor on q kᵀ, > 0; 1/√D if None.
        precision: a `Precision` or its text, as "paper,stable=paper,beta=7".

    Returns:
        [B, H, T, D], BF16 (FP32 with output="fp32"), stored as [B, T, H, D].

    Raises:
        ValueError: another shape, dtype, device or scale; an unknown arithmetic.
    """
    shapes = [tuple(x.shape) for x in (q, k, v)]
    if q.dim() != 4 or 0 in q.shape or len(set(shapes)) > 1:
        raise ValueError(f"q, k and v must be of one shape [B, H, T, D] without a 0, got {shapes}")
    if not 16 <= q.shape[3] <= MAX_HEAD_DIM:
        raise ValueError(f"head width must be 16 to {MAX_HEAD_DIM}, got {q.shape[3]}")
    if not q.dtype == k.dtype == v.dtype == torch.bfloat16:
        raise ValueError(f"q, k and v must be bfloat16, got {q.dtype}, {k.dtype}, {v.dtype}")
    devices = {str(x.device) for x in (q, k, v)}
    if len(devices) > 1 or q.device.type not in ("cuda", "cpu"):
        raise ValueError(f"q, k and v must be on one CUDA device or the CPU, got {devices}")
    if scale is None:
        scale = q.shape[3] ** -0.5
    if not 0 < scale < float("inf"):
        raise ValueError(f"scale must be a finite number above 0, got {scale}")
    precision = _canonical(precision)
    return torch.ops.flash_attn_stable.forward(q, k, v, causal, float(scale), precision)[0]


@torch.compiler.assume_constant_result
def _canonical(precision: Precision | str) -> str:
    """The text an operator takes; torch.compile runs this once instead of tracing it."""
    if not isinstance(precision, str):
        return str(precision)
    Precision.parse(precision)  # or its error
    return precision
