"""
GPT-2 as nanoGPT defines it, with parameters under the same names, so its checkpoints load.

Each layer's attention is one of
    flash  the kernels of flash_attn_stable.py, with any `Precision`
    sdpa   torch's scaled_dot_product_attention
    math   the plain formula, softmax(scale · q kᵀ) v: the paper's "standard attention"

Shape suffixes: B batch, T time, C width, H heads, D head width, V vocabulary.
"""

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flash_attn_stable import flash_attention


@dataclass
class GPTConfig:
    block_size: int = 1024
    vocab_size: int = 50304  # GPT-2's 50257, padded to a multiple of 64
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True  # in linear layers and layer norms; GPT-2 has it
    attention: str = "sdpa"  # flash | sdpa | math, for all layers or comma-separated for each
    precision: str = "official"  # of flash layers, all or semicolon-separated each; precision.py
    qk_norm: bool = False  # q and k of a head at RMS 1: bounds the scores; not in GPT-2


PRETRAINED = {  # OpenAI's models, by init_from
    "gpt2": dict(n_layer=12, n_head=12, n_embd=768),
    "gpt2-medium": dict(n_layer=24, n_head=16, n_embd=1024),
    "gpt2-large": dict(n_layer=36, n_head=20, n_embd=1280),
    "gpt2-xl": dict(n_layer=48, n_head=25, n_embd=1600),
}


def of_layers(values: list[str], n_layer: int, key: str) -> list[str]:
    """One value for each layer, from one for all or one each."""
    if len(values) not in (1, n_layer):
        raise ValueError(f"{key} is one, or one for each of n_layer={n_layer}, not {len(values)}")
    return values * (n_layer // len(values))


class LayerNorm(nn.Module):
    """Layer norm whose bias is optional, under nanoGPT's parameter names."""

    def __init__(self, width: int, bias: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig, attention: str, precision: str):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head, self.dropout = config.n_head, config.dropout
        self.kind, self.precision, self.qk_norm = attention, precision, config.qk_norm
        self.attend = {"flash": self._flash, "sdpa": self._sdpa, "math": self._math}[attention]

    def forward(self, x_BTC: Tensor) -> Tensor:
        qkv_BTC = self.c_attn(x_BTC).split(x_BTC.shape[2], dim=2)
        q, k, v = (x.unflatten(2, (self.n_head, -1)).transpose(1, 2) for x in qkv_BTC)
        if self.qk_norm:
            q, k = (F.rms_norm(x, x.shape[-1:]) for x in (q, k))
        y_BHTD = self.attend(q, k, v)
        return self.resid_dropout(self.c_proj(y_BHTD.transpose(1, 2).flatten(2)))

    def _flash(self, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:
        qkv = (x.to(self.operand_dtype(x)) for x in (q_BHTD, k_BHTD, v_BHTD))
        return flash_attention(*qkv, causal=True, precision=self.precision).to(q_BHTD.dtype)

    @staticmethod
    def operand_dtype(x: Tensor) -> torch.dtype:
        """Of the kernels' operands: 16 bits whatever the rest of the model computes in."""
        return torch.float16 if x.dtype == torch.float16 else torch.bfloat16

    def _sdpa(self, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(
            q_BHTD, k_BHTD, v_BHTD, is_causal=True, dropout_p=dropout
        )

    def _math(self, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:
        # Under autocast: BF16 scores and products, FP32 softmax.
        T, D = q_BHTD.shape[2:]
        s_BHTT = (q_BHTD @ k_BHTD.mT) * D**-0.5
        future = torch.ones(T, T, dtype=torch.bool, device=s_BHTT.device).triu(1)
        p_BHTT = F.softmax(s_BHTT.masked_fill(future, -torch.inf), dim=-1)
        return F.dropout(p_BHTT, self.dropout, self.training) @ v_BHTD


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(F.gelu(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, config: GPTConfig, attention: str, precision: str):
        super().__init__()
        self.ln_1 = LayerNorm(config.n_embd, config.bias)
        self.attn = CausalSelfAttention(config, attention, precision)
        self.ln_2 = LayerNorm(config.n_embd, config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        attentions = of_layers(config.attention.split(","), config.n_layer, "attention")
        precisions = of_layers(config.precision.split(";"), config.n_layer, "precision")
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(config.vocab_size, config.n_embd),
                wpe=nn.Embedding(config.block_size, config.n_embd),
                drop=nn.Dropout(config.dropout),
                h=nn.ModuleList(map(partial(Block, config), attentions, precisions)),
                ln_f=LayerNorm(config.n_embd, config.bias),
            )
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)
        # Residual projections are scaled down by depth, as in the GPT-2 paper.
        for name, p in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(p, mean=0.0, std=0.02 / math.sqrt(2 * config.n_layer))

    def _init_weights(self, module: nn.Module):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)

    def num_params(self, positions: bool = True) -> int:
        """Parameters, the tied embedding counted once; without position embeddings if asked."""
        count = sum(p.numel() for p in self.parameters())
        return count if positions else count - self.transformer.wpe.weight.numel()

    def flops_per_token(self) -> int:
        """Of a forward and backward pass, causality ignored (arXiv 2204.02311, appendix B)."""
        c = self.config
        return 6 * self.num_params(positions=False) + 12 * c.n_layer * c.n_embd * c.block_size

    def forward(
        self, idx_BT: Tensor, targets_BT: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Logits and mean cross-entropy in nats.

        Returns:
            Logits [B, T, V] and the loss; without targets the last position's [B, 1, V] and None.
        """
        T, limit = idx_BT.shape[1], self.config.block_size
        if limit < T:
            raise ValueError(f"{T} tokens, but the model's block_size is {limit}")
        positions = torch.arange(T, device=idx_BT.device)
        x_BTC = self.transformer.wte(idx_BT) + self.transformer.wpe(positions)
        x_BTC = self.transformer.drop(x_BTC)
        for block in self.transformer.h:
            x_BTC = block(x_BTC)
        x_BTC = self.transformer.ln_f(x_BTC)
        if targets_BT is None:
            return self.lm_head(x_BTC[:, [-1]]), None
        logits_BTV = self.lm_head(x_BTC)
        loss = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), ignore_index=-1)
        return logits_BTV, loss

    def crop_block_size(self, block_size: int):
        """Keep the first position embeddings only."""
        self.config.block_size = block_size
        self.transformer.wpe.weight = nn.Parameter(self.transformer.wpe.weight[:block_size])

    def configure_optimizer(
        self, weight_decay: float, learning_rate: float, betas: tuple[float, float]
    ) -> torch.optim.AdamW:
        """Fused AdamW that decays matrices and embeddings, not biases and norms."""
        params = list(self.parameters())
        groups = [
            {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=True)

    @classmethod
    def from_pretrained(cls, name: str, **overrides) -> "GPT":
        """OpenAI's GPT-2 weights from the Hugging Face hub.

        Args:
            name: gpt2 | gpt2-medium | gpt2-large | gpt2-xl.
            overrides: of `GPTConfig`, where they do not change the shape.
        """
        from huggingface_hub import hf_hub_download  # comes with datasets

        model = cls(GPTConfig(**PRETRAINED[name], vocab_size=50257, bias=True, **overrides))
        path = hf_hub_download(f"openai-community/{name}", "pytorch_model.bin")
        theirs = torch.load(path, map_location="cpu", weights_only=True)
        theirs = {k.removeprefix("transformer."): v for k, v in theirs.items()}
        state = {}
        for key in model.state_dict():
            weight = theirs[key.removeprefix("transformer.").replace("lm_head", "wte")]
            conv1d = key.endswith(
                ("c_attn.weight", "attn.c_proj.weight", "c_fc.weight", "mlp.c_proj.weight")
            )
            state[key] = weight.t() if conv1d else weight  # Conv1D stores [in, out]
        model.load_state_dict(state)
        return model
