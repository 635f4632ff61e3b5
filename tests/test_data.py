"""The prepare.py scripts: what they write, and that they write it whole or not at all."""

import base64
import hashlib
import json
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT

from data.corpus import CorpusError, byte_tokenizer, held_out, write_corpus


def prepare(name, *arguments, check=True):
    command = [sys.executable, str(ROOT / "data" / name / "prepare.py"), *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True)
    if check:
        assert result.returncode == 0, result.stderr
    return result


def read(folder):
    meta = json.loads((folder / "meta.json").read_text())
    return meta, {s: np.fromfile(folder / f"{s}.bin", dtype="<u2") for s in ("train", "val")}


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    (folder / "deeper").mkdir(parents=True)
    for i in range(20):
        (folder / "deeper" / f"{i}.txt").write_text(f"text {i} — é")
    (folder / "read.md").write_text("# markdown")
    (folder / "image.png").write_bytes(b"\x89PNG")
    (folder / "empty.txt").write_text("")
    return folder


@pytest.fixture
def vocabulary(tmp_path):
    """The 256 bytes and one merge, in tiktoken's format."""
    pytest.importorskip("tiktoken")
    path = tmp_path / "tiny.tiktoken"
    tokens = [bytes([i]) for i in range(256)] + [b"te"]
    lines = [f"{base64.b64encode(t).decode()} {i}" for i, t in enumerate(tokens)]
    path.write_text("\n".join(lines))
    return path


def test_bytes_of_a_folder(texts, tmp_path):
    prepare("textfiles", texts, f"--out={tmp_path}", "--tokenizer=bytes", "--val-share=0.2")
    meta, tokens = read(tmp_path)
    assert meta["vocab_size"] == 256
    assert meta["documents"] == {"train": 17, "val": 4}
    every = bytes(np.concatenate([*tokens.values()]).astype(np.uint8)).decode().split("\0")
    assert sorted(every) == sorted([*(f"text {i} — é" for i in range(20)), "# markdown", ""])
    for split, array in tokens.items():
        assert meta["tokens"][split] == len(array)
        assert meta["sha256"][split] == hashlib.sha256(array.tobytes()).hexdigest()


def test_bpe_with_a_local_vocabulary(texts, vocabulary, tmp_path):
    prepare("textfiles", texts, f"--out={tmp_path}", f"--vocab={vocabulary}")
    meta, tokens = read(tmp_path)
    assert meta["vocab_size"] == 258
    assert meta["end_of_text"] == 257
    assert (tokens["train"] == 257).sum() == 20
    assert (tokens["train"] == 256).sum() >= 18  # "te" of text


def test_a_lone_file_is_divided(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "book.txt").write_text("0123456789" * 100)
    prepare("textfiles", folder, f"--out={tmp_path}", "--tokenizer=bytes", "--val-share=0.1")
    _, tokens = read(tmp_path)
    assert (len(tokens["train"]), len(tokens["val"])) == (901, 101)


def test_python_sources(tmp_path):
    prepare("pysource", f"--out={tmp_path}")
    meta, tokens = read(tmp_path)
    assert meta["tokens"]["train"] > 1_000_000
    assert max(array.max() for array in tokens.values()) < 256


def test_openwebtext_from_local_parquet(vocabulary, tmp_path):
    pytest.importorskip("datasets")
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "parquet").mkdir()
    table = pyarrow.table({"text": [f"text {i}" for i in range(3000)]})
    pyarrow.parquet.write_table(table, tmp_path / "parquet" / "0.parquet")
    result = prepare(
        "openwebtext",
        f"--parquet={tmp_path / 'parquet'}",
        f"--vocab={vocabulary}",
        f"--out={tmp_path}",
        "--workers=2",
    )
    meta, tokens = read(tmp_path)
    assert meta["documents"] == {"train": 2998, "val": 2}
    assert (tokens["train"] == 257).sum() == 2998
    assert "documents: 3,000, but 8,013,769 are known" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nowhere"], "/nowhere is not a folder"),
        ([str(ROOT / "configs"), "--tokenizer=bytes"], "no text files below"),
        ([str(ROOT), "--vocab=/nowhere"], "is not a vocabulary of tiktoken's"),
    ],
)
def test_bad_input(arguments, message, tmp_path):
    pytest.importorskip("tiktoken")
    result = prepare("textfiles", *arguments, f"--out={tmp_path / 'out'}", check=False)
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_failure_leaves_the_earlier_corpus(tmp_path):
    tokenizer = byte_tokenizer()
    good = {s: tokenizer.encode_documents(["text"]) for s in ("train", "val")}
    write_corpus(tmp_path, tokenizer, good, {})

    def interrupted():
        yield np.zeros(4, dtype="<u2")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_corpus(tmp_path, tokenizer, {"train": interrupted(), "val": iter(())}, {})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["meta.json", "train.bin", "val.bin"]
    assert read(tmp_path)[1]["train"].tolist() == [*b"text", 0]
    with pytest.raises(CorpusError, match="the val split would be empty"):
        write_corpus(tmp_path, tokenizer, {"train": good["train"], "val": []}, {})


def test_held_out_documents_do_not_depend_on_their_order():
    names = [f"{i}.txt" for i in range(100)]
    assert held_out(names, 0.05) == held_out(names[::-1], 0.05)
    assert len(held_out(names, 0.05)) == 5
    assert len(held_out(names[:3], 0.001)) == 1
