"""
The kernels under NVIDIA's compute-sanitizer, memcheck and racecheck, on small cases.

    python scripts/sanitize.py

Needs a GPU and compute-sanitizer (part of the CUDA toolkit). Exit code 0 if both are clean.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
ARITHMETICS = ("official,stable=paper,key_tile=32", "paper,stable=bounded", "fa2/fa2,delta=dp_p@1")
SHAPES = ((70, 48), (128, 64))  # (length, head width)
TOOLS = ("memcheck", "racecheck")


def run_kernels():
    """Forward and backward of each arithmetic and shape, causal and not."""
    import torch

    from flash_attn_stable import flash_attention

    for T, D in SHAPES:
        for arithmetic in ARITHMETICS:
            for causal in (True, False):
                print(f"  {arithmetic}, T {T}, D {D}, causal {causal}", flush=True)
                qkv = [torch.randn(1, 2, T, D, device="cuda").bfloat16() for _ in range(3)]
                qkv = [x.requires_grad_() for x in qkv]
                flash_attention(*qkv, causal=causal, precision=arithmetic).float().sum().backward()
                assert all(x.grad.isfinite().all() for x in qkv)
    torch.cuda.synchronize()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("--kernels", action="store_true", help="run them alone, unchecked")
    if parser.parse_args().kernels:
        run_kernels()
        return 0
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(sanitizer).exists():
        print("error: compute-sanitizer is not on PATH; it is in the CUDA toolkit", file=sys.stderr)
        return 2
    command = [sys.executable, __file__, "--kernels"]
    subprocess.run(command, check=True)  # compiles, so that the tools see only the kernels run
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # else bounds are the pool's
    codes = []
    for tool in TOOLS:
        # only Triton's kernels: torch's own are not what is checked
        options = ["--tool", tool, "--error-exitcode=1", "--kernel-name", "kns=_kernel"]
        print(tool, flush=True)
        codes.append(subprocess.run([sanitizer, *options, *command], env=environment).returncode)
    return 1 if any(codes) else 0


if __name__ == "__main__":
    sys.exit(main())
