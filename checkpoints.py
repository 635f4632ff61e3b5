"""A run's folder and its checkpoints: read with their faults named, written whole, few kept."""

import os
import shutil
from pathlib import Path

import torch

from config import ConfigError, TrainConfig
from diagnostics import LossWatch


def prepare_out_dir(config: TrainConfig) -> Path:
    """Create out_dir. An earlier run in it is moved aside unless this one resumes it."""
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
        if args[key] != getattr(config, key):
            ours = getattr(config, key)
            raise ConfigError(f"checkpoint {path} has {key}={args[key]}, the config has {ours}")
    if config.block_size > args["block_size"]:
        limit = args["block_size"]
        raise ConfigError(f"block_size={config.block_size} is beyond the {limit} of {path}")
    return checkpoint


def restore_optimizer(optimizer: torch.optim.Optimizer, saved: dict):
    """Load the moments and step counts that a checkpoint has; settings stay the config's own."""
    settings = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    optimizer.load_state_dict(saved)
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

    def save(self, checkpoint: dict, best: bool, last: bool = True):
        """Write a checkpoint under its names, each replaced in one step."""
        self.keep_before_rise()
        part = self.last.with_suffix(".part")
        torch.save(checkpoint, part)
        if best:
            _link(part, self.best)
        if last:
            _link(part, self.last)
            self.saved_iter = checkpoint["iter_num"]
        part.unlink()

    def keep_before_rise(self):
        """While the loss is rising, set the last checkpoint from before the rise aside."""
        since = self.watch.rising_since
        if since not in (None, self.kept_for) and self.saved_iter <= since and self.last.exists():
            _link(self.last, self.before_rise)
            self.kept_for = since


def _link(source: Path, target: Path):
    """Give a file a second name, replacing what had it."""
    part = target.with_suffix(".link")
    part.unlink(missing_ok=True)
    try:
        os.link(source, part)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, part)
    os.replace(part, target)
