"""
What the prepare.py scripts share: tokenizers, and a corpus written whole or not at all.

A corpus is a folder with train.bin and val.bin (little-endian uint16 tokens, each document followed
by an end-of-text token) and meta.json, written last.
"""

import base64
import hashlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np


class CorpusError(ValueError):
    """Bad input, told in one line."""


@dataclass(frozen=True)
class Tokenizer:
    """Text to tokens.

    Args:
        encode_batch: texts → their tokens, without the end-of-text token.
        end_of_text: the token that follows each document.
    """

    name: str
    vocab_size: int
    end_of_text: int
    encode_batch: Callable[[list[str]], list]

    def encode_documents(self, texts: list[str]) -> list[np.ndarray]:
        """Each document's tokens and the end-of-text token, uint16."""
        return [np.array([*x, self.end_of_text], dtype="<u2") for x in self.encode_batch(texts)]


def byte_tokenizer() -> Tokenizer:
    """UTF-8 bytes; NUL, which no text contains, ends a document."""
    encode = lambda texts: [text.replace("\0", " ").encode() for text in texts]  # noqa: E731
    return Tokenizer("bytes", 256, 0, encode)


@lru_cache
def gpt2_tokenizer(vocab_file: str | None = None, threads: int | None = None) -> Tokenizer:
    """GPT-2's BPE by tiktoken, which downloads its vocabulary once.

    Args:
        vocab_file: read the vocabulary from here instead, in tiktoken's format.
        threads: that encode a batch; all cores if None.

    Raises:
        CorpusError: no network and no cached vocabulary, or a file of another kind.
    """
    try:
        import tiktoken
        from tiktoken_ext.openai_public import r50k_pat_str
    except ImportError as error:
        raise CorpusError(f"{error}: pip install -r requirements.txt") from None

    if vocab_file is not None:
        try:  # read here: tiktoken would cache the file by its name
            lines = [line.split() for line in Path(vocab_file).read_bytes().splitlines()]
            ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
            special = {"<|endoftext|>": len(ranks)}
            encoding = tiktoken.Encoding(
                "gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens=special
            )
        except Exception as error:
            raise CorpusError(f"{vocab_file} is not a vocabulary of tiktoken's: {error}") from None
        if encoding.n_vocab > 2**16:
            raise CorpusError(f"{vocab_file} has {encoding.n_vocab} tokens; uint16 holds 65,536")
    else:
        try:
            encoding = tiktoken.get_encoding("gpt2")
        except Exception as error:
            raise CorpusError(
                f"tiktoken could not download GPT-2's vocabulary ({type(error).__name__}); point "
                "TIKTOKEN_CACHE_DIR to a cache that has it, or pass --vocab=<r50k_base.tiktoken>"
            ) from None
    threads = threads or os.cpu_count() or 1
    encode = lambda texts: encoding.encode_ordinary_batch(texts, num_threads=threads)  # noqa: E731
    return Tokenizer("gpt2", encoding.n_vocab, encoding.eot_token, encode)


def write_corpus(
    folder: Path, tokenizer: Tokenizer, splits: dict[str, Iterable[np.ndarray]], about: dict
) -> dict:
    """Write a corpus from arrays of tokens; its files appear only once all are complete.

    Args:
        splits: "train" and "val", each an iterable of uint16 arrays.
        about: further entries of meta.json.

    Returns:
        What meta.json holds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    meta = {
        "tokenizer": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "end_of_text": tokenizer.end_of_text,
        "dtype": "<u2",
        "tokens": {},
        "sha256": {},
    }
    parts = {split: folder / f"{split}.bin.part" for split in splits}
    try:
        for split, arrays in splits.items():
            digest, count = hashlib.sha256(), 0
            with open(parts[split], "wb") as file:
                for array in arrays:
                    data = array.astype("<u2").tobytes()
                    file.write(data)
                    digest.update(data)
                    count += len(array)
            if count == 0:
                raise CorpusError(f"the {split} split would be empty")
            meta["tokens"][split], meta["sha256"][split] = count, digest.hexdigest()
        meta |= about
        meta_part = folder / "meta.json.part"
        meta_part.write_text(json.dumps(meta, indent=1) + "\n")
        (folder / "meta.json").unlink(missing_ok=True)
        for split, part in parts.items():
            os.replace(part, folder / f"{split}.bin")
        os.replace(meta_part, folder / "meta.json")
    finally:
        for part in (*parts.values(), folder / "meta.json.part"):
            part.unlink(missing_ok=True)
    return meta


def held_out(names: list[str], share: float) -> set[str]:
    """A fixed share of documents for validation: at least one, chosen by a hash of their names."""
    count = max(1, round(share * len(names)))
    return set(sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())[:count])


def write_files(
    paths: list[Path], root: Path, folder: Path, tokenizer: Tokenizer, share: float, about: dict
) -> dict:
    """Write a corpus from text files, one document each, with a share of the files held out.

    A lone file is divided instead: its end is held out.

    Raises:
        CorpusError: no file with text.
    """
    from tqdm import tqdm

    paths = [path for path in paths if path.is_file() and path.stat().st_size > 0]
    names = [path.relative_to(root).as_posix() for path in paths]
    if len(names) == 1:
        text = _read(paths[0])
        cut = len(text) - max(1, round(share * len(text)))
        texts = {"train": [text[:cut]], "val": [text[cut:]]}
        splits = {k: tokenizer.encode_documents(v) for k, v in texts.items()}
        about |= {"documents": {"train": 1, "val": 1}}
        return write_corpus(folder, tokenizer, splits, about)
    if not names:
        raise CorpusError(f"no text files below {root}")
    val = held_out(names, share)
    files = {"train": [], "val": []}
    for name, path in sorted(zip(names, paths, strict=True)):
        files["val" if name in val else "train"].append(path)

    def tokens(split):
        chunk = 256  # files tokenized at a time
        with tqdm(total=len(files[split]), desc=f"tokenizing {split}", unit="file") as bar:
            for start in range(0, len(files[split]), chunk):
                texts = [_read(path) for path in files[split][start : start + chunk]]
                bar.update(len(texts))
                yield np.concatenate(tokenizer.encode_documents(texts))

    about |= {"documents": {split: len(paths) for split, paths in files.items()}}
    return write_corpus(folder, tokenizer, {split: tokens(split) for split in files}, about)


def summary(folder: Path, meta: dict) -> str:
    """One line about a corpus that was written."""
    counts = ", ".join(f"{count:,} {split} tokens" for split, count in meta["tokens"].items())
    return f"{folder}: {counts}; {meta['tokenizer']} vocabulary of {meta['vocab_size']:,}"


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")
