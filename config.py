"""
Every key of a run, its default and its meaning; `parse_args` turns a command line into one.

    python train.py configs/x.py --key=value …

Config files first, then flags, in the order given. A config file is plain Python whose public
names are keys. Keys, defaults and meanings are nanoGPT's wherever it has them, so nanoGPT's own
config files run unmodified.
"""

import inspect
import math
import re
import runpy
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType

from model import PRETRAINED, of_layers
from precision import of_heads

ATTENTIONS = ("flash", "sdpa", "math")


class ConfigError(ValueError):
    """Bad input, told in one line: what was wrong, what was expected, where."""


@dataclass(frozen=True)
class TrainConfig:
    # run
    out_dir: str = "out"  # folder of metrics.jsonl, config.json and checkpoints
    init_from: str = "scratch"  # scratch | resume | gpt2 | gpt2-medium | gpt2-large | gpt2-xl
    seed: int = 1337  # of weights, batches and dropout
    eval_interval: int = 2000  # steps between evaluations, each followed by a checkpoint
    eval_iters: int = 200  # batches an evaluation averages over, in each split
    eval_only: bool = False  # evaluate once, then exit
    log_interval: int = 1  # steps between lines of metrics.jsonl
    log_attention: bool = False  # at evaluations: rows of dS, norms of W_Q, scores, by layer
    always_save_checkpoint: bool = True  # at each evaluation, not only when validation improves
    stop_on_explosion: bool = False  # end the run once an explosion event is reported
    # wandb
    wandb_log: bool = False  # also log to Weights & Biases
    wandb_project: str = "owt"
    wandb_run_name: str = "gpt2"
    # data
    dataset: str = "openwebtext"  # folder below data/, or a path
    batch_size: int = 12  # times gradient_accumulation_steps: sequences a step
    gradient_accumulation_steps: int = 40  # counted over all GPUs
    micro_batch_size: int = 0  # sequences of one forward pass on one GPU; 0: batch_size
    block_size: int = 1024  # tokens of a sequence
    record_batches: str = ""  # folder to write each step's offsets into train.bin to
    replay_batches: str = ""  # folder to read them from (generated_indices_rank_<r>.txt)
    # model
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768  # width; a head is n_embd / n_head wide
    dropout: float = 0.0  # not inside flash attention, which has none
    bias: bool = False  # in linear layers and layer norms
    qk_norm: bool = False  # queries and keys of a head at RMS 1; not in GPT-2
    # attention
    attention: str = "sdpa"  # flash | sdpa | math, for all layers or one each: "math,flash,math"
    precision: str = "official"  # as "paper,stable=paper"; by layer "a;b", by head "a/b@0+6"
    # AdamW
    learning_rate: float = 6e-4  # the highest
    max_iters: int = 600000  # steps
    weight_decay: float = 1e-1  # of matrices and embeddings only
    beta1: float = 0.9
    beta2: float = 0.95
    grad_clip: float = 1.0  # of the global gradient norm; 0: none
    # learning rate
    decay_lr: bool = True  # warm-up, then cosine; False: constant
    warmup_iters: int = 2000  # steps of linear warm-up
    lr_decay_iters: int = 600000  # step at which min_lr is reached
    min_lr: float = 6e-5
    # system
    device: str = "auto"  # auto | cuda | cuda:<n> | cpu
    dtype: str = "auto"  # float32 | bfloat16 | float16 (scaled loss); auto: the best the device has
    compile: bool = True  # torch.compile the model
    deterministic: bool = False  # on one kind of GPU, the same seed gives the same bits
    backend: str = "auto"  # of torch.distributed: nccl | gloo; auto: nccl on GPUs

    def __post_init__(self):
        for name, (low, high) in BOUNDS.items():
            value = getattr(self, name)
            if not low <= value <= high:
                limit = f"at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
                raise ConfigError(f"{name} must be {limit}, got {value}")
        for name, pattern in PATTERNS.items():
            value = getattr(self, name)
            if not re.fullmatch(pattern, value):
                expected = pattern.replace("|", " | ").replace(r"(:\d+)?", "[:<n>]")
                raise ConfigError(f"{name} must be {expected}, got {value!r}")
        self._check_model()
        self._check_batches()

    def _check_model(self):
        if self.n_embd % self.n_head:
            raise ConfigError(
                f"n_embd must be a multiple of n_head, got {self.n_embd} and {self.n_head}"
            )
        layers = self.attention.split(",")
        if not set(layers) <= set(ATTENTIONS):
            raise ConfigError(
                f"attention must be of {', '.join(ATTENTIONS)}, got {self.attention!r}"
            )
        try:
            of_layers(layers, self.n_layer, "attention")
            for text in of_layers(self.precision.split(";"), self.n_layer, "precision"):
                of_heads(text, self.n_head)
        except ValueError as error:
            raise ConfigError(f"attention, precision: {error}") from None
        if self.init_from in PRETRAINED and self.block_size > 1024:
            raise ConfigError(f"block_size is at most 1024 for GPT-2, got {self.block_size}")
        if "flash" in layers:
            width = self.n_embd // self.n_head
            if not 16 <= width <= 128:
                raise ConfigError(
                    f"attention=flash takes heads 16 to 128 wide, got n_embd / n_head = {width}"
                )
            if self.dropout:
                raise ConfigError(f"dropout must be 0 with attention=flash, got {self.dropout}")

    def _check_batches(self):
        sequences = self.batch_size * self.gradient_accumulation_steps
        if sequences % self.micro_batch:
            raise ConfigError(
                f"micro_batch_size must divide batch_size · gradient_accumulation_steps = "
                f"{sequences}, got {self.micro_batch_size}"
            )

    @property
    def micro_batch(self) -> int:
        """Sequences of one forward pass on one GPU."""
        return self.micro_batch_size or self.batch_size

    @property
    def tokens_per_iter(self) -> int:
        return self.batch_size * self.gradient_accumulation_steps * self.block_size

    @property
    def data_dir(self) -> Path:
        """The dataset's folder: data/<dataset> beside this file, else the path as it is."""
        beside = Path(__file__).parent / "data" / self.dataset
        return beside if beside.is_dir() else Path(self.dataset)


BOUNDS = {
    "seed": (0, 2**32 - 1),
    "eval_interval": (1, math.inf),
    "eval_iters": (1, math.inf),
    "log_interval": (1, math.inf),
    "batch_size": (1, math.inf),
    "gradient_accumulation_steps": (1, math.inf),
    "micro_batch_size": (0, math.inf),
    "block_size": (1, math.inf),
    "n_layer": (1, math.inf),
    "n_head": (1, math.inf),
    "n_embd": (1, math.inf),
    "dropout": (0, 0.999),
    "learning_rate": (0, 1e3),
    "max_iters": (0, math.inf),
    "weight_decay": (0, 1e3),
    "beta1": (0, 0.999999),
    "beta2": (0, 0.999999),
    "grad_clip": (0, 1e30),
    "warmup_iters": (0, math.inf),
    "lr_decay_iters": (0, math.inf),
    "min_lr": (0, 1e3),
}

PATTERNS = {
    "init_from": "|".join(("scratch", "resume", *PRETRAINED)),
    "device": r"auto|cuda(:\d+)?|cpu",
    "dtype": "auto|float32|bfloat16|float16",
    "backend": "auto|nccl|gloo",
}

FIELDS = {f.name: f for f in fields(TrainConfig)}


def parse_args(argv: list[str]) -> TrainConfig:
    """Config files, then --key=value flags, over the defaults; --help prints the keys and exits.

    Raises:
        ConfigError: an argument of another form, or a key or value that does not fit.
    """
    if "--help" in argv or "-h" in argv:
        print(help_text())
        raise SystemExit(0)
    flags = [arg for arg in argv if arg.startswith("-")]
    for flag in flags:
        if not re.match(r"--\w+=", flag):
            raise ConfigError(f"usage: train.py [config.py …] [--key=value …], got {flag!r}")
    values = {}
    for file in (arg for arg in argv if arg not in flags):
        values |= _read_file(file)
    for flag in flags:
        key, _, text = flag.removeprefix("--").partition("=")
        values[key] = _from_text(key, text)
    config = TrainConfig(**values)
    if any(flag.startswith("--precision=") for flag in flags) and "flash" not in config.attention:
        raise ConfigError(
            f"precision={config.precision} is that of flash layers, but attention="
            f"{config.attention}: add --attention=flash, or choose a config that has it"
        )
    return config


def help_text() -> str:
    """Each key with its default and meaning, as the source of `TrainConfig` has them."""
    lines = [__doc__.strip(), ""]
    for line in inspect.getsource(TrainConfig).splitlines():
        if group := re.match(r"    # (.+)", line):
            lines += ["", group[1]]
        elif key := re.match(r"    (\w+): (\w+) = (.+?)(?:  # (.*))?$", line):
            lines.append(
                f"  --{key[1]}={key[3]}".ljust(42) + f" {key[2]}; {key[4] or ''}".rstrip("; ")
            )
    return "\n".join(lines)


def _read_file(path: str) -> dict:
    if not Path(path).is_file():
        hint = "; a flag is --key=value" if "=" not in path else f"; did you mean --{path}"
        raise ConfigError(f"no config file {path!r}{hint}")
    try:
        names = runpy.run_path(path)
    except Exception as error:
        raise ConfigError(f"config file {path}: {type(error).__name__}: {error}") from None
    names = {k: v for k, v in names.items() if k[0] != "_" and not isinstance(v, ModuleType)}
    return {key: _checked(key, value, f" in {path}") for key, value in names.items()}


def _checked(key: str, value: object, where: str = "") -> object:
    if key not in FIELDS:
        close = get_close_matches(key, FIELDS, 1)
        hint = f"did you mean {close[0]!r}?" if close else "--help lists the keys"
        raise ConfigError(f"unknown key {key!r}{where}; {hint}")
    wanted = FIELDS[key].type
    if wanted is float and type(value) is int:
        value = float(value)
    if type(value) is not wanted:
        raise ConfigError(
            f"{key} must be {wanted.__name__}, got {type(value).__name__} {value!r}{where}"
        )
    return value


def _from_text(key: str, text: str) -> object:
    wanted = FIELDS[key].type if key in FIELDS else str
    try:
        value = {"true": True, "false": False}[text.lower()] if wanted is bool else wanted(text)
    except (KeyError, ValueError):
        raise ConfigError(f"{key} must be {wanted.__name__}, got {text!r}") from None
    return _checked(key, value)
