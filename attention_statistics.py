"""What the paper's failure builds up in, measured inside a run: rows of dS, W_Q, scores."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from attention_reference import by_arithmetic, score_tiles
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
        spectral norm of a head's W_Q. Of the batch's first sequence, max_score: the largest S;
        tied: the share of rows with a tile whose maximum is repeated, as S is rounded.
        δ of stochastic rounding is of another draw than the forward pass whose dO it is taken with.
    """
    layers = [block.attn for block in model.transformer.h]
    devices = {p.device for p in model.parameters() if p.is_cuda}
    with recorded(layers) as calls, torch.random.fork_rng(devices):
        value = loss()
        gradients = torch.autograd.grad(value, [o for *_, o in calls])
        rows = [
            _layer_statistics(layer, *qkv, do)
            for layer, (*qkv, _), do in zip(layers, calls, gradients, strict=True)
        ]
    return {key: [row[key] for row in rows] for key in rows[0]}


@contextmanager
def recorded(layers: list[CausalSelfAttention]) -> Iterator[list[tuple[Tensor, ...]]]:
    """A list that gets (q, k, v, O) of each call of the layers' attention, in order."""
    calls = []

    def recording(attend):
        def attend_and_keep(*qkv):
            calls.append((*qkv, attend(*qkv)))
            return calls[-1][-1]

        return attend_and_keep

    attends = [layer.attend for layer in layers]
    try:
        for layer, attend in zip(layers, attends, strict=True):
            layer.attend = recording(attend)
        yield calls
    finally:
        for layer, attend in zip(layers, attends, strict=True):
            layer.attend = attend


@torch.no_grad()
def _layer_statistics(layer: CausalSelfAttention, q, k, v, do) -> dict[str, float]:
    q, k, v = (x.to(layer.operand_dtype(q)) for x in (q, k, v))
    precision = layer.precision if layer.kind == "flash" else "fa2"
    scale = q.shape[3] ** -0.5
    gap, delta = delta_gap(q, k, v, do, True, scale, precision)
    consistent = delta + gap
    size = delta.square().mean().sqrt().clamp(min=1e-30)
    w_q = layer.c_attn.weight[: layer.c_attn.in_features].float()
    top, tied = -math.inf, torch.zeros_like(delta[:1], dtype=torch.bool)
    for P, heads in by_arithmetic(of_heads(precision, layer.n_head)):
        first = (x[:1, heads].float() for x in (q, k))
        for rows, _, s_BHTN in score_tiles(*first, True, scale, P, q.dtype):
            largest = s_BHTN.topk(min(2, s_BHTN.shape[-1]), dim=-1).values
            top = max(top, largest.max().item())
            repeated = (largest[..., 0] == largest[..., -1]) & (s_BHTN.shape[-1] > 1)
            tied[:, heads, rows] |= repeated
    return {
        "ds_mean": (gap.mean() / size).item(),
        "ds_std": (gap.std() / size).item(),
        "delta_error": -((gap * consistent).sum() / consistent.square().sum()).item(),
        "wq_norm": torch.linalg.matrix_norm(w_q.unflatten(0, (layer.n_head, -1)), 2).max().item(),
        "max_score": top,
        "tied": tied.float().mean().item(),
    }
