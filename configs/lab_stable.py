"""The small model with the paper's fix, β = 2; all else as in configs/lab_original.py."""

from configs.lab_original import *

out_dir = "out/lab_stable"
wandb_run_name = "lab_stable"
precision = "official,stable=paper,beta=2"
