"""Which process of a run this is, on which device, in which precision."""

import os
import signal
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from config import ConfigError, TrainConfig


def start_process(config: TrainConfig) -> tuple[int, int, torch.device]:
    """Choose rank, world size and device, and join torchrun's process group if there is one."""
    on_gpu = config.device.startswith("cuda") or (
        config.device == "auto" and torch.cuda.is_available()
    )
    if on_gpu and not torch.cuda.is_available():
        raise ConfigError(f"device={config.device}, but torch sees no CUDA GPU")
    distributed = "RANK" in os.environ  # started by torchrun
    rank = int(os.environ["RANK"]) if distributed else 0
    world_size = int(os.environ["WORLD_SIZE"]) if distributed else 1
    name = "cpu" if not on_gpu else "cuda:0" if config.device in ("auto", "cuda") else config.device
    if on_gpu and distributed:
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    device = torch.device(name)
    needed = device.index + 1 if on_gpu else 0
    if on_gpu and distributed:
        needed = int(os.environ.get("LOCAL_WORLD_SIZE", needed))
    if on_gpu and needed > torch.cuda.device_count():
        raise ConfigError(
            f"{name}: {needed} GPUs are needed on this machine, torch sees "
            f"{torch.cuda.device_count()}"
        )
    if distributed and config.backend == "nccl" and not on_gpu:
        raise ConfigError("backend=nccl needs GPUs; on CPUs choose gloo")
    sequences = config.batch_size * config.gradient_accumulation_steps
    if sequences % (world_size * config.micro_batch):
        raise ConfigError(
            f"batch_size · gradient_accumulation_steps = {sequences} sequences do not divide among "
            f"{world_size} processes in micro-batches of {config.micro_batch}: change "
            "gradient_accumulation_steps or micro_batch_size"
        )
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.use_deterministic_algorithms(config.deterministic, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # slow, and nothing reads it
    if on_gpu:
        torch.cuda.set_device(device)
    if distributed:
        backend = config.backend if config.backend != "auto" else "nccl" if on_gpu else "gloo"
        dist.init_process_group(backend, device_id=device if backend == "nccl" else None)
    return rank, world_size, device


def choose_dtype(config: TrainConfig, device: torch.device) -> torch.dtype:
    """What matrix products compute in. FP32 means FP32: TF32 stays off."""
    if device.type == "cpu":
        if config.dtype == "float16":
            raise ConfigError("dtype=float16 needs a GPU; on a CPU choose float32 or bfloat16")
        return torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    if "flash" in config.attention and not has_bf16:
        name = torch.cuda.get_device_name(device)
        raise ConfigError(f"attention=flash computes in bfloat16, but {name} lacks it")
    if config.dtype == "bfloat16" and not has_bf16:
        raise ConfigError(f"dtype=bfloat16, but {torch.cuda.get_device_name(device)} lacks it")
    if config.dtype == "auto":
        return torch.bfloat16 if has_bf16 else torch.float16
    return getattr(torch, config.dtype)


def together(action: Callable, world_size: int):
    """What `action` returns; a ConfigError in one process is raised in all of them."""
    result = error = None
    try:
        result = action()
    except ConfigError as caught:
        error = str(caught)
    errors = [error] * world_size
    if world_size > 1:
        dist.all_gather_object(errors, error)
    for error in filter(None, errors):
        raise ConfigError(error)
    return result


def tell_once(error: str):
    """Print an error that all processes of a machine have, by one of them."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(error, file=sys.stderr)
    else:  # torchrun ends all processes with the first: not before the one that speaks
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(10)


def seed(config: TrainConfig, step: int, rank: int, world_size: int):
    """Seed what a step draws in dropout and stochastic rounding: the same in a resumed run."""
    torch.manual_seed((config.seed * 1_000_003 + step) * world_size + rank)
