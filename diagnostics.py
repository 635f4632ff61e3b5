"""
What is measured inside a run: the log of its metrics, its explosion, the GPU's peak, the machine.
"""

import json
import math
import netrc
import os
import platform
import resource
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import ClassVar

import torch

from config import TrainConfig
from model import GPT

# Dense BF16 tensor-core peak, FLOP/s, from the vendors' data sheets; the first match counts.
PEAK_FLOPS = {
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "4090": 165e12,
    "3090": 71e12,
}


def peak_flops(device: torch.device) -> float | None:
    """Dense BF16 peak of a device in FLOP/s; None where it is not known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for model, peak in PEAK_FLOPS.items() if model in name), None)


def memory_gib(device: torch.device) -> float:
    """Peak memory of this process in GiB: allocated on the GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def about(config: TrainConfig, model: GPT, device: torch.device, world_size: int) -> dict:
    """What a record must name: the config, the model's size, versions, hardware, commit."""
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    environment = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton_version,
        "cuda": torch.version.cuda,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "world_size": world_size,
        "parameters": model.num_params(),
        "commit": commit(),
    }
    return {"config": asdict(config), "environment": environment}


def commit() -> str | None:
    """This repository's commit; without one, what the environment variable COMMIT says."""
    here = Path(__file__).resolve().parent

    def git(*command: str) -> str:
        result = subprocess.run(["git", "-C", here, *command], capture_output=True, text=True)
        return result.stdout.strip()

    try:
        if git("rev-parse", "--show-toplevel") == str(here):
            return git("describe", "--always", "--dirty", "--abbrev=40")
    except OSError:
        pass
    return os.environ.get("COMMIT")


def summary(config: TrainConfig, model: GPT, devices: str, dtype: torch.dtype) -> str:
    """What a run prints about itself before it starts."""
    total, without = model.num_params(), model.num_params(positions=False)
    precision = f", precision: {config.precision}" if "flash" in config.attention else ""
    return (
        f"number of parameters: {total / 1e6:.2f}M ({without / 1e6:.2f}M without positions)\n"
        f"tokens per step: {config.tokens_per_iter:,}; {devices}, {dtype}\n"
        f"attention: {config.attention}{precision}"
    )


class NonFiniteError(ArithmeticError):
    """A loss or gradient norm was NaN or infinite; it has not reached the weights."""


class LossWatch:
    """Tells from the training loss of each step whether the run has exploded.

    The loss is smoothed (exponential average over about 20 steps). A smoothed loss that stands
    1.0 nats above its lowest value for 100 steps is an "explosion", one that stands 0.1 above it
    a "rise".
    """

    DECAY = 0.95
    PATIENCE = 100  # steps
    MARGINS: ClassVar = {"rise": 0.1, "explosion": 1.0}  # nats

    def __init__(self, state: dict | None = None):
        fresh = {"sum": 0.0, "weight": 0.0, "lowest": math.inf, "lowest_iter": 0, "since": {}}
        self.state = fresh if state is None else state  # what a checkpoint keeps

    def update(self, step: int, loss: float) -> list[dict]:
        """Take one step's loss; return the events that it completes."""
        s = self.state
        s["sum"] = self.DECAY * s["sum"] + (1 - self.DECAY) * loss
        s["weight"] = self.DECAY * s["weight"] + (1 - self.DECAY)
        smoothed = s["sum"] / s["weight"]
        if smoothed < s["lowest"]:
            s["lowest"], s["lowest_iter"] = smoothed, step
        events = []
        for kind, margin in self.MARGINS.items():
            if smoothed < s["lowest"] + margin:
                s["since"].pop(kind, None)
            elif step - s["since"].setdefault(kind, step) == self.PATIENCE - 1:
                start = s["since"][kind]
                event = {"event": kind, "iter": start, "detected_iter": step}
                events.append(event | {"smoothed_loss": smoothed, "lowest_loss": s["lowest"]})
        return events

    @property
    def rising_since(self) -> int | None:
        """First step of the rise the loss is in, reported or not."""
        return self.state["since"].get("rise")

    @property
    def lowest_iter(self) -> int:
        """Step of the lowest smoothed loss."""
        return self.state["lowest_iter"]


class MetricsLog:
    """One JSON object a line in out_dir/metrics.jsonl and, if switched on, the same in wandb.

    Args:
        path: of metrics.jsonl.
        start: step the run starts from; lines of an interrupted run from there on are dropped.
        wandb_run: from `start_wandb`, or None.
    """

    def __init__(self, path: Path, start: int, wandb_run=None):
        lines = read_metrics(path) if path.exists() else []
        kept = [x for x in lines if x.get("detected_iter", x.get("iter", 0)) < start]
        text = "".join(json.dumps(line) + "\n" for line in kept)
        part = path.with_suffix(".part")
        part.write_text(text)
        os.replace(part, path)
        self.file = open(path, "a", buffering=1)  # noqa: SIM115, open as long as the run
        self.wandb_run = wandb_run

    def write(self, line: dict):
        """Log one line and print it; numbers JSON does not have (NaN, infinity) become null."""
        line = {k: _finite(v) for k, v in line.items()}
        self.file.write(json.dumps(line) + "\n")
        print(console_line(line), flush=True)
        if self.wandb_run:
            try:
                self.wandb_run.log(line)
            except Exception as error:
                print(f"wandb: {type(error).__name__}: {error}; the run goes on without it")
                self.wandb_run = None

    def close(self, exit_code: int):
        """Finish the wandb run, which would otherwise wait for the interpreter's end."""
        self.file.close()
        if self.wandb_run:
            try:
                self.wandb_run.finish(exit_code=exit_code)
            except Exception as error:
                print(f"wandb: {type(error).__name__}: {error}")


def console_line(line: dict) -> str:
    """What the console shows of a line of metrics.jsonl."""
    formats = {
        "train/loss": "train loss {:.4f}",
        "val/loss": "val loss {:.4f}",
        "detected_iter": "detected at {}",
        "smoothed_loss": "smoothed loss {:.3f}",
        "lowest_loss": "lowest {:.3f}",
        "loss": "loss {:.4f}",
        "lr": "lr {:.2e}",
        "grad_norm": "grad norm {:.3f}",
        "tokens_per_second": "{:,.0f} tokens/s",
        "mfu": "mfu {:.1%}",
    }
    parts = [text.format(line[k]) for k, text in formats.items() if line.get(k) is not None]
    return f"{line.get('event', 'iter')} {line['iter']}: " + ", ".join(parts)


def start_wandb(about: dict, folder: str, run_id: str | None):
    """A wandb run with `iter` as its axis, or None. Offline without a key or a network.

    Whatever goes wrong in wandb is printed and never raised.
    """
    config = about["config"]
    project, name = config["wandb_project"], config["wandb_run_name"]
    try:
        import wandb

        config = config | about["environment"]
        options = dict(project=project, name=name, config=config, dir=folder, id=run_id)
        options |= dict(resume="allow", settings=wandb.Settings(init_timeout=30))
        try:
            mode = None if "WANDB_MODE" in os.environ or _has_wandb_key() else "offline"
            run = wandb.init(**options, mode=mode)
        except Exception as error:
            print(f"wandb: {type(error).__name__}: {error}; going on offline")
            run = wandb.init(**options, mode="offline")
        run.define_metric("iter")
        run.define_metric("*", step_metric="iter")
        return run
    except Exception as error:
        print(f"wandb: {type(error).__name__}: {error}; the run goes on without it")
        return None


def read_metrics(path: Path) -> list[dict]:
    """The lines of a metrics.jsonl, up to one that a kill cut off.

    Raises:
        OSError: no such file.
    """
    lines = []
    for text in path.read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines


def _has_wandb_key() -> bool:
    """Whether a key is set; asking wandb itself would prompt for one."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return netrc.netrc().authenticators("api.wandb.ai") is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _finite(value: object) -> object:
    """The value, or list of values, with None for NaN and infinity."""
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
