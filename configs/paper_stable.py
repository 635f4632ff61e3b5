"""The paper's run with the stabilized kernel, β = 2: the loss is expected to keep falling.

The row sum has the floor of the authors' code: without it, as printed, rows of large repeated
maxima are 0 / 0, and smaller models ended in NaN. Everything but the kernel's arithmetic is as in
configs/paper_original.py, batches included.
"""

from configs.paper_original import *

out_dir = "out/paper_stable"
wandb_run_name = "paper_stable"
precision = "paper,stable=paper,beta=2,row_sum_floor=1e-10"
