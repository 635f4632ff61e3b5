"""The run of the authors' published code: 327,680 tokens a step, tiles of 512 keys.

Made for four cards of 24 GB. The code fixes no seed, so its batches can only be replayed from the
files it wrote: --replay_batches=<folder>. For the stabilized run add
--precision=official,stable=paper --out_dir=out/authors_stable.
"""

from configs.paper_original import *

out_dir = "out/authors_original"
wandb_run_name = "authors_original"
precision = "official"

# 20 sequences · 16 micro-batches · 1024 tokens = 327,680 tokens a step
batch_size = 20
gradient_accumulation_steps = 16
eval_interval = 1000
