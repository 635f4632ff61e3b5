"""
Tokens on disk and the order they are read in.

A split is a file of little-endian uint16 tokens. The offsets of a step's global batch are a pure
function of (seed, step): any number of processes and any micro-batch see the same batches, and a
resumed run goes on where it was. Offsets can be recorded to and replayed from text files, one line
a step, comma-separated: generated_indices_rank_<r>.txt, the format of the paper's authors, whose
global batch is the ranks' lines one after another.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from config import ConfigError, TrainConfig

STREAMS = {"step": 0, "train": 1, "val": 2}  # independent random streams of one seed


def read_vocab_size(data_dir: Path) -> int | None:
    """The vocabulary meta.json gives, rounded up to a multiple of 64; None without the file."""
    meta = data_dir / "meta.json"
    if not meta.exists():
        return None
    try:
        size = int(json.loads(meta.read_text())["vocab_size"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{meta} gives no vocab_size ({type(error).__name__}: {error})") from None
    return -(-size // 64) * 64


def load_tokens(data_dir: Path, split: str, block_size: int) -> np.ndarray:
    """Map one split's tokens, uint16 [N].

    Raises:
        ConfigError: the file is missing, empty or shorter than one sequence and its target.
    """
    path = data_dir / f"{split}.bin"
    if not path.is_file():
        script = data_dir / "prepare.py"
        script = script if script.exists() else "a data/*/prepare.py"
        raise ConfigError(f"{split} split: {path} does not exist; prepare it with {script}")
    size = path.stat().st_size
    if size % 2 or size // 2 <= block_size:
        raise ConfigError(
            f"{split} split: {path} has {size:,} bytes; block_size={block_size} needs at least "
            f"{2 * (block_size + 1):,} (2 a token), an even number"
        )
    return np.memmap(path, dtype="<u2", mode="r")


class Batches:
    """The batches of one process of a run.

    Args:
        config: of the run.
        vocab_size: every token must be below it.
        rank, world_size: of this process.

    Raises:
        ConfigError: unusable data or replay files; later, a token beyond the vocabulary.
    """

    def __init__(self, config: TrainConfig, vocab_size: int, rank: int = 0, world_size: int = 1):
        self.config, self.vocab_size = config, vocab_size
        self.rank, self.world_size = rank, world_size
        self.tokens = {
            split: load_tokens(config.data_dir, split, config.block_size)
            for split in ("train", "val")
        }
        size = read_vocab_size(config.data_dir)
        if size is not None and size - 63 > vocab_size:
            raise ConfigError(
                f"{config.data_dir} has a vocabulary of {size}, the model one of {vocab_size}"
            )
        if config.record_batches and config.record_batches == config.replay_batches:
            raise ConfigError(f"record_batches and replay_batches are both {config.record_batches}")
        self.replay = Replay(config, len(self.tokens["train"])) if config.replay_batches else None

    def offsets(self, step: int) -> np.ndarray:
        """Where the sequences of a step's global batch begin in train.bin, int64 [sequences]."""
        if self.replay:
            return self.replay.offsets(step)
        sequences = self.config.batch_size * self.config.gradient_accumulation_steps
        return self._draw("step", step, sequences, len(self.tokens["train"]))

    def training(self, step: int) -> Iterator[Tensor]:
        """This rank's micro-batches of a step: tokens int64 [micro_batch, block_size + 1]."""
        share = np.array_split(self.offsets(step), self.world_size)[self.rank]
        return self._load("train", share)

    def evaluation(self, split: str, index: int) -> Iterator[Tensor]:
        """Evaluation batch `index` of a split, the same at every evaluation, in micro-batches."""
        size = len(self.tokens[split])
        return self._load(split, self._draw(split, index, self.config.batch_size, size))

    def _draw(self, stream: str, index: int, count: int, size: int) -> np.ndarray:
        # Raw Philox words: the one stream NumPy promises never to change.
        key = [self.config.seed, (STREAMS[stream] << 56) + index]
        words = np.random.Philox(key=np.array(key, dtype=np.uint64)).random_raw(count)
        return (words % np.uint64(size - self.config.block_size)).astype(np.int64)

    def _load(self, split: str, offsets: np.ndarray) -> Iterator[Tensor]:
        columns = np.arange(self.config.block_size + 1)
        for start in range(0, len(offsets), self.config.micro_batch):
            index = offsets[start : start + self.config.micro_batch, None] + columns
            tokens = self.tokens[split][index]
            if tokens.max() >= self.vocab_size:
                row, column = np.argwhere(tokens >= self.vocab_size)[0]
                raise ConfigError(
                    f"{split}.bin has token {tokens[row, column]} at position "
                    f"{index[row, column]:,}; the model's vocabulary is {self.vocab_size}"
                )
            yield torch.from_numpy(tokens.astype(np.int64))


class Replay:
    """Offsets read from generated_indices_rank_<r>.txt files.

    Raises:
        ConfigError: no files, a file shorter than max_iters lines, or a line that does not fit.
    """

    def __init__(self, config: TrainConfig, corpus_size: int):
        self.sequences = config.batch_size * config.gradient_accumulation_steps
        self.limit = corpus_size - config.block_size
        folder = Path(config.replay_batches)
        self.files = []
        while (path := folder / f"generated_indices_rank_{len(self.files)}.txt").is_file():
            with open(path, "rb") as file:
                starts = [0, *np.cumsum([len(line) for line in file]).tolist()]
            lines = len(starts) - 1
            if lines < config.max_iters:
                raise ConfigError(
                    f"replay_batches: step {lines} of max_iters={config.max_iters} needs line "
                    f"{lines + 1} of {path}, which ends with line {lines}"
                )
            self.files.append((path, starts))
        if not self.files:
            raise ConfigError(f"replay_batches: no {folder / 'generated_indices_rank_0.txt'}")

    def offsets(self, step: int) -> np.ndarray:
        """The ranks' offsets of a step, one after another, int64."""
        parts = []
        for path, starts in self.files:
            with open(path, "rb") as file:
                file.seek(starts[step])
                line = file.readline()
            try:
                parts.append(np.array(line.split(b","), dtype=np.int64))
            except ValueError:
                raise ConfigError(
                    f"replay_batches: step {step}, line {step + 1} of {path} is not "
                    "comma-separated integers"
                ) from None
        offsets = np.concatenate(parts)
        where = f"replay_batches: step {step}, line {step + 1}"
        if len(offsets) != self.sequences:
            raise ConfigError(
                f"{where} of {len(self.files)} files has {len(offsets)} offsets; batch_size · "
                f"gradient_accumulation_steps is {self.sequences}"
            )
        if offsets.min() < 0 or offsets.max() >= self.limit:
            raise ConfigError(
                f"{where} has offsets {offsets.min()} to {offsets.max()}; train.bin allows 0 to "
                f"{self.limit - 1}"
            )
        return offsets


class Recorder:
    """Writes each step's global batch as one line of generated_indices_rank_0.txt.

    Args:
        folder: created if missing.
        start: steps already recorded; what follows them is cut off.

    Raises:
        ConfigError: no writable folder, or a file that is not this run's recording.
    """

    def __init__(self, folder: str, start: int):
        path = Path(folder) / "generated_indices_rank_0.txt"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = open(path, "a+b")  # noqa: SIM115, open as long as the run
        except OSError as error:
            raise ConfigError(f"record_batches={folder} is not writable: {error}") from None
        self.file.seek(0)
        lines = [len(line) for line in self.file]
        if len(lines) < start or (lines and start == 0):
            raise ConfigError(
                f"record_batches: {path} has {len(lines)} lines, but the run starts at step {start}"
            )
        self.file.truncate(sum(lines[:start]))

    def write(self, offsets: np.ndarray):
        self.file.write(",".join(map(str, offsets.tolist())).encode() + b"\n")
        self.file.flush()
