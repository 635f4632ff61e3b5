"""
Train GPT-2 in BF16 with the original or the stabilized flash attention, or a control.

    python train.py configs/lab_original.py --dataset=<folder>
    torchrun --standalone --nproc_per_node=4 train.py configs/paper_original.py

out_dir gets metrics.jsonl, config.json, environment.json, ckpt.pt (the last), ckpt_best.pt (lowest
validation loss) and ckpt_before_rise.pt. --help lists every key.
"""

import json
import math
import os
import signal
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from batches import Batches, Recorder, read_vocab_size
from checkpoints import Checkpoints, load_checkpoint, prepare_out_dir, restore_optimizer
from config import ConfigError, TrainConfig, parse_args
from diagnostics import LossWatch, MetricsLog, environment, memory_gib, peak_flops, start_wandb
from model import GPT, GPTConfig
from processes import choose_dtype, start_process


class NonFiniteError(ArithmeticError):
    """A loss or gradient norm was NaN or infinite; it has not reached the weights."""


@dataclass
class Run:
    """Everything the loop works with. What writes is None on ranks other than 0."""

    config: TrainConfig
    rank: int
    world_size: int
    device: torch.device
    dtype: torch.dtype
    raw_model: GPT
    model: nn.Module  # compiled if chosen
    parallel_model: nn.Module  # and wrapped by DDP on several processes
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    batches: Batches
    watch: LossWatch
    start_iter: int
    best_val_loss: float
    log: MetricsLog | None = None
    checkpoints: Checkpoints | None = None
    recorder: Recorder | None = None
    wandb_id: str | None = None
    pending: list[Tensor] = field(default_factory=list)  # (loss, gradient norm) on the device
    signalled: bool = False  # SIGINT or SIGTERM came
    stopped: str = ""  # why the loop must end early; the same on all ranks
    started: float = field(default_factory=time.perf_counter)
    interval_started: float | None = None  # of the steps in `pending`; None while compiling


def build_model(config: TrainConfig, checkpoint: dict | None) -> GPT:
    """The model on the CPU: from scratch, a checkpoint, or OpenAI's weights."""
    torch.manual_seed(config.seed)
    chosen = dict(dropout=config.dropout, attention=config.attention, precision=config.precision)
    if config.init_from.startswith("gpt2"):
        try:
            model = GPT.from_pretrained(config.init_from, **chosen)
        except (ImportError, OSError) as error:
            raise ConfigError(f"init_from={config.init_from} did not download: {error}") from None
    else:
        keys = ("n_layer", "n_head", "n_embd", "bias", "block_size")
        shape = {key: getattr(config, key) for key in keys}
        shape["vocab_size"] = read_vocab_size(config.data_dir)
        if checkpoint:
            shape |= {key: checkpoint["model_args"][key] for key in ("vocab_size", "block_size")}
        model = GPT(GPTConfig(**shape, **chosen))
        if checkpoint:
            model.load_state_dict(checkpoint["model"])
    if config.block_size < model.config.block_size:
        model.crop_block_size(config.block_size)
    return model


def set_up(config: TrainConfig) -> Run:
    """Check and build everything. Nothing is written before all of it has succeeded.

    Raises:
        ConfigError: input that cannot be trained on.
    """
    rank, world_size, device = start_process(config)
    dtype = choose_dtype(config, device)
    resuming = config.init_from == "resume"
    saved = load_checkpoint(Path(config.out_dir) / "ckpt.pt", config) if resuming else None
    raw_model = build_model(config, saved).to(device)
    optimizer = raw_model.configure_optimizer(
        config.weight_decay, config.learning_rate, (config.beta1, config.beta2)
    )
    if saved:
        restore_optimizer(optimizer, saved["optimizer"])
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    saved = saved or {}
    if saved.get("scaler"):
        scaler.load_state_dict(saved["scaler"])
    model = torch.compile(raw_model) if config.compile else raw_model
    run = Run(
        config, rank, world_size, device, dtype, raw_model, model, model, optimizer, scaler,
        batches=Batches(config, raw_model.config.vocab_size, rank, world_size),
        watch=LossWatch(saved.get("loss_watch")),
        start_iter=saved.get("iter_num", 0),
        best_val_loss=float(saved.get("best_val_loss", math.inf)),
    )  # fmt: skip
    if world_size > 1:
        run.parallel_model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if rank == 0:
        open_logs(run, saved.get("wandb_id"))
    return run


def open_logs(run: Run, wandb_id: str | None):
    """Open what rank 0 writes to, and say what the run is."""
    config = run.config
    out = prepare_out_dir(config)
    settings, machine = asdict(config), environment(run.device, run.world_size)
    (out / "config.json").write_text(json.dumps(settings, indent=1) + "\n")
    (out / "environment.json").write_text(json.dumps(machine, indent=1) + "\n")
    wandb_run = None
    if config.wandb_log:
        name = config.wandb_run_name
        wandb_run = start_wandb(config.wandb_project, name, settings | machine, str(out), wandb_id)
    run.wandb_id = wandb_run.id if wandb_run else wandb_id
    run.log = MetricsLog(out / "metrics.jsonl", run.start_iter, wandb_run)
    run.checkpoints = Checkpoints(out, run.watch, run.start_iter)
    if config.record_batches:
        run.recorder = Recorder(config.record_batches, run.start_iter)
    total, without = run.raw_model.num_params(), run.raw_model.num_params(positions=False)
    print(f"number of parameters: {total / 1e6:.2f}M ({without / 1e6:.2f}M without positions)")
    print(
        f"tokens per step: {config.tokens_per_iter:,}, in {run.dtype} on {run.world_size} × "
        f"{machine['device']}; attention {config.attention}, precision {config.precision}"
    )


def learning_rate(config: TrainConfig, step: int) -> float:
    """Linear warm-up, then cosine to min_lr at lr_decay_iters."""
    if not config.decay_lr:
        return config.learning_rate
    if step < config.warmup_iters:
        return config.learning_rate * (step + 1) / (config.warmup_iters + 1)
    if step >= config.lr_decay_iters:
        return config.min_lr
    progress = (step - config.warmup_iters) / (config.lr_decay_iters - config.warmup_iters)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return config.min_lr + cosine * (config.learning_rate - config.min_lr)


def forward(run: Run, model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean loss of a micro-batch, tokens int64 [sequences, block_size + 1] on the CPU."""
    if run.device.type == "cuda":
        tokens = tokens.pin_memory().to(run.device, non_blocking=True)
    with torch.autocast(run.device.type, dtype=run.dtype, enabled=run.dtype != torch.float32):
        return model(tokens[:, :-1], tokens[:, 1:])[1]


@torch.no_grad()
def estimate_loss(run: Run) -> dict[str, float]:
    """Mean loss over eval_iters fixed batches of each split, shared among the ranks."""
    config = run.config
    run.model.eval()
    losses = {}
    for split in ("train", "val"):
        total = torch.zeros((), dtype=torch.float64, device=run.device)
        for index in range(run.rank, config.eval_iters, run.world_size):
            for tokens in run.batches.evaluation(split, index):
                total += len(tokens) * forward(run, run.model, tokens)
        if run.world_size > 1:
            dist.all_reduce(total)
        losses[split] = total.item() / (config.eval_iters * config.batch_size)
    run.model.train()
    return losses


def evaluate(run: Run, step: int):
    """Log both splits' losses before `step`, then save what the config asks for."""
    began = time.perf_counter()
    losses = estimate_loss(run)
    if run.rank == 0:
        run.log.write({"iter": step, "train/loss": losses["train"], "val/loss": losses["val"]})
    is_best = losses["val"] < run.best_val_loss
    run.best_val_loss = min(run.best_val_loss, losses["val"])
    if step > run.start_iter and (is_best or run.config.always_save_checkpoint):
        save(run, step, is_best)
    if run.interval_started is not None:
        run.interval_started += time.perf_counter() - began


def save(run: Run, step: int, is_best: bool = False):
    """Checkpoint the run as it is before `step`."""
    if run.rank != 0:
        return
    run.checkpoints.save(
        {
            "model": run.raw_model.state_dict(),
            "optimizer": run.optimizer.state_dict(),
            "model_args": asdict(run.raw_model.config),
            "iter_num": step,
            "best_val_loss": run.best_val_loss,
            "config": asdict(run.config),
            "loss_watch": run.watch.state,
            "scaler": run.scaler.state_dict(),
            "wandb_id": run.wandb_id,
        },
        is_best,
    )


def train(run: Run):
    """The loop, from the run's first step or its checkpoint's to the last.

    Raises:
        ConfigError: a batch that cannot be trained on.
        NonFiniteError: the weights before it are saved.
        KeyboardInterrupt: a second signal; the first saves the run and leaves the loop.
    """
    config, optimizer, scaler = run.config, run.optimizer, run.scaler
    params = list(run.raw_model.parameters())
    # Becomes 1 with the first loss or gradient norm that is not finite, and stays so. The fused
    # optimizer reads it on the device and leaves the weights alone; nobody waits for it.
    non_finite = torch.zeros((), device=run.device)

    for step in range(run.start_iter, config.max_iters + 1):
        lr = learning_rate(config, step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        if step % config.eval_interval == 0 or step == config.max_iters:
            evaluate(run, step)
        if step == config.max_iters or config.eval_only:
            break

        # Gradients of the global batch; DDP averages them with the last micro-batch's.
        torch.manual_seed((config.seed * 1_000_003 + step) * run.world_size + run.rank)  # dropout
        micro_batches = list(run.batches.training(step))
        loss = torch.zeros((), device=run.device)
        for i, tokens in enumerate(micro_batches, 1):
            averaging = run.world_size == 1 or i == len(micro_batches)
            with nullcontext() if averaging else run.parallel_model.no_sync():
                micro_loss = forward(run, run.parallel_model, tokens) / len(micro_batches)
                scaler.scale(micro_loss).backward()
            loss += micro_loss.detach()
        if run.world_size > 1:
            dist.all_reduce(loss)
            loss /= run.world_size

        scaler.unscale_(optimizer)
        max_norm = config.grad_clip or math.inf
        grad_norm = nn.utils.clip_grad_norm_(params, max_norm)
        if scaler.is_enabled():  # it skips a step of infinite gradients and lowers its scale
            if loss.isfinite():
                scaler.step(optimizer)
            scaler.update()
        else:
            non_finite.logical_or_(~(loss.isfinite() & grad_norm.isfinite()))
            optimizer.found_inf = non_finite
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)

        run.pending.append(torch.stack([loss, grad_norm]))
        if run.recorder:
            run.recorder.write(run.batches.offsets(step))
        now = step % config.log_interval == 0 or step + 1 == config.max_iters
        if now or (run.signalled and run.world_size == 1):
            report(run, step, lr)
        if run.stopped:
            save(run, step + 1)
            break


def report(run: Run, step: int, lr: float):
    """Read the losses since the last report off the device, judge them, log the last."""
    config, events = run.config, []
    values = torch.stack(run.pending).tolist()  # waits for the device
    run.pending.clear()
    for at, (loss, grad_norm) in enumerate(values, step + 1 - len(values)):
        if not (math.isfinite(loss) and (math.isfinite(grad_norm) or run.scaler.is_enabled())):
            save(run, at)
            if run.rank == 0:
                run.log.write({"event": "non_finite", "iter": at})
            raise NonFiniteError(f"step {at}: loss {loss}, gradient norm {grad_norm}")
        events += run.watch.update(at, loss)

    now, speed, mfu = time.perf_counter(), None, None
    if run.interval_started is not None:  # not while compiling
        speed = len(values) * config.tokens_per_iter / (now - run.interval_started)
        if peak := peak_flops(run.device):
            mfu = speed * run.raw_model.flops_per_token() / (peak * run.world_size)
    run.interval_started = now
    if run.rank == 0:
        run.checkpoints.keep_before_rise()
        line = {"iter": step, "loss": loss, "lr": lr, "grad_norm": grad_norm}
        line |= {"tokens": (step + 1) * config.tokens_per_iter, "tokens_per_second": speed}
        line |= {"mfu": mfu, "memory_gib": memory_gib(run.device), "time": now - run.started}
        for entry in (line, *events):
            run.log.write(entry)

    if config.stop_on_explosion and any(event["event"] == "explosion" for event in events):
        run.stopped = "the loss exploded"
    signalled = torch.tensor(float(run.signalled), device=run.device)
    if run.world_size > 1:
        dist.all_reduce(signalled, op=dist.ReduceOp.MAX)
    if signalled.item():
        run.stopped = "interrupted"


def main(argv: list[str]) -> int:
    """Train by command line; the exit code: 0, 2 bad input, 3 a loss not finite, 130 a signal."""
    run = None

    def on_signal(number, frame):
        if run is None or run.signalled:
            raise KeyboardInterrupt
        run.signalled = True
        print("stopping after this step; once more to stop at once", file=sys.stderr)

    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGTERM, on_signal)
    try:
        run = set_up(parse_args(argv))
        train(run)
    except ConfigError as error:
        if run is not None or os.environ.get("RANK", "0") == "0":  # not once for each rank
            print(f"error: {error}", file=sys.stderr)
        return 2
    except NonFiniteError as error:
        if run.rank == 0:
            out = run.config.out_dir
            print(f"error: {error}; the weights before it are in {out}", file=sys.stderr)
        return 3
    except torch.OutOfMemoryError as error:
        print(f"error: {error} A smaller micro_batch_size needs less.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; --init_from=resume goes on from the last checkpoint", file=sys.stderr)
        return 130
    if dist.is_initialized():
        dist.destroy_process_group()
    return 130 if run.stopped == "interrupted" else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
