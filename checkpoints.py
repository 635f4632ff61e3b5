"""A run's folder, where its weights come from, and its checkpoints: written whole, few kept."""

import json
import os
import shutil
from pathlib import Path

import torch

from batches import read_vocab_size
from config import ConfigError, TrainConfig
from diagnostics import LossWatch
from model import GPT, PRETRAINED, GPTConfig


def prepare_out_dir(config: TrainConfig, about: dict[str, dict]) -> Path:
    """Create out_dir and in it a JSON file for each entry of `about`. An earlier run in it is moved
    aside unless this one resumes it.

    Raises:
        ConfigError: it is not writable.
    """
    out = Path(config.out_dir)
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / ".writable").touch()
        (out / ".writable").unlink()
    except OSError as error:
        raise ConfigError(f"out_dir={config.out_dir} is not writable: {error}") from None
    names = ("metrics.jsonl", "config.json", "environment.json", "wandb")
    earlier = [p for p in (*out.glob("ckpt*.pt"), *(out / name for name in names)) if p.exists()]
    if earlier and config.init_from != "resume":
        number = 1
        while (aside := out / f"previous-{number}").exists():
            number += 1
        aside.mkdir()
        for path in earlier:
            path.rename(aside / path.name)
        print(f"{out} holds an earlier run: moved to {aside}")
    for name, content in about.items():
        (out / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    return out


def load_checkpoint(path: Path, config: TrainConfig) -> dict:
    """Read a checkpoint, ours or nanoGPT's, whose model is the one `config` describes.

    Raises:
        ConfigError: no file, not a checkpoint, or one of another shape.
    """
    if not path.is_file():
        raise ConfigError(f"init_from=resume, but {path} does not exist")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        args, weights = checkpoint["model_args"], checkpoint["model"]
        prefix = "_orig_mod."  # of weights saved from a compiled model
        checkpoint["model"] = {k.removeprefix(prefix): v for k, v in weights.items()}
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".split("\n")[0]
        raise ConfigError(
            f"checkpoint {path} is truncated or not a checkpoint ({reason})"
        ) from None
    for key in ("n_layer", "n_head", "n_embd", "bias"):
        if args.get(key) != getattr(config, key):
            theirs, ours = args.get(key), getattr(config, key)
            raise ConfigError(f"checkpoint {path} has {key}={theirs}, the config has {ours}")
    if checkpoint.get("iter_num", 0) > config.max_iters:
        step = checkpoint["iter_num"]
        raise ConfigError(f"{path} is of step {step}, beyond max_iters={config.max_iters}")
    if config.block_size > args["block_size"]:
        limit = args["block_size"]
        raise ConfigError(f"block_size={config.block_size} is beyond the {limit} of {path}")
    return checkpoint


def initial_model(config: TrainConfig) -> tuple[GPT, dict]:
    """The model on the CPU, from scratch, the last checkpoint or OpenAI's weights, and the
    checkpoint, empty if there is none.

    Raises:
        ConfigError: a checkpoint or download that cannot be used.
    """
    torch.manual_seed(config.seed)
    checkpoint = {}
    if config.init_from == "resume":
        checkpoint = load_checkpoint(Path(config.out_dir) / "ckpt.pt", config)
    keys = ("dropout", "attention", "precision", "qk_norm")
    chosen = {key: getattr(config, key) for key in keys}
    if config.init_from in PRETRAINED:
        try:
            model = GPT.from_pretrained(config.init_from, **chosen)
        except (ImportError, OSError) as error:
            raise ConfigError(f"init_from={config.init_from} did not download: {error}") from None
    else:
        keys = ("n_layer", "n_head", "n_embd", "bias", "block_size")
        shape = {key: getattr(config, key) for key in keys}
        shape["vocab_size"] = read_vocab_size(config.data_dir) or 50304  # GPT-2's
        if checkpoint:
            shape |= {key: checkpoint["model_args"][key] for key in ("vocab_size", "block_size")}
        model = GPT(GPTConfig(**shape, **chosen))
        if checkpoint:
            _restore_weights(model, checkpoint["model"])
    if config.block_size < model.config.block_size:
        model.crop_block_size(config.block_size)
    return model, checkpoint


def restore_optimizer(optimizer: torch.optim.Optimizer, checkpoint: dict):
    """Load the moments and step counts that a checkpoint has; settings stay the config's own.

    Raises:
        ConfigError: it has none, or another model's.
    """
    settings = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    try:
        optimizer.load_state_dict(checkpoint["optimizer"])
    except (KeyError, ValueError) as error:
        raise ConfigError(f"the checkpoint's optimizer does not fit its model: {error}") from None
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group |= own
    for param, state in optimizer.state.items():
        state["step"] = state["step"].to(param.device)  # where the fused step wants it
        for key in ("exp_avg", "exp_avg_sq"):  # positions may have been cropped
            state[key] = state[key][: len(param)].contiguous()


class Checkpoints:
    """ckpt.pt (the last), ckpt_best.pt and ckpt_before_rise.pt of one out_dir.

    Args:
        watch: tells when the loss began to rise.
        saved_iter: step of the ckpt.pt that is there, if any.
    """

    def __init__(self, out: Path, watch: LossWatch, saved_iter: int):
        self.last, self.best = out / "ckpt.pt", out / "ckpt_best.pt"
        self.before_rise = out / "ckpt_before_rise.pt"
        self.watch, self.saved_iter, self.kept_for = watch, saved_iter, None

    def save(self, checkpoint: dict, best: bool):
        """Write the last checkpoint, which may be the best, replacing each name in one step."""
        self.keep_before_rise()
        part = self.last.with_suffix(".part")
        torch.save(checkpoint, part)
        if best:
            _link(part, self.best)
        os.replace(part, self.last)
        self.saved_iter = checkpoint["iter_num"]

    def keep_before_rise(self):
        """While the loss is rising, set the last checkpoint from before the rise aside. It is not
        replaced until the loss has been at a new low."""
        since, low = self.watch.rising_since, self.watch.lowest_iter
        if since is None or self.kept_for == low or self.saved_iter > since:
            return
        if self.last.exists():
            _link(self.last, self.before_rise)
            self.kept_for = low


def _restore_weights(model: GPT, weights: dict):
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        detail = str(error).split("\n")[1].strip()
        raise ConfigError(f"the checkpoint's weights do not fit its model_args: {detail}") from None


def _link(source: Path, target: Path):
    """Give a file a second name, replacing what had it."""
    part = target.with_suffix(".link")
    part.unlink(missing_ok=True)
    try:
        os.link(source, part)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, part)
    os.replace(part, target)
