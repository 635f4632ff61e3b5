"""
OpenWebText in GPT-2's BPE, split and shuffled as nanoGPT splits it.

    python data/openwebtext/prepare.py [--parquet=DIR] [--vocab=FILE] [--workers=N]

Needs about 54 GB in the Hugging Face cache (HF_HOME) and 18 GB here. Interrupted, it goes on from
what the cache has. Only Parquet copies load: datasets no longer runs a repository's own script.
"""

import argparse
import os
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data.corpus import CorpusError, gpt2_tokenizer, summary, write_corpus

KNOWN = {"documents": 8_013_769, "train": 9_035_582_198, "val": 4_434_897}


def encode(batch: dict, vocab: str | None) -> dict:
    """Tokens of a batch of documents, for `Dataset.map`, whose workers each load the tokenizer."""
    return {"ids": gpt2_tokenizer(vocab, threads=1).encode_documents(batch["text"])}


def load(args: argparse.Namespace):
    """The documents, from local Parquet files or the hub."""
    from datasets import load_dataset

    if args.parquet:
        files = sorted(map(str, args.parquet.rglob("*.parquet")))
        if not files:
            raise CorpusError(f"no *.parquet below {args.parquet}")
        source = ("parquet", f"the files below {args.parquet}")
        options = dict(data_files=files)
    else:
        source = (args.repo, f"{args.repo} at {args.revision or 'main'}")
        options = dict(revision=args.revision, num_proc=args.workers)
    try:
        dataset = load_dataset(source[0], split="train", **options)
    except Exception as error:  # no network; a repository that has a script; broken files
        raise CorpusError(
            f"{source[1]} did not load as Parquet ({error}); try another --repo, "
            "--revision=refs/convert/parquet, or --parquet=<downloaded files>"
        ) from None
    if "text" not in dataset.column_names:
        raise CorpusError(f"{source[1]} has columns {dataset.column_names}, but no 'text'")
    return dataset


def arrays(dataset, split: str):
    """Tokens of a split in pieces of 10,000 documents."""
    from tqdm import tqdm

    with tqdm(total=len(dataset), desc=f"writing {split}", unit="doc") as bar:
        for table in dataset.with_format("arrow").iter(batch_size=10_000):
            yield table["ids"].combine_chunks().flatten().to_numpy()
            bar.update(len(table))


def report(meta: dict):
    """Compare the counts with those known of the full corpus."""
    counts = {"documents": sum(meta["documents"].values()), **meta["tokens"]}
    for name, known in KNOWN.items():
        same = "as known" if counts[name] == known else f"but {known:,} are known"
        print(f"{name}: {counts[name]:,}, {same}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder to write")
    parser.add_argument("--repo", default="Skylion007/openwebtext", help="dataset on the hub")
    parser.add_argument("--revision", help="of the repository: a branch, tag or commit")
    parser.add_argument("--parquet", type=Path, help="folder of downloaded Parquet files instead")
    parser.add_argument(
        "--vocab", help="GPT-2's vocabulary in tiktoken's format, to not download it"
    )
    parser.add_argument("--workers", type=int, default=(os.cpu_count() or 2) // 2)
    args = parser.parse_args()
    args.workers = max(1, args.workers)
    try:
        tokenizer = gpt2_tokenizer(args.vocab)
        splits = load(args).train_test_split(test_size=0.0005, seed=2357, shuffle=True)
        splits = splits.map(
            partial(encode, vocab=args.vocab),
            batched=True,
            remove_columns=splits["train"].column_names,
            num_proc=args.workers,
            desc="tokenizing",
        )
        splits = {"train": splits["train"], "val": splits["test"]}
        about = {"documents": {name: len(split) for name, split in splits.items()}}
        pieces = {name: arrays(split, name) for name, split in splits.items()}
        meta = write_corpus(args.out, tokenizer, pieces, about)
        print(summary(args.out, meta))
        report(meta)
    except (CorpusError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
