"""The loss explosion in minutes, in a format coarser than BF16: O has 5 mantissa bits, not 7.

30M parameters, 16,384 tokens a step. The original arithmetic is expected to explode near step
1,800, a minute of an H200: it did in one unrecorded run. The arms of configs/grids/fast_coarse.py
differ from it in `precision` alone. It shows what a large rounding error of O does, not that BF16's
own is enough.
"""

from configs.lab_original import *

out_dir = "out/fast_coarse"
wandb_run_name = "fast_coarse"
precision = "paper,mantissa_bits=5"
max_iters = 2500
eval_interval = 250
stop_on_explosion = True
log_attention = True
always_save_checkpoint = False
