"""What the paper's failure builds up in, measured inside a run: rows of dS, W_Q, scores."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from attention_reference import score_tiles
from flash_attn_stable import delta_gap
from model import GPT, CausalSelfAttention
from precision import of_heads


def attention_statistics(model: GPT, loss: Callable[[], Tensor]) -> dict[str, list[float]]:
    """Statistics of one batch, a number for each layer; without flash attention, as fa2 computes.

    Args:
        loss: computes a batch's loss with `model`, not compiled; gradients of weights and the
            state of random generators stay as they are.

    Returns:
        ds_mean, ds_std: of Σ_j dS_j / (scale · Σ_j P_j) over rows, relative to the RMS of δ; 0
        where rows of dS sum to zero. delta_error: the relative error that δ has in common, sign
        included (the slope of its error over the δ that agrees with P and dP). wq_norm: largest
        spectral norm of a head's W_Q. max_score: largest row maximum of S. tied: share of rows
        with a repeated maximum, as S is rounded.
    """
    layers = [block.attn for block in model.transformer.h]
    calls = []

    def recording(attend):
        def attend_and_keep(*qkv):
            calls.append((*qkv, attend(*qkv)))
            return calls[-1][-1]

        return attend_and_keep

    attends = [layer.attend for layer in layers]
    devices = {p.device for p in model.parameters() if p.is_cuda}
    try:
        for layer, attend in zip(layers, attends, strict=True):
            layer.attend = recording(attend)
        with torch.random.fork_rng(devices):
            value = loss()
        gradients = torch.autograd.grad(value, [o for *_, o in calls])
    finally:
        for layer, attend in zip(layers, attends, strict=True):
            layer.attend = attend
    rows = [
        _layer_statistics(layer, *qkv, do)
        for layer, (*qkv, _), do in zip(layers, calls, gradients, strict=True)
    ]
    return {key: [row[key] for row in rows] for key in rows[0]}


@torch.no_grad()
def _layer_statistics(layer: CausalSelfAttention, q, k, v, do) -> dict[str, float]:
    q, k, v = (x.to(layer.operand_dtype(q)) for x in (q, k, v))
    precision = layer.precision if layer.kind == "flash" else "fa2"
    P, scale = of_heads(precision, layer.n_head)[0], q.shape[3] ** -0.5
    gap, delta = delta_gap(q, k, v, do, causal=True, scale=scale, precision=precision)
    consistent = delta + gap
    size = delta.square().mean().sqrt().clamp(min=1e-30)
    w_q = layer.c_attn.weight[: layer.c_attn.in_features].float()
    top = torch.full(q.shape[:3], -math.inf, device=q.device)
    tied = torch.zeros_like(top, dtype=torch.bool)
    for rows, _, s_BHTN in score_tiles(q[:1].float(), k[:1].float(), True, scale, P, q.dtype):
        largest = s_BHTN.topk(min(2, s_BHTN.shape[-1]), dim=-1).values
        top[:1, :, rows] = torch.maximum(top[:1, :, rows], largest[..., 0])
        tied[:1, :, rows] |= (largest[..., 0] == largest[..., -1]) & (s_BHTN.shape[-1] > 1)
    return {
        "ds_mean": (gap.mean() / size).item(),
        "ds_std": (gap.std() / size).item(),
        "delta_error": -((gap * consistent).sum() / consistent.square().sum()).item(),
        "wq_norm": torch.linalg.matrix_norm(w_q.unflatten(0, (layer.n_head, -1)), 2).max().item(),
        "max_score": top[:1].max().item(),
        "tied": tied[:1].float().mean().item(),
    }
