"""The loss explosion in minutes on one GPU: GPT-2 tokens, O has 5 mantissa bits, BF16 has 7.

30M parameters, 16,384 tokens a step. `official` is the arithmetic of the authors' published code,
tiles of 512 keys and all; what it rounds on the way to O is rounded four times as coarsely.
"""

from configs.lab_original import *

out_dir = "out/fast_gpu"
wandb_run_name = "fast_gpu"
precision = "official,mantissa_bits=5"
max_iters = 3000
eval_interval = 500
stop_on_explosion = True
log_attention = True
always_save_checkpoint = False
