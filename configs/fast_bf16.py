"""True BF16 where a loss exploded in minutes on one GPU: GPT-2 tokens, logical tiles of 16 keys.

30M parameters, 16,384 tokens a step. `official` arithmetic rounds a row of 1,024 keys to BF16 up to
64 times. Of four runs one exploded, at step 3,479, two minutes of an H200, as W_Q and the scores of
the second and third layer ran away; two rose. The arms of configs/grids/fast_bf16.py differ in
`precision` alone.
"""

from configs.lab_original import *

out_dir = "out/fast_bf16"
wandb_run_name = "fast_bf16"
precision = "official,key_tile=16"
max_iters = 6000
eval_interval = 500
stop_on_explosion = True
log_attention = True
always_save_checkpoint = False
