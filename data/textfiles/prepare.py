"""
Any folder of text or Markdown files as a corpus, each file a document.

    python data/textfiles/prepare.py DIR [--out=DIR] [--tokenizer=gpt2|bytes] [--vocab=FILE]

Training then takes --dataset=textfiles, or --dataset=<the folder given as --out>.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data.corpus import CorpusError, byte_tokenizer, gpt2_tokenizer, summary, write_files


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("dir", type=Path, help="folder of texts, searched at any depth")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder to write")
    parser.add_argument("--tokenizer", choices=("gpt2", "bytes"), default="gpt2")
    parser.add_argument(
        "--vocab", help="GPT-2's vocabulary in tiktoken's format, to not download it"
    )
    parser.add_argument("--val-share", type=float, default=0.005, help="of files held out")
    parser.add_argument("--suffixes", default=".txt,.md", help="of the files to take")
    args = parser.parse_args()
    try:
        if not args.dir.is_dir():
            raise CorpusError(f"{args.dir} is not a folder")
        if not 0 < args.val_share < 1:
            raise CorpusError(f"--val-share must be between 0 and 1, got {args.val_share}")
        suffixes = tuple(args.suffixes.split(","))
        paths = [p for p in args.dir.rglob("*") if p.name.endswith(suffixes)]
        tokenizer = byte_tokenizer() if args.tokenizer == "bytes" else gpt2_tokenizer(args.vocab)
        meta = write_files(paths, args.dir, args.out, tokenizer, args.val_share, {})
        print(summary(args.out, meta))
    except (CorpusError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
