"""The paper's run with its flash attention unchanged: GPT-2 124M, 524,288 tokens a step.

Expect the loss to explode near step 7,000 on OpenWebText (arXiv 2510.04212, figure 1): two hours on
one H200 at the speed in records/. Any number of GPUs that divides 16 sees the same batches; for
others, or with less memory, set micro_batch_size.
"""

out_dir = "out/paper_original"
wandb_project = "flash-attention-bf16"
wandb_run_name = "paper_original"

attention = "flash"
precision = "paper"
dtype = "bfloat16"

# 32 sequences · 16 micro-batches · 1024 tokens = 524,288 tokens a step (4 GPUs · accumulation 4)
batch_size = 32
gradient_accumulation_steps = 4 * 4
block_size = 1024

n_layer = 12
n_head = 12
n_embd = 768
bias = False

learning_rate = 1e-3
min_lr = 1e-5
warmup_iters = 2000
max_iters = 600000
lr_decay_iters = 600000
weight_decay = 0.0
beta1 = 0.9
beta2 = 0.95
grad_clip = 1.0

eval_interval = 500
eval_iters = 100
log_interval = 10
stop_on_explosion = True
