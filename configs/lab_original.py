"""A small model for experiments on one GPU: 30M parameters, 16,384 tokens a step.

Its 2,000 steps take about a minute on an H200 and show that the variants train alike at first; the
paper's failure takes longer to build up.
"""

out_dir = "out/lab_original"
wandb_project = "flash-attention-bf16"
wandb_run_name = "lab_original"

attention = "flash"
precision = "official"
dtype = "bfloat16"

# 16 sequences · 1024 tokens = 16,384 tokens a step
batch_size = 16
gradient_accumulation_steps = 1
block_size = 1024

n_layer = 6
n_head = 6
n_embd = 384
bias = False

learning_rate = 1e-3
min_lr = 1e-5
warmup_iters = 500
max_iters = 2000
lr_decay_iters = 600000
weight_decay = 0.0
beta2 = 0.95
seed = 0

eval_interval = 500
eval_iters = 20
log_interval = 10
