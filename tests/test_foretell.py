"""Which statistic foretells a failure, of runs made up for it."""

import json
import math
import subprocess
import sys
import tarfile

from conftest import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
from foretell import LOGGED, auc, standard_error


def write_run(folder, ds_std: float, max_score: float | None, rises: bool):
    """A run whose second evaluation has these statistics, in the second of two layers."""
    evaluations = [
        {"iter": step} | {key: [0.1, 0.1] for key in LOGGED} | {"ds_std": [0.01, 0.01]}
        for step in (0, 500)
    ]
    evaluations[1] |= {"ds_std": [0.01, ds_std], "max_score": [1.0, max_score]}
    events = [{"event": "rise", "iter": 700, "detected_iter": 800}] if rises else []
    folder.mkdir(parents=True)
    losses = [{"iter": 1, "loss": 3 + ds_std}]
    lines = [json.dumps(line) + "\n" for line in losses + evaluations + events]
    (folder / "metrics.jsonl").write_text("".join(lines))


def foretell(*args) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "scripts" / "foretell.py"), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_auc():
    assert auc([2, 3], [1]) == 1
    assert auc([1], [2, 3]) == 0
    assert auc([1, 1], [1]) == 0.5
    assert standard_error(1.0, 3, 4) == 0
    # the same as by hand: for 0.8, Q1 = 2/3 and Q2 = 0.64 / 0.9
    expected = (0.16 + 9 * (2 / 3 - 0.64) + 19 * (0.64 / 0.9 - 0.64)) / 200
    assert math.isclose(standard_error(0.8, 10, 20), expected**0.5)


def test_what_differs_foretells(tmp_path):
    write_run(tmp_path / "runs" / "a", 0.5, None, rises=True)
    write_run(tmp_path / "runs" / "b", 0.4, 1.0, rises=True)
    write_run(tmp_path / "runs" / "c", 0.1, 2.0, rises=False)
    with tarfile.open(tmp_path / "runs.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "runs", "runs")
    both = [tmp_path / "runs", tmp_path / "runs.tar.gz"]  # the same runs, counted once
    for paths in (both[:1], both[1:], both):
        said = foretell(*paths, "--steps=500,1000").stdout
        assert "| step 500: 2 fail, 1 do not |" in said  # no run was evaluated at 1,000
        assert "(ds_std) | 1.00 ± 0.00" in said
        assert "(max_score) | 0.50 ±" in said  # one not finite, above; one below
        assert "(wq_norm) | 0.50 ±" in said


def test_nothing_to_compare(tmp_path):
    write_run(tmp_path / "a", 0.5, 1.0, rises=True)
    result = foretell(tmp_path)
    assert result.returncode == 1
    assert result.stderr.startswith("error: no step of 500,1000,1500 has runs")
    assert foretell(tmp_path / "nowhere").returncode == 2
    assert foretell(tmp_path, "--steps=x").returncode == 2
