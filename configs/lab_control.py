"""The small model with torch's own attention; all else as in configs/lab_original.py."""

from configs.lab_original import *

out_dir = "out/lab_control"
wandb_run_name = "lab_control"
attention = "sdpa"
