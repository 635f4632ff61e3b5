"""
Train GPT-2 in BF16 with the original or the stabilized flash attention, or a control.

    python train.py configs/lab_original.py --dataset=<folder>
    torchrun --standalone --nproc_per_node=4 train.py configs/paper_original.py

out_dir gets metrics.jsonl, config.json, environment.json, ckpt.pt (the last), ckpt_best.pt (lowest
validation loss) and ckpt_before_rise.pt. --help lists every key.
"""

import math
import os
import signal
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import diagnostics
from attention_statistics import attention_statistics
from batches import Batches, Recorder
from checkpoints import Checkpoints, initial_model, prepare_out_dir, restore_optimizer
from config import ConfigError, TrainConfig, parse_args
from diagnostics import LossWatch, MetricsLog, NonFiniteError, start_wandb
from model import GPT, PRETRAINED
from processes import choose_dtype, seed, start_process, tell_once, together


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
    signalled: float = 0.0  # when SIGINT or SIGTERM came, by time.monotonic
    stopped: str = ""  # why the loop must end early; the same on all ranks
    started: float = field(default_factory=time.perf_counter)
    interval_started: float | None = None  # when step `reported` was; None while compiling
    reported: int = 0


def build(config: TrainConfig, rank: int, world_size: int, device: torch.device) -> Run:
    """Check and build everything that needs no other process, and write nothing."""
    dtype = choose_dtype(config, device)
    raw_model, saved = initial_model(config)
    raw_model.to(device)
    optimizer = raw_model.configure_optimizer(
        config.weight_decay, config.learning_rate, (config.beta1, config.beta2)
    )
    if saved:
        restore_optimizer(optimizer, saved)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    if saved.get("scaler"):
        scaler.load_state_dict(saved["scaler"])
    batches = Batches(config, raw_model.config.vocab_size, rank, world_size)
    start_iter = saved.get("iter_num", 0)
    if start_iter < config.max_iters:
        next(batches.training(start_iter))  # or its error, before anything is written
    model = torch.compile(raw_model) if config.compile else raw_model
    return Run(
        config, rank, world_size, device, dtype, raw_model, model, model, optimizer, scaler,
        batches, LossWatch(saved.get("loss_watch")), start_iter,
        best_val_loss=float(saved.get("best_val_loss", math.inf)), wandb_id=saved.get("wandb_id"),
    )  # fmt: skip


def set_up(config: TrainConfig) -> Run:
    """Make a run ready, on all processes or none. Nothing is written before all could be built.

    Raises:
        ConfigError: input that cannot be trained on.
    """
    if config.init_from in PRETRAINED:
        config = replace(config, **PRETRAINED[config.init_from], bias=True)
    rank, world_size, device = start_process(config)
    run = together(lambda: build(config, rank, world_size, device), world_size)
    together(lambda: open_logs(run), world_size)
    if world_size > 1:
        run.parallel_model = DistributedDataParallel(run.model, gradient_as_bucket_view=True)
    return run


def open_logs(run: Run):
    """Open what rank 0 writes to, and say what the run is."""
    if run.rank != 0:
        return
    config = run.config
    if config.record_batches:
        run.recorder = Recorder(config.record_batches, run.start_iter)
    about = diagnostics.about(config, run.raw_model, run.device, run.world_size)
    out = prepare_out_dir(config, about)
    wandb_run = start_wandb(about, str(out), run.wandb_id) if config.wandb_log else None
    run.wandb_id = wandb_run.id if wandb_run else run.wandb_id
    run.log = MetricsLog(out / "metrics.jsonl", run.start_iter, wandb_run)
    run.checkpoints = Checkpoints(out, run.watch, run.start_iter)
    devices = f"{run.world_size} × {about['environment']['device']}"
    print(diagnostics.summary(config, run.raw_model, devices, run.dtype))


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
    config = run.config
    read_losses(run, step)
    began = time.perf_counter()
    seed(config, step, run.rank, run.world_size)
    losses = estimate_loss(run)
    if run.rank == 0:
        line = {"iter": step, "train/loss": losses["train"], "val/loss": losses["val"]}
        if config.log_attention:
            tokens = next(run.batches.evaluation("train", 0))
            line |= attention_statistics(run.raw_model, lambda: forward(run, run.raw_model, tokens))
        run.log.write(line)
    is_best = losses["val"] < run.best_val_loss
    run.best_val_loss = min(run.best_val_loss, losses["val"])
    if step > run.start_iter and (is_best or config.always_save_checkpoint):
        save(run, step, is_best)
    if run.interval_started is not None:
        run.interval_started += time.perf_counter() - began


def save(run: Run, step: int, is_best: bool = False):
    """Checkpoint the run as it is before `step`. No process goes on, or ends, before it is."""
    if run.rank == 0:
        checkpoint = {
            "model": run.raw_model.state_dict(),
            "optimizer": run.optimizer.state_dict(),
            "model_args": asdict(run.raw_model.config),
            "iter_num": step,
            "best_val_loss": run.best_val_loss,
            "config": asdict(run.config),
            "loss_watch": run.watch.state,
            "scaler": run.scaler.state_dict(),
            "wandb_id": run.wandb_id,
        }
        run.checkpoints.save(checkpoint, is_best)
    if run.world_size > 1:
        dist.barrier()


def train(run: Run):
    """The loop, from the first step, or the checkpoint's, to the last.

    Raises:
        ConfigError: a batch that cannot be trained on.
        NonFiniteError: the weights before it are saved.
        KeyboardInterrupt: a second signal; the first saves the run and leaves the loop.
    """
    config, optimizer, scaler = run.config, run.optimizer, run.scaler
    params = list(run.raw_model.parameters())
    # Becomes 1 with the first loss or gradient norm that is not finite, and stays so: the fused
    # optimizer reads it on the device and leaves the weights alone.
    non_finite = torch.zeros((), device=run.device)

    for step in range(run.start_iter, config.max_iters + 1):
        lr = learning_rate(config, step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        if step % config.eval_interval == 0 or step == config.max_iters or config.eval_only:
            evaluate(run, step)
        if step == config.max_iters or config.eval_only:
            break

        # Gradients of the global batch; DDP averages them with the last micro-batch's.
        seed(config, step, run.rank, run.world_size)
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
        grad_norm = nn.utils.clip_grad_norm_(params, config.grad_clip or math.inf)
        non_finite.logical_or_(~loss.isfinite())
        if not scaler.is_enabled():
            non_finite.logical_or_(~grad_norm.isfinite())
            optimizer.found_inf = non_finite
            optimizer.step()
        elif not non_finite:  # the scaler skips infinite gradients itself and lowers its scale
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad(set_to_none=True)

        run.pending.append(torch.stack([loss, grad_norm]))
        if run.recorder:
            run.recorder.write(run.batches.offsets(step))
        logging = step % config.log_interval == 0 or step + 1 == config.max_iters
        if logging or (run.signalled and run.world_size == 1):
            report(run, step, lr)
        if run.stopped:
            read_losses(run, step + 1)
            save(run, step + 1)
            break


def read_losses(run: Run, step: int) -> list[list[float]]:
    """Read losses and gradient norms of the steps before `step` off the device and judge them."""
    if not run.pending:
        return []
    values = torch.stack(run.pending).tolist()  # waits for the device
    run.pending.clear()
    for at, (loss, grad_norm) in enumerate(values, step - len(values)):
        scaling = run.scaler.is_enabled() and run.scaler.get_scale() >= 1
        if not (math.isfinite(loss) and (math.isfinite(grad_norm) or scaling)):
            save(run, at)
            if run.rank == 0:
                run.log.write({"event": "non_finite", "iter": at})
            raise NonFiniteError(f"step {at}: loss {loss}, gradient norm {grad_norm}")
        for event in run.watch.update(at, loss):
            if run.rank == 0:
                run.log.write(event)
            if run.config.stop_on_explosion and event["event"] == "explosion":
                run.stopped = "exploded"
    if run.rank == 0:
        run.checkpoints.keep_before_rise()
    return values


def report(run: Run, step: int, lr: float):
    """Log a step, and agree on whether it is the last."""
    config = run.config
    loss, grad_norm = read_losses(run, step + 1)[-1]
    now, speed, mfu = time.perf_counter(), None, None
    if run.interval_started is not None:  # not while compiling
        speed = (step - run.reported) * config.tokens_per_iter / (now - run.interval_started)
        if peak := diagnostics.peak_flops(run.device):
            mfu = speed * run.raw_model.flops_per_token() / (peak * run.world_size)
    run.interval_started, run.reported = now, step
    if run.rank == 0:
        line = {"iter": step, "loss": loss, "lr": lr, "grad_norm": grad_norm, "mfu": mfu}
        line |= {"tokens": (step + 1) * config.tokens_per_iter, "tokens_per_second": speed}
        line |= {"memory_gib": diagnostics.memory_gib(run.device), "time": now - run.started}
        run.log.write(line)

    signalled = torch.tensor(float(run.signalled > 0), device=run.device)
    if run.world_size > 1:
        dist.all_reduce(signalled, op=dist.ReduceOp.MAX)
    if signalled.item():
        run.stopped = "interrupted"


def main(argv: list[str]) -> int:
    """Train by command line; the exit code: 0, 2 bad input, 3 a loss not finite, 130 a signal."""
    run, say = None, partial(print, file=sys.stderr)

    def on_signal(number, frame):
        if run is None or 0 < run.signalled < time.monotonic() - 2:  # torchrun repeats it at once
            raise KeyboardInterrupt
        if not run.signalled:
            say("stopping after this step, or the next that is logged; once more: at once")
        run.signalled = run.signalled or time.monotonic()

    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGTERM, on_signal)
    code = 0
    try:
        run = set_up(parse_args(argv))
        train(run)
        code = 130 if run.stopped == "interrupted" else 0
    except ConfigError as error:
        (say if run else tell_once)(f"error: {error}")
        code = 2
    except NonFiniteError as error:
        if run.rank == 0:
            say(f"error: {error}; the weights before it are in {run.config.out_dir}")
        code = 3
    except torch.OutOfMemoryError as error:
        say(f"error: {error} A smaller micro_batch_size needs less.")
        code = 1
    except KeyboardInterrupt:
        say("interrupted; --init_from=resume goes on from the last checkpoint")
        code = 130
    if run is not None and run.log:
        run.log.close(code)
    return code


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    if dist.is_initialized():  # gloo's threads can abort the interpreter on its own way out
        sys.stdout.flush()
        os._exit(exit_code)
    sys.exit(exit_code)
