"""The training loop as a user runs it: processes, resuming, signals, bad input."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT
from helpers import TINY, command, environment, losses, metrics, train, write_corpus

import train as train_module
from checkpoints import Checkpoints
from config import TrainConfig
from diagnostics import LossWatch, MetricsLog


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def one_process(corpus, tmp_path_factory):
    """The run that others must reproduce: one process, never interrupted."""
    out = tmp_path_factory.mktemp("runs") / "one"
    train(*TINY, f"--dataset={corpus}", f"--out_dir={out}", f"--record_batches={out}")
    return out


def assert_same_losses(a, b, tolerance=0.0):
    a, b = losses(a), losses(b)
    assert a.keys() == b.keys()
    assert max(abs(a[step] - b[step]) for step in a) <= tolerance


def test_learns_and_logs(one_process):
    loss = losses(one_process)
    assert list(loss) == list(range(50))
    assert loss[49] < loss[0] - 1
    line = metrics(one_process)[-2]
    assert line["iter"] == 49
    assert line["tokens"] == 50 * 8 * 32
    assert line["mfu"] is None  # nobody knows a CPU's peak
    assert {"lr", "grad_norm", "tokens_per_second", "memory_gib", "time"} <= line.keys()
    evaluated = [x["iter"] for x in metrics(one_process) if "val/loss" in x]
    assert evaluated == [0, 20, 40, 50]
    config = json.loads((one_process / "config.json").read_text())
    assert config["learning_rate"] == 1e-2
    assert json.loads((one_process / "environment.json").read_text())["torch"] == torch.__version__


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_see_the_same_batches(processes, corpus, one_process, tmp_path):
    flags = ["--micro_batch_size=2", f"--record_batches={tmp_path}"]
    train(*TINY, *flags, f"--dataset={corpus}", f"--out_dir={tmp_path}", processes=processes)
    assert_same_losses(one_process, tmp_path, 1e-5)
    name = "generated_indices_rank_0.txt"
    assert (one_process / name).read_text() == (tmp_path / name).read_text()
    for a, b in zip(metrics(one_process), metrics(tmp_path), strict=True):
        if "val/loss" in a:
            assert abs(a["val/loss"] - b["val/loss"]) <= 1e-5


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_killed_and_resumed(dropout, corpus, tmp_path):
    """kill -9 between checkpoints; the resumed run logs the same losses, each step once."""
    flags = [*TINY, f"--dataset={corpus}", f"--dropout={dropout}"]
    train(*flags, f"--out_dir={tmp_path / 'whole'}")
    out = tmp_path / "killed"
    with subprocess.Popen(
        command(*flags, f"--out_dir={out}"), env=environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout:
            if line.startswith("iter 33:"):
                process.send_signal(signal.SIGKILL)
                break
    assert process.wait() == -signal.SIGKILL
    train(*flags, f"--out_dir={out}", "--init_from=resume")
    assert_same_losses(tmp_path / "whole", out)


def test_interrupted_and_resumed(corpus, one_process, tmp_path):
    """Ctrl-C saves the step it comes in."""
    flags = [*TINY, f"--dataset={corpus}", f"--out_dir={tmp_path}"]
    with subprocess.Popen(
        command(*flags), env=environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout:
            if line.startswith("iter 8:"):
                process.send_signal(signal.SIGINT)
                break
        process.communicate()
    assert process.returncode == 130
    assert 8 <= torch.load(tmp_path / "ckpt.pt")["iter_num"] < 50
    train(*flags, "--init_from=resume")
    assert_same_losses(one_process, tmp_path)


def test_replays_recorded_batches(corpus, one_process, tmp_path):
    """Another seed's weights would see other batches; replayed offsets are the recorded ones."""
    flags = [*TINY, f"--dataset={corpus}", f"--record_batches={tmp_path}", "--seed=7"]
    train(*flags, f"--out_dir={tmp_path}", f"--replay_batches={one_process}")
    name = "generated_indices_rank_0.txt"
    assert (one_process / name).read_text() == (tmp_path / name).read_text()


def test_replays_the_authors_files(corpus, one_process, tmp_path):
    """Four ranks' files, each with its share of every line, are one global batch."""
    for line in (one_process / "generated_indices_rank_0.txt").read_text().splitlines():
        offsets = line.split(",")
        for rank in range(4):
            with open(tmp_path / f"generated_indices_rank_{rank}.txt", "a") as file:
                file.write(",".join(offsets[2 * rank : 2 * rank + 2]) + "\n")
    flags = [*TINY, f"--dataset={corpus}", f"--replay_batches={tmp_path}"]
    train(*flags, f"--out_dir={tmp_path / 'out'}", processes=2)
    assert_same_losses(one_process, tmp_path / "out", 1e-5)


def test_an_earlier_run_is_moved_aside(corpus, tmp_path):
    flags = [*TINY, f"--dataset={corpus}", f"--out_dir={tmp_path}", "--max_iters=2"]
    train(*flags)
    first = (tmp_path / "metrics.jsonl").read_text()
    train(*flags)
    assert (tmp_path / "previous-1" / "metrics.jsonl").read_text() == first
    assert len(losses(tmp_path)) == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--n_head=3"], "n_embd must be a multiple of n_head"),
        (["--dataset=nowhere"], "train split: nowhere/train.bin does not exist"),
        (["--block_size=30000"], "block_size=30000 needs at least 60,002"),
        (["--out_dir=/proc/out"], "out_dir=/proc/out is not writable"),
        (["--init_from=resume"], "ckpt.pt does not exist"),
        (["--device=cuda:99"], "cuda:99"),
        (["--dtype=float16"], "float16 needs a GPU"),
        (["--replay_batches=nowhere"], "no nowhere/generated_indices_rank_0.txt"),
        (["--batch_size", "4"], "usage: train.py"),
    ],
)
def test_bad_input(flags, message, corpus, tmp_path):
    """One line, an exit code, and nothing written."""
    out = tmp_path / "out"
    result = train(*TINY, f"--dataset={corpus}", f"--out_dir={out}", *flags, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert not out.exists()


@pytest.mark.parametrize(
    ("split", "content", "message"),
    [
        ("train", b"", "train split: .* has 0 bytes"),
        ("val", b"\0" * 64, "val split: .* has 64 bytes; block_size=32 needs at least 66"),
        ("val", b"\0" * 67, "val split: .* an even number"),
        ("train", b"\xff" * 9999 + b"\0", r"train.bin has token 65535 at position .* 64"),
    ],
)
def test_bad_corpus(split, content, message, tmp_path):
    corpus = write_corpus(tmp_path / "corpus")
    (corpus / f"{split}.bin").write_bytes(content)
    out = tmp_path / "out"
    assert_fails([*TINY, f"--dataset={corpus}", f"--out_dir={out}"], message)
    assert not out.exists()


def assert_fails(flags, message, code=2):
    """In this process, which is quicker than train.py in another."""
    import contextlib
    import io
    import re

    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        assert train_module.main(flags) == code
    assert re.search(message, errors.getvalue()), errors.getvalue()
    assert errors.getvalue().count("\n") == 1


def test_replay_that_ends_too_early(corpus, one_process, tmp_path):
    text = (one_process / "generated_indices_rank_0.txt").read_text().splitlines()
    (tmp_path / "generated_indices_rank_0.txt").write_text("\n".join(text[:30]) + "\n")
    flags = [*TINY, f"--dataset={corpus}", f"--out_dir={tmp_path}", f"--replay_batches={tmp_path}"]
    assert_fails(flags, "step 30 of max_iters=50 needs line 31 of .* ends with line 30")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--n_layer=3"], "has n_layer=2, the config has 3"),
        (["--block_size=64"], "block_size=64 is beyond the 32 of"),
    ],
)
def test_checkpoint_of_another_shape(flags, message, corpus, one_process):
    flags = [*TINY, f"--dataset={corpus}", f"--out_dir={one_process}", "--init_from=resume", *flags]
    assert_fails(flags, message)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda c: c["model"].popitem(), "the checkpoint's weights do not fit its model_args"),
        (lambda c: c.pop("optimizer"), "the checkpoint's optimizer does not fit its model"),
        (lambda c: c["model_args"].pop("bias"), "has bias=None, the config has False"),
        (lambda c: c.update(iter_num=99), "is of step 99, beyond max_iters=50"),
        (lambda c: c.pop("model_args"), "truncated or not a checkpoint"),
    ],
)
def test_spoilt_checkpoint(spoil, message, corpus, one_process, tmp_path):
    checkpoint = torch.load(one_process / "ckpt.pt")
    spoil(checkpoint)
    torch.save(checkpoint, tmp_path / "ckpt.pt")
    flags = [*TINY, f"--dataset={corpus}", f"--out_dir={tmp_path}", "--init_from=resume"]
    assert_fails(flags, message)


def test_recordings_are_never_overwritten(corpus, one_process, tmp_path):
    flags = [*TINY, f"--dataset={corpus}", f"--out_dir={tmp_path}"]
    before = (one_process / "generated_indices_rank_0.txt").read_text()
    both = [f"--record_batches={one_process}", f"--replay_batches={one_process}"]
    assert_fails([*flags, *both], "record_batches and replay_batches are both")
    assert_fails([*flags, both[0]], "has 50 lines, but the run starts at step 0")
    assert_fails([*flags, "--record_batches=/proc/x"], "record_batches=/proc/x is not writable")
    assert (one_process / "generated_indices_rank_0.txt").read_text() == before


def test_a_process_that_cannot_start_stops_all(corpus, tmp_path):
    """Only rank 0 sees that out_dir is not writable; nobody waits for it."""
    flags = [*TINY, f"--dataset={corpus}", "--out_dir=/proc/out"]
    result = train(*flags, processes=2, check=False)
    assert result.returncode != 0
    assert result.stderr.count("error: out_dir=/proc/out is not writable") == 1


def test_a_killed_process_ends_the_job(corpus, tmp_path):
    """Within a minute, saying which one and why."""
    flags = [*TINY, f"--dataset={corpus}", f"--out_dir={tmp_path}", "--max_iters=100000"]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen(command(*flags, processes=2), env=environment(), **pipes) as process:
        for line in process.stdout:
            if line.startswith("iter 5:"):
                children = f"/proc/{process.pid}/task/{process.pid}/children"
                ranks = {rank_of(pid): pid for pid in map(int, Path(children).read_text().split())}
                os.kill(ranks[1], signal.SIGKILL)
                break
        _, said = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "rank      : 1" in said
    assert "Signal 9 (SIGKILL)" in said


def rank_of(pid: int) -> int | None:
    variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return next((int(v[5:]) for v in variables if v.startswith("RANK=")), None)


ONE_FAILS = """
import sys
import torch.distributed as dist
sys.path.insert(0, sys.argv[1])
from config import ConfigError
from processes import together
def action():
    if dist.get_rank() == 1:
        raise ConfigError("only here")
dist.init_process_group("gloo")
try:
    together(action, 2)
except ConfigError as error:
    print(f"process {dist.get_rank()}: {error}", flush=True)
"""


def test_the_error_of_one_process_is_that_of_all(tmp_path):
    """Rank 0 says what is wrong on another machine."""
    script = tmp_path / "script.py"
    script.write_text(ONE_FAILS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    result = subprocess.run(
        [*command, str(script), str(ROOT)], capture_output=True, text=True, timeout=120
    )
    assert all(f"process {i}: only here" in result.stdout for i in (0, 1))


def test_numbers_that_json_lacks_are_null(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl", 0)
    log.write({"iter": 1, "loss": math.nan, "by_layer": [1.0, math.inf]})
    log.close(0)
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()
    assert metrics(tmp_path) == [{"iter": 1, "loss": None, "by_layer": [1.0, None]}]


def test_evaluates_only(corpus, one_process, tmp_path):
    """At the checkpoint's step, whatever eval_interval is."""
    (tmp_path / "ckpt.pt").write_bytes((one_process / "ckpt.pt").read_bytes())
    flags = [*TINY, f"--dataset={corpus}", f"--out_dir={tmp_path}", "--init_from=resume"]
    assert train_module.main([*flags, "--eval_only=True", "--max_iters=99"]) == 0
    assert [line["iter"] for line in metrics(tmp_path)] == [50]
    expected = metrics(one_process)[-1]["val/loss"]
    assert metrics(tmp_path)[0]["val/loss"] == pytest.approx(expected, abs=1e-6)


def test_truncated_checkpoint(corpus, one_process, tmp_path):
    (tmp_path / "ckpt.pt").write_bytes((one_process / "ckpt.pt").read_bytes()[:-1000])
    flags = [*TINY, f"--dataset={corpus}", f"--out_dir={tmp_path}", "--init_from=resume"]
    assert_fails(flags, "truncated or not a checkpoint")


def test_accumulation_that_does_not_divide(corpus, tmp_path):
    flags = [*TINY, f"--dataset={corpus}", f"--out_dir={tmp_path / 'out'}"]
    flags.append("--gradient_accumulation_steps=3")
    result = train(*flags, processes=2, check=False)
    assert result.returncode != 0
    message = "= 12 sequences do not divide among 2 processes in micro-batches of 4"
    assert result.stderr.count(message) == 1


def test_resumes_with_fewer_positions(corpus, one_process, tmp_path):
    """A shorter block_size crops the position embeddings and their moments."""
    (tmp_path / "ckpt.pt").write_bytes((one_process / "ckpt.pt").read_bytes())
    flags = [*TINY, f"--dataset={corpus}", f"--out_dir={tmp_path}", "--init_from=resume"]
    assert train_module.main([*flags, "--block_size=16", "--max_iters=60"]) == 0
    assert list(losses(tmp_path)) == list(range(50, 60))


def test_non_finite_loss_never_reaches_the_weights(corpus, tmp_path, monkeypatch):
    """A NaN in step 13 ends the run at the report after it, the weights as before step 13."""
    steps = []
    forward = train_module.forward

    def poisoned(run, model, tokens):
        loss = forward(run, model, tokens)
        if model.training:
            steps.append(None)
        micro_steps = 2
        return loss * float("nan") if len(steps) == 13 * micro_steps + 1 else loss

    common = [*TINY, f"--dataset={corpus}", "--log_interval=10", "--eval_interval=1000"]
    assert train_module.main([*common, f"--out_dir={tmp_path / 'whole'}", "--max_iters=13"]) == 0
    monkeypatch.setattr(train_module, "forward", poisoned)
    assert_fails([*common, f"--out_dir={tmp_path / 'nan'}"], "step 13: loss nan", code=3)
    whole, nan = (torch.load(tmp_path / name / "ckpt.pt") for name in ("whole", "nan"))
    assert nan["iter_num"] == 13
    assert metrics(tmp_path / "nan")[-1] == {"event": "non_finite", "iter": 13}
    for name, weight in whole["model"].items():
        assert torch.equal(weight, nan["model"][name])
    for key, state in whole["optimizer"]["state"].items():
        assert state["step"] == nan["optimizer"]["state"][key]["step"] == 13


def test_learning_rate():
    config = TrainConfig(learning_rate=1.0, min_lr=0.1, warmup_iters=9, lr_decay_iters=19)
    rates = [train_module.learning_rate(config, step) for step in range(21)]
    assert rates[:2] == [0.1, 0.2]
    assert rates[9] == 1.0
    assert rates[14] == pytest.approx(0.55)
    assert rates[19:] == [0.1, 0.1]
    abrupt = TrainConfig(learning_rate=1.0, min_lr=0.1, warmup_iters=9, lr_decay_iters=9)
    assert [train_module.learning_rate(abrupt, step) for step in (8, 9)] == [0.9, 0.1]


def test_explosion_and_rise_are_told_once_with_their_steps():
    watch, events = LossWatch(), []
    for step in range(400):
        loss = 4.0 if step < 100 else 4.2 if step < 250 else 6.0
        events += watch.update(step, loss)
    assert [(e["event"], e["detected_iter"] - e["iter"]) for e in events] == [
        ("rise", 99),
        ("explosion", 99),
    ]
    rise, explosion = (e["iter"] for e in events)
    assert 100 <= rise < 130  # the average takes its time
    assert 250 <= explosion < 280


def test_a_passing_spike_is_no_event():
    watch = LossWatch()
    assert not [e for step in range(400) for e in watch.update(step, 9.0 if step == 200 else 4.0)]


def test_checkpoint_from_before_a_rise_is_kept(tmp_path):
    """Saved every 50 steps, risen from step 120 on: the checkpoint of step 100 stays."""
    watch = LossWatch()
    checkpoints = Checkpoints(tmp_path, watch, 0)
    for step in range(300):
        if step % 50 == 0:
            checkpoints.save({"iter_num": step}, best=False)
        dip = step in range(230, 240)  # back for a moment, but at no new low
        watch.update(step, 4.0 if step < 120 or dip else 5.5)
        checkpoints.keep_before_rise()
    assert torch.load(tmp_path / "ckpt_before_rise.pt")["iter_num"] == 100
    assert torch.load(tmp_path / "ckpt.pt")["iter_num"] == 250
    assert not list(tmp_path.glob("*.part"))


def test_losses_are_judged_before_a_checkpoint_is_written(corpus, tmp_path):
    """Whatever log_interval is, a checkpoint holds the watch as it is after every step before."""
    common = [*TINY, f"--dataset={corpus}", "--eval_interval=17", "--max_iters=34"]
    for interval in (1, 10):
        flags = [f"--log_interval={interval}", f"--out_dir={tmp_path / str(interval)}"]
        assert train_module.main([*common, *flags]) == 0
    a, b = (torch.load(tmp_path / name / "ckpt.pt")["loss_watch"] for name in ("1", "10"))
    assert a == b


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_on_a_gpu_with_flash_attention_and_resumed(dtype, corpus, tmp_path):
    flags = [*TINY, f"--dataset={corpus}", f"--dtype={dtype}", "--device=cuda"]
    flags += ["--attention=flash", "--precision=paper,stable=paper"]
    train(*flags, f"--out_dir={tmp_path / 'whole'}")
    train(*flags, f"--out_dir={tmp_path / 'parts'}", "--max_iters=20")
    train(*flags, f"--out_dir={tmp_path / 'parts'}", "--init_from=resume")
    assert_same_losses(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.gpu
def test_on_a_gpu_two_deterministic_runs_are_the_same(corpus, tmp_path):
    """Large enough that atomic additions of the embedding's gradient would meet, and compiled."""
    flags = [*TINY, f"--dataset={corpus}", "--dtype=bfloat16", "--device=cuda", "--compile=True"]
    flags += ["--attention=flash", "--batch_size=64", "--block_size=256", "--deterministic=True"]
    for name in ("first", "second"):
        train(*flags, f"--out_dir={tmp_path / name}")
    assert_same_losses(tmp_path / "first", tmp_path / "second")


def test_stops_on_explosion(corpus, tmp_path, monkeypatch):
    """The event is in metrics.jsonl, and the run ends well with a checkpoint."""
    monkeypatch.setattr(LossWatch, "MARGINS", {"rise": 0.1, "explosion": -1.0})
    monkeypatch.setattr(LossWatch, "PATIENCE", 5)
    flags = [*TINY, f"--dataset={corpus}", f"--out_dir={tmp_path}", "--stop_on_explosion=True"]
    assert train_module.main(flags) == 0
    assert [line for line in metrics(tmp_path) if line.get("event") == "explosion"]
    assert max(losses(tmp_path)) == 4
    assert torch.load(tmp_path / "ckpt.pt")["iter_num"] == 5


def test_wandb_never_stops_the_training(corpus, tmp_path, monkeypatch):
    """No network, no key: logged offline."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # no netrc
    flags = [*TINY, f"--dataset={corpus}", f"--out_dir={tmp_path / 'out'}", "--wandb_log=True"]
    began = time.time()
    train(*flags, "--max_iters=3")
    assert time.time() - began < 60
    assert list((tmp_path / "out" / "wandb").glob("offline-run-*"))
    assert len(losses(tmp_path / "out")) == 3


def test_offsets_are_a_function_of_seed_and_step(corpus):
    from batches import Batches

    config = TrainConfig(dataset=str(corpus), block_size=32)
    a, b = Batches(config, 64), Batches(config, 64, rank=1, world_size=2)
    for step in (0, 1, 10**6):
        assert np.array_equal(a.offsets(step), b.offsets(step))
    assert not np.array_equal(a.offsets(0), a.offsets(1))
    assert a.offsets(0).tolist()[:3] == [16649, 83, 13870]
    parts = [np.concatenate([*x.training(0)]) for x in (Batches(config, 64, r, 2) for r in (0, 1))]
    assert np.array_equal(np.concatenate(parts), np.concatenate([*a.training(0)]))


@pytest.mark.parametrize(
    ("asked", "has_bf16", "expected"),
    [
        ("auto", True, torch.bfloat16),
        ("auto", False, torch.float16),
        ("bfloat16", True, torch.bfloat16),
        ("bfloat16", False, None),
        ("float32", False, torch.float32),
    ],
)
def test_dtype_on_gpus_with_and_without_bf16(asked, has_bf16, expected, monkeypatch):
    from config import ConfigError
    from processes import choose_dtype

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: has_bf16)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "an old GPU")
    config = TrainConfig(dtype=asked)
    if expected is None:
        with pytest.raises(ConfigError, match="dtype=bfloat16, but an old GPU lacks it"):
            choose_dtype(config, torch.device("cuda"))
    else:
        assert choose_dtype(config, torch.device("cuda")) == expected
