"""
Does the error that rounding makes in the gradient of W_Q add up from batch to batch?

    python scripts/drift.py OUT_DIR [--precision official fa2 …] [--batches=40]

OUT_DIR holds a run with a checkpoint. Its weights compute with each arithmetic in turn, on the same
batches. Where δ lacks `gap` to agree with the backward pass's own P and dP, dW_Q is off by

    E = scale · Σ_t gap_t · (PK)_t x_tᵀ

with x_t the input of the layer and P K the mean key that a row sees. Printed for each layer:

    size     ‖E‖ of a batch relative to ‖dW_Q‖
    adds up  mean cosine between E of two batches, ± standard error (jackknife): 0 if errors of
             different batches are independent, 1 if they are all the same
    mean     ‖mean E‖ relative to ‖mean dW_Q‖, each without what noise alone would leave
    rank 1   share of the first singular value in the squared norm of mean E of a head, all heads
    growth   cosine between −mean E, where descent takes W_Q, and W_Q: positive if it grows
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from attention_statistics import recorded
from batches import Batches
from checkpoints import initial_model
from config import TrainConfig
from flash_attn_stable import delta_gap
from model import GPT
from precision import Precision
from processes import choose_dtype


def gradient_errors(
    model: GPT, tokens: Tensor, dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor]]:
    """E and dW_Q of each layer, [C, C], of one batch of tokens [B, T + 1]."""
    layers = [block.attn for block in model.transformer.h]
    inputs = []
    hooks = [
        layer.register_forward_pre_hook(lambda _, x: inputs.append(x[0].detach()))
        for layer in layers
    ]
    autocast = torch.autocast(tokens.device.type, dtype, enabled=dtype != torch.float32)
    with recorded(layers) as calls, autocast:
        loss = model(tokens[:, :-1], tokens[:, 1:])[1]
    for hook in hooks:
        hook.remove()
    do_of_layers = torch.autograd.grad(loss, [o for *_, o in calls], retain_graph=True)
    gradients = torch.autograd.grad(loss, [layer.c_attn.weight for layer in layers])
    errors = []
    with torch.no_grad():
        for layer, x, (*qkv, _), do in zip(layers, inputs, calls, do_of_layers, strict=True):
            q, k, v = (t.to(layer.operand_dtype(t)) for t in qkv)
            scale = q.shape[3] ** -0.5
            gap, _ = delta_gap(q, k, v, do, True, scale, layer.precision)
            pk = F.scaled_dot_product_attention(q.float(), k.float(), k.float(), is_causal=True)
            dq_error = (scale * gap[..., None] * pk).transpose(1, 2).flatten(2)
            errors.append(torch.einsum("btd,btc->dc", dq_error, x.float()))
    return errors, [gradient[: gradient.shape[1]].float() for gradient in gradients]


def off_diagonal(gram: Tensor) -> Tensor:
    """Sum over each row of what it has in common with the others."""
    return gram.sum(1) - gram.diagonal()


def adds_up(errors: Tensor) -> tuple[float, float]:
    """Mean cosine of two of the rows [n, …], and its standard error by the jackknife."""
    rows, n = F.normalize(errors.flatten(1).double(), dim=1), len(errors)
    common = off_diagonal(rows @ rows.T)
    without = (common.sum() - 2 * common) / ((n - 1) * (n - 2))
    error = ((n - 1) * without.var(correction=0)).sqrt()
    return common.mean().item() / (n - 1), error.item()


def cells(errors: Tensor, dw_q: Tensor, w_q: Tensor, n_head: int) -> list[str]:
    """A layer's columns, of E and dW_Q by batch [n, C, C], and W_Q [C, C]."""
    if not errors.any():
        return ["0"] + ["–"] * 4
    grams = [rows @ rows.T for rows in (x.flatten(1).double() for x in (errors, dw_q))]
    size = (grams[0].trace() / grams[1].trace()).sqrt().item()
    common = [off_diagonal(gram).mean().clamp(min=0).sqrt().item() for gram in grams]
    mean = errors.mean(0)
    values = torch.linalg.svdvals(mean.unflatten(0, (n_head, -1))).square()
    growth = F.cosine_similarity(-mean.flatten(), w_q.flatten(), dim=0).item()
    return [
        f"{size:.2g}",
        "{:+.3f} ± {:.3f}".format(*adds_up(errors)),
        f"{common[0] / common[1]:.2g}" if common[1] else "–",
        f"{(values[:, 0].sum() / values.sum()).item():.2f}",
        f"{growth:+.3f}",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--precision", nargs="+", help="default: the run's own, and fa2")
    parser.add_argument("--batches", type=int, default=40)
    args = parser.parse_args()
    try:
        if args.batches < 3:
            raise ValueError(f"--batches must be at least 3, got {args.batches}")
        saved = TrainConfig(**json.loads((args.out_dir / "config.json").read_text()))
        if saved.qk_norm:
            raise ValueError(f"{args.out_dir}: qk_norm stands between W_Q and the error of dQ")
        arithmetics = args.precision or [saved.precision, "fa2"]
        for arithmetic in arithmetics:
            if Precision.parse(arithmetic).rounding == "stochastic":
                raise ValueError(f"{arithmetic}: its error would be of another draw than its dO")
        fixed = dict(out_dir=str(args.out_dir), attention="flash", dropout=0.0, init_from="resume")
        config = replace(saved, precision=arithmetics[0], **fixed)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dtype = choose_dtype(config, device)
        model = initial_model(config)[0].to(device)
        batches = Batches(config, model.config.vocab_size)
        tokens = [torch.cat(list(batches.evaluation("train", i))) for i in range(args.batches)]
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    layers = [block.attn for block in model.transformer.h]
    print("| arithmetic | layer | size | adds up | mean | rank 1 | growth |\n" + "|---" * 7 + "|")
    for arithmetic in arithmetics:
        for layer in layers:
            layer.precision = arithmetic
        found = [gradient_errors(model, batch.to(device), dtype) for batch in tokens]
        for i, layer in enumerate(layers):
            errors, dw_q = (torch.stack([both[which][i] for both in found]) for which in (0, 1))
            w_q = layer.c_attn.weight[: layer.c_attn.in_features].detach().float()
            row = [f"`{arithmetic}`", str(i), *cells(errors, dw_q, w_q, layer.n_head)]
            print("| " + " | ".join(row) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
