"""The loss explosion in true BF16 on one GPU: the authors' arithmetic as it is, GPT-2 tokens.

30M parameters, 16,384 tokens a step; what configs/fast_gpu.py shows in 2,000 steps takes some 9,000
without a coarser format. The arms of configs/grids/fast_bf16.py differ in `precision` alone.
"""

from configs.fast_gpu import *

out_dir = "out/fast_bf16"
wandb_run_name = "fast_bf16"
precision = "official"
max_iters = 12000
