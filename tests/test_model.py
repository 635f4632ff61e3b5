"""GPT-2 as nanoGPT has it."""

import pytest
import torch

from model import GPT, GPTConfig

SMALL = dict(block_size=32, vocab_size=64, n_layer=2, n_head=2, n_embd=32)


@pytest.mark.parametrize(
    ("shape", "count", "without_positions"),
    [
        (dict(vocab_size=50257, bias=True), 124_439_808, 123_653_376),
        (dict(bias=False), 124_373_760, 123_587_328),
    ],
)
def test_parameter_counts(shape, count, without_positions):
    with torch.device("meta"):
        model = GPT(GPTConfig(**shape))
    assert model.num_params() == count
    assert model.num_params(positions=False) == without_positions


def test_state_dict_has_nanogpts_names():
    model = GPT(GPTConfig(**SMALL, bias=True))
    layer = [
        "ln_1.weight", "ln_1.bias", "attn.c_attn.weight", "attn.c_attn.bias",
        "attn.c_proj.weight", "attn.c_proj.bias", "ln_2.weight", "ln_2.bias",
        "mlp.c_fc.weight", "mlp.c_fc.bias", "mlp.c_proj.weight", "mlp.c_proj.bias",
    ]  # fmt: skip
    names = ["transformer.wte.weight", "transformer.wpe.weight"]
    names += [f"transformer.h.{i}.{name}" for i in range(2) for name in layer]
    names += ["transformer.ln_f.weight", "transformer.ln_f.bias", "lm_head.weight"]
    assert list(model.state_dict()) == names
    assert model.lm_head.weight is model.transformer.wte.weight


def test_initialization():
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=64, vocab_size=256, n_layer=8, n_head=2, n_embd=128))
    block = model.transformer.h[0]
    assert block.attn.c_attn.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.mlp.c_proj.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert not block.mlp.c_fc.bias.any()


def loss_and_gradients(model, attention, device, **options):
    torch.manual_seed(0)
    small = GPT(GPTConfig(**SMALL, attention=attention, **options)).to(device)
    run = torch.compile(small, fullgraph=True) if model == "compiled" else small
    tokens = torch.randint(0, 64, (4, 33), generator=torch.Generator().manual_seed(1)).to(device)
    with torch.autocast(device, torch.bfloat16):
        _, loss = run(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    return loss.item(), {name: p.grad for name, p in small.named_parameters()}


@pytest.mark.parametrize("attention", ["flash", "math", "math,flash"])
def test_attentions_agree(attention, device):
    """Every attention computes the same function, to BF16's precision."""
    loss, gradients = loss_and_gradients("eager", attention, device, precision="fa2")
    expected, expected_gradients = loss_and_gradients("eager", "sdpa", device)
    assert loss == pytest.approx(expected, abs=2e-3)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=0.1, atol=2e-3)


@pytest.mark.parametrize("precision", ["official,stable=paper", "fa2"])
def test_compiled_whole_with_the_same_gradients(precision, device):
    """No graph break, and no dtype that only one of the two gets right."""
    loss, gradients = loss_and_gradients("eager", "flash", device, precision=precision)
    compiled, compiled_gradients = loss_and_gradients(
        "compiled", "flash", device, precision=precision
    )
    assert loss == pytest.approx(compiled, abs=2e-3)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, compiled_gradients[name], rtol=0.1, atol=2e-3)


def test_a_longer_text_than_block_size_is_refused():
    with pytest.raises(ValueError, match="33 tokens, but the model's block_size is 32"):
        GPT(GPTConfig(**SMALL))(torch.zeros(1, 33, dtype=torch.long))


def test_openais_weights_are_transposed_into_place(monkeypatch, tmp_path):
    """from_pretrained on a file with the hub's names and layouts gives back the same model."""
    huggingface_hub = pytest.importorskip("huggingface_hub")

    monkeypatch.setattr(GPTConfig, "__init__", _shrunk(GPTConfig.__init__))
    ours = GPT(GPTConfig())
    hub = {}
    for name, weight in ours.state_dict().items():
        conv1d = any(part in name for part in (".c_attn.w", ".c_proj.w", ".c_fc.w"))
        hub[name.removeprefix("transformer.")] = weight.t().contiguous() if conv1d else weight
    del hub["lm_head.weight"]
    torch.save(hub, tmp_path / "pytorch_model.bin")
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda repo, file: str(tmp_path / file))
    loaded = GPT.from_pretrained("gpt2")
    for name, weight in ours.state_dict().items():
        assert torch.equal(weight, loaded.state_dict()[name])


def _shrunk(init):
    """A GPTConfig that ignores its arguments and is small."""
    return lambda self, **_: init(self, **SMALL, bias=True)


def test_qk_norm_bounds_the_scores(device):
    """Queries and keys at RMS 1: however large W_Q and W_K are, the output is that of their
    directions."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**SMALL, qk_norm=True)).to(device)
    tokens = torch.randint(64, (2, 32), device=device)
    logits, _ = model(tokens)
    with torch.no_grad():
        for block in model.transformer.h:
            block.attn.c_attn.weight[: 2 * 32] *= 50
            if block.attn.c_attn.bias is not None:
                block.attn.c_attn.bias[: 2 * 32] *= 50
    torch.testing.assert_close(model(tokens)[0], logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("precision", ["official/fa2@1;paper", "paper,rounding=stochastic"])
def test_layers_and_heads_may_differ(precision, device):
    loss, gradients = loss_and_gradients("eager", "flash", device, precision=precision)
    other, _ = loss_and_gradients("eager", "flash", device, precision="fa2")
    assert loss == pytest.approx(other, rel=1e-2)
    assert all(g.isfinite().all() for g in gradients.values())
