"""Config files and flags: what is taken, and what is refused with which line."""

import ast
import re

import pytest
from conftest import ROOT

from config import FIELDS, ConfigError, TrainConfig, help_text, parse_args
from precision import PRECISIONS, Precision

SELF_EXPLANATORY = ["wandb_project", "wandb_run_name", "n_layer", "n_head", "beta1", "beta2"]
SELF_EXPLANATORY += ["min_lr"]
CONFIGS = sorted(path.relative_to(ROOT) for path in (ROOT / "configs").glob("*.py"))


def write(tmp_path, text):
    path = tmp_path / "config_file.py"
    path.write_text(text)
    return str(path)


def test_flags():
    config = parse_args(["--wandb_run_name=a=b", "--learning_rate=1", "--compile=false"])
    assert config.wandb_run_name == "a=b"
    assert config.learning_rate == 1.0
    assert type(config.learning_rate) is float
    assert config.compile is False


def test_files_then_flags_in_their_order(tmp_path):
    path = write(
        tmp_path, "import time\n_hidden = 3\nbatch_size = 2 * _hidden\nlearning_rate = 1\n"
    )
    config = parse_args(["--batch_size=7", path, "--seed=1", "--seed=2"])
    assert config == TrainConfig(batch_size=7, learning_rate=1.0, seed=2)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--min_lr=-1e-5", "min_lr must be from 0 to 1000, got -1e-05"),
        ("--learning_rate=nan", "learning_rate must be"),
        ("--batch_size=0", "batch_size must be at least 1, got 0"),
        ("--batch_size=4.0", "batch_size must be int, got '4.0'"),
        ("--batch_size 4", "usage"),
        ("--batch_size", "usage"),
        ("-x=3", "usage"),
        ("--batchsize=4", "unknown key 'batchsize'; did you mean 'batch_size'?"),
        ("--zzz=4", "unknown key 'zzz'; --help lists the keys"),
        ("--precision=paper", "add --attention=flash"),
        ("--compile=maybe", "compile must be bool, got 'maybe'"),
        ("--dtype=bf16", "dtype must be auto | float32 | bfloat16 | float16, got 'bf16'"),
        ("--attention=flash,sdpa", "attention is one, or one for each of n_layer=12, not 2"),
        ("--attention=fast", "attention must be of flash, sdpa, math"),
        ("--precision=paper,beta=x", "beta takes float, not 'x'"),
        ("--precision=paper,beta=full", "beta takes float, not 'full'"),
        ("--precision=paper,beta=1", "beta is a finite number above 1"),
        ("--precision=paper,key_tile=24", "key_tile is a positive multiple of 16 or 'full'"),
        ("--seed=-1", "seed must be from 0 to"),
        ("--precision=mine", "unknown arithmetic 'mine'"),
        ("--precision=paper,mantissa_bits=1", "mantissa_bits is an int from 2 to 7, not 1"),
        ("--precision=fa2,delta_noise=-0.1", "delta_noise is a number from 0 to 1, not -0.1"),
        ("--precision=fa2,delta_offset=-1", "delta_offset is a number from -1 to 1, not -1.0"),
        ("--precision=fa2,delta=dp_p,delta_offset=0.1", "delta_offset is for δ = o or o_fp32"),
        ("--precision=paper,delta=p", "delta is 'o' or 'o_fp32' or 'dp_p', not 'p'"),
        ("--precision=paper;fa2", "precision is one, or one for each of n_layer=12, not 2"),
        ("--precision=paper/fa2@12", "with heads 0 to 11"),
        ("--precision=paper/fa2@1/official@1", "head 1 has two arithmetics"),
        ("--micro_batch_size=7", "micro_batch_size must divide"),
        ("nowhere.py", "no config file 'nowhere.py'"),
        ("batch_size=4", "did you mean --batch_size=4"),
    ],
)
def test_refused_flags(flag, message):
    with pytest.raises(ConfigError) as error:
        parse_args([flag])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batchsize = 4", "unknown key 'batchsize' in "),
        ("batch_size = 4.5", "batch_size must be int, got float 4.5 in "),
        ("compile = 1", "compile must be bool, got int 1 in "),
        ("batch_size = ", "SyntaxError"),
        ("batch_size = 1 / 0", "ZeroDivisionError"),
    ],
)
def test_refused_files(text, message, tmp_path):
    with pytest.raises(ConfigError) as error:
        parse_args([write(tmp_path, text)])
    assert message in str(error.value)
    assert "config_file.py" in str(error.value)


def test_flash_attention_has_no_dropout_and_bounded_heads():
    with pytest.raises(ConfigError, match="dropout must be 0"):
        TrainConfig(attention="flash", dropout=0.1)
    with pytest.raises(ConfigError, match="heads 16 to 128 wide, got n_embd / n_head = 192"):
        TrainConfig(attention="flash", n_head=4)


def test_every_key_has_a_line_in_the_help():
    lines = {re.match(r"  --(\w+)=", x)[1]: x for x in help_text().splitlines() if x[:4] == "  --"}
    assert list(lines) == list(FIELDS)
    for key, line in lines.items():
        default, meaning = line.split("=", 1)[1].split(f" {FIELDS[key].type.__name__}")
        assert type(FIELDS[key].default)(ast.literal_eval(default)) == FIELDS[key].default
        assert meaning or key in SELF_EXPLANATORY


@pytest.mark.parametrize("path", CONFIGS, ids=str)
def test_configs_parse(path):
    config = parse_args([str(ROOT / path)])
    assert (ROOT / path).read_text().startswith('"""')
    if path.stem.startswith("paper"):
        assert config.tokens_per_iter == 524_288
    if path.stem.startswith("authors"):
        assert config.tokens_per_iter == 327_680
    if path.stem.startswith("lab"):
        assert config.tokens_per_iter == 16_384


@pytest.mark.parametrize("family", ["paper", "lab"])
def test_variants_differ_in_attention_only(family):
    variants = [
        vars(parse_args([str(ROOT / f"configs/{family}_{arm}.py")]))
        for arm in ("original", "stable", "control")
    ]
    differing = {key for v in variants[1:] for key in v if v[key] != variants[0][key]}
    assert differing == {"out_dir", "wandb_run_name", "attention", "precision"}


# nanoGPT's own files, as far as they set keys: names and types must be taken as they are.
NANOGPT = """
import time
out_dir = 'out-shakespeare-char'
eval_interval = 250
eval_iters = 200
log_interval = 10
always_save_checkpoint = False
wandb_log = False
wandb_project = 'shakespeare-char'
wandb_run_name = 'ft-' + str(time.time())
dataset = 'shakespeare_char'
gradient_accumulation_steps = 5 * 8
batch_size = 64
block_size = 256
n_layer = 6
n_head = 6
n_embd = 384
dropout = 0.2
learning_rate = 1e-3
max_iters = 5000
lr_decay_iters = 5000
min_lr = 1e-4
beta2 = 0.99
warmup_iters = 100
init_from = 'gpt2-xl'
decay_lr = False
weight_decay = 1e-1
eval_only = True
device = 'cpu'
compile = False
"""


def test_nanogpts_config_files_run_unmodified(tmp_path):
    assert parse_args([write(tmp_path, NANOGPT)]).dropout == 0.2


@pytest.mark.parametrize("text", ["official", "paper,stable=paper,beta=7.0", "fa2,row_sum=bf16"])
def test_precision_reads_back_what_it_prints(text):
    assert str(Precision.parse(text)) == text
    assert Precision.parse(str(Precision.parse(text))) == Precision.parse(text)


def test_precisions_are_those_of_the_paper_and_the_code():
    official, paper, fa2 = (PRECISIONS[name] for name in ("official", "paper", "fa2"))
    assert (official.key_tile, official.tie_tolerance, official.beta) == (512, 1e-3, 2.0)
    assert (paper.key_tile, paper.tie_tolerance) == ("full", 0.0)
    points = ("scores", "row_max", "row_sum", "pv", "accumulator", "dp")
    assert all(getattr(fa2, point) == "fp32" for point in points)
    assert all(getattr(p, point) == "bf16" for p in (official, paper) for point in points)
