"""The paper's run with torch's own attention, which accumulates in FP32: the control.

Everything but the attention is as in configs/paper_original.py, batches included.
"""

from configs.paper_original import *

out_dir = "out/paper_control"
wandb_run_name = "paper_control"
attention = "sdpa"
