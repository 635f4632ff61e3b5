"""
The Python standard library's sources on this machine as a corpus of bytes: no download.

    python data/pysource/prepare.py [--out=DIR]
"""

import argparse
import sys
import sysconfig
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data.corpus import CorpusError, byte_tokenizer, summary, write_files


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder to write")
    out = parser.parse_args().out
    root = Path(sysconfig.get_path("stdlib"))
    paths = [p for p in root.rglob("*.py") if not {"site-packages", "dist-packages"} & {*p.parts}]
    about = {"source": f"standard library of Python {sysconfig.get_python_version()}"}
    try:
        print(summary(out, write_files(paths, root, out, byte_tokenizer(), 0.02, about)))
    except (CorpusError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
