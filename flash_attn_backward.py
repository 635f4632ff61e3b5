"""
The backward kernels of flash attention: dQ and δ, then dK and dV.

P is recomputed from S and LSE, with the roundings of S that the forward pass had; its equations are
in precision.py, the meaning of names in flash_attn_stable.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attention_blocks import (
    LOG2E,
    dot,
    empty_like_heads,
    held,
    load_rows,
    load_vector,
    of_head,
    on,
    operand,
    place,
    product_transposed,
    rounded,
    rounded_scores,
    store_rows,
    tl,
    triton,
    unit_of,
    unmasked_keys,
    visible,
    with_dense_rows,
)
from attention_reference import MIX
from attention_tiles import arithmetic_of_head, arithmetics, dkdv_tiles, dq_tiles, shared_memory

MIX0, MIX1, MIX2 = (tl.constexpr and tl.constexpr(x) for x in MIX)


@triton.jit
def _delta_of_output(b_do, b_o, C: tl.constexpr):
    """`attention_reference.delta_of_output` of BM rows."""
    b_do = b_do.to(tl.float32)
    b_x = b_do * b_o.to(tl.float32)
    b_delta = tl.sum(b_x, 1) * (1 + C.P.delta_error)
    if C.P.delta_offset != 0 or C.P.delta_noise > 0:
        b_odd = (2 * tl.arange(0, C.BD) + 1).to(tl.uint32) * MIX0
        b_h = tl.sum(b_do.to(tl.uint32, bitcast=True) * b_odd[None, :], 1)
        b_h = (b_h ^ (b_h >> 16)) * MIX1
        b_h = (b_h ^ (b_h >> 13)) * MIX2
        b_h ^= b_h >> 16
        b_uniform = (b_h >> 8).to(tl.float32) * 2.0**-23 - 1
        b_size = tl.sqrt(tl.sum(b_x * b_x, 1))
        b_delta += ((3**0.5 * C.P.delta_noise) * b_uniform + C.P.delta_offset) * b_size
    return b_delta


@triton.jit
def _score_gradient(b_p, b_dp, b_delta, scale, C: tl.constexpr):
    """dS = P · scale · (dP − δ), a factor that rounds nothing left for the sum over dS."""
    if C.P.dp == "bf16":
        b_dp = rounded(b_dp, C)
    if C.exact_scale:
        return b_p * (b_dp - b_delta)
    return b_p * scale * (b_dp - b_delta)


@triton.jit
def _probabilities(b_s, b_lse, scale, C: tl.constexpr):
    """P = exp(S − LSE) in FP32, given LSE in base 2."""
    return tl.exp2(rounded_scores(b_s, scale, C) * (unit_of(scale, C) * LOG2E) - b_lse)


@triton.jit
def _dq_pass(
    b_dq, b_pk, b_p_sum, b_ds_sum, b_q, b_do, b_lse, b_delta, k, v, start_q, lo, hi,
    stride_k, stride_v, scale, T, MASKED: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """dQ += dS K over keys lo … hi − 1 and, for δ = dp_p, P K, Σ P and Σ dS likewise."""
    for start in range(lo, hi, C.BN):
        b_k = load_rows(k, start, stride_k, T, C, C.BN)
        b_v = load_rows(v, start, stride_v, T, C, C.BN)
        b_p = _probabilities(product_transposed(b_q, b_k, C), b_lse[:, None], scale, C)
        if MASKED:
            b_p = tl.where(visible(start_q, start, T, C, C.BN), b_p, 0.0)
        b_ds = _score_gradient(b_p, product_transposed(b_do, b_v, C), b_delta[:, None], scale, C)
        b_dq = dot(b_ds, b_k, b_dq, C)
        if C.P.delta == "dp_p":
            b_pk = dot(b_p, b_k, b_pk, C)
            b_p_sum += tl.sum(b_p, 1)
            b_ds_sum += tl.sum(b_ds, 1)
    return b_dq, b_pk, b_p_sum, b_ds_sum


@triton.jit
def _dq(
    q, k, v, do, o, lse, delta, dq, stride_q, stride_k, stride_v, stride_do, stride_o, stride_dq,
    scale, start_q, i_bh, H, T, A: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """dQ and δ of BM queries of one head.

    δ = rowsum(dO ∘ O). What δ = rowsum(dP ∘ P) / rowsum(P) has beyond it, ε = Σ dS / Σ P, is known
    when all keys were seen, and so is its share of dQ, −ε P K.
    """
    C: tl.constexpr = A.of[KIND]
    k = of_head(k, i_bh, H, stride_k)
    v = of_head(v, i_bh, H, stride_v)
    b_q = load_rows(of_head(q, i_bh, H, stride_q), start_q, stride_q, T, C, C.BM)
    b_do = load_rows(of_head(do, i_bh, H, stride_do), start_q, stride_do, T, C, C.BM)
    b_o = load_rows(of_head(o, i_bh, H, stride_o), start_q, stride_o, T, C, C.BM)
    o_q = start_q + tl.arange(0, C.BM)
    b_lse = load_vector(lse + i_bh * T, start_q, T, C, C.BM)
    b_delta = _delta_of_output(b_do, b_o, C)
    b_q, b_do = held(b_q, C), held(operand(b_do, C), C)

    b_dq = tl.full([C.BM, C.BD], 0.0, dtype=tl.float32)
    b_p_sum = tl.full([C.BM], 0.0, dtype=tl.float32)
    b_pk, b_ds_sum = b_dq, b_p_sum
    end = tl.minimum(start_q + C.BM, T) if C.causal else T
    mid = unmasked_keys(start_q, T, C, C.BN)
    for MASKED in tl.static_range(2):
        lo, hi = (mid, end) if MASKED else (0, mid)
        b_dq, b_pk, b_p_sum, b_ds_sum = _dq_pass(
            b_dq, b_pk, b_p_sum, b_ds_sum, b_q, b_do, b_lse, b_delta, k, v, start_q, lo, hi,
            stride_k, stride_v, scale, T, MASKED, C,
        )  # fmt: skip
    if C.P.delta == "dp_p":
        # of dS with the factor scale, or before it; a row that underflowed has no P
        b_epsilon = tl.where(b_p_sum > 0, b_ds_sum / b_p_sum, 0.0)
        b_dq -= b_epsilon[:, None] * b_pk
        b_delta += b_epsilon if C.exact_scale else b_epsilon / scale
    if C.exact_scale:
        b_dq *= scale
    tl.store(delta + i_bh * T + o_q, b_delta, mask=o_q < T)
    store_rows(of_head(dq, i_bh, H, stride_dq), b_dq, start_q, stride_dq, T, C, C.BM)


@triton.jit
def _dq_kernel(
    q, k, v, do, o, lse, delta, dq, stride_q, stride_k, stride_v, stride_do, stride_o, stride_dq,
    scale, H, T, kinds, A: tl.constexpr,
):  # fmt: skip
    """Grid: (B · H · ⌈T / BM⌉,)."""
    BM: tl.constexpr = A.of[0].BM
    n_m = tl.cdiv(T, BM)
    i_m, i_h, i_bh = place(tl.program_id(0), n_m, H)
    start_q = (n_m - 1 - i_m) * BM
    N: tl.constexpr = A.n
    for i in tl.static_range(N):
        if N == 1 or tl.load(kinds + i_h) == i:
            _dq(
                q, k, v, do, o, lse, delta, dq, stride_q, stride_k, stride_v, stride_do, stride_o,
                stride_dq, scale, start_q, i_bh, H, T, A, i,
            )  # fmt: skip


@triton.jit
def _dkdv_pass(
    b_dk, b_dv, b_k, b_v, q, do, lse, delta, start_k, lo, hi, stride_q, stride_do, scale, T,
    MASKED: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """dK += dSᵀ Q and dV += Pᵀ dO over queries lo … hi − 1. Queries beyond T have dO = δ = 0."""
    for start in range(lo, hi, C.BM):
        b_q = load_rows(q, start, stride_q, T, C, C.BM)
        b_do = operand(load_rows(do, start, stride_do, T, C, C.BM), C)
        b_lse = load_vector(lse, start, T, C, C.BM)
        b_delta = load_vector(delta, start, T, C, C.BM)
        b_pT = _probabilities(product_transposed(b_k, b_q, C), b_lse[None, :], scale, C)  # [BN, BM]
        if MASKED:
            b_pT = tl.where(tl.trans(visible(start, start_k, T, C, C.BN)), b_pT, 0.0)
        b_dv = dot(b_pT, b_do, b_dv, C)
        b_dsT = _score_gradient(b_pT, product_transposed(b_v, b_do, C), b_delta[None, :], scale, C)
        b_dk = dot(b_dsT, b_q, b_dk, C)
    return b_dk, b_dv


@triton.jit
def _dkdv(
    q, k, v, do, lse, delta, dk, dv, stride_q, stride_k, stride_v, stride_do, stride_dk, stride_dv,
    scale, start_k, i_bh, H, T, A: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """dK and dV of BN keys of one head."""
    C: tl.constexpr = A.of[KIND]
    q = of_head(q, i_bh, H, stride_q)
    do = of_head(do, i_bh, H, stride_do)
    lse += i_bh * T
    delta += i_bh * T
    b_k = held(load_rows(of_head(k, i_bh, H, stride_k), start_k, stride_k, T, C, C.BN), C)
    b_v = held(load_rows(of_head(v, i_bh, H, stride_v), start_k, stride_v, T, C, C.BN), C)
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
    if C.exact_scale:
        b_dk *= scale
    store_rows(of_head(dk, i_bh, H, stride_dk), b_dk, start_k, stride_dk, T, C, C.BN)
    store_rows(of_head(dv, i_bh, H, stride_dv), b_dv, start_k, stride_dv, T, C, C.BN)


@triton.jit
def _dkdv_kernel(
    q, k, v, do, lse, delta, dk, dv, stride_q, stride_k, stride_v, stride_do, stride_dk, stride_dv,
    scale, H, T, kinds, A: tl.constexpr,
):  # fmt: skip
    """Grid: (B · H · ⌈T / BN⌉,)."""
    BN: tl.constexpr = A.of[0].BN
    i_n, i_h, i_bh = place(tl.program_id(0), tl.cdiv(T, BN), H)
    N: tl.constexpr = A.n
    for i in tl.static_range(N):
        if N == 1 or tl.load(kinds + i_h) == i:
            _dkdv(
                q, k, v, do, lse, delta, dk, dv, stride_q, stride_k, stride_v, stride_do,
                stride_dk, stride_dv, scale, i_n * BN, i_bh, H, T, A, i,
            )  # fmt: skip


def triton_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    causal: bool, scale: float, precision: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`reference_backward` by the Triton kernels. No atomics: a rerun gives the same bits."""
    B, H, T, D = q.shape
    do, q, k, v = with_dense_rows(do, q, k, v)
    delta = torch.empty_like(lse)
    dq, dk, dv = (empty_like_heads(q) for _ in range(3))
    A = arithmetics(precision, H, T, D, causal, scale, q.dtype)
    kinds = arithmetic_of_head(precision, H, q.device) if A.n > 1 else None
    with on(q.device):
        tiled, options = dq_tiles(A, shared_memory(q.device))
        _dq_kernel[(B * H * triton.cdiv(T, tiled.of[0].BM),)](
            q, k, v, do, o, lse, delta, dq, q.stride(), k.stride(), v.stride(), do.stride(),
            o.stride(), dq.stride(), scale, H, T, kinds, A=tiled, **options,
        )  # fmt: skip
        tiled, options = dkdv_tiles(A, shared_memory(q.device))
        _dkdv_kernel[(B * H * triton.cdiv(T, tiled.of[0].BN),)](
            q, k, v, do, lse, delta, dk, dv, q.stride(), k.stride(), v.stride(), do.stride(),
            dk.stride(), dv.stride(), scale, H, T, kinds, A=tiled, **options,
        )  # fmt: skip
    return dq, dk, dv, delta
