"""Compile every kernel for a GPU that need not be there, and print the shared memory of each."""

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from attention_tiles import arithmetics, dkdv_tiles, dq_tiles, forward_tiles
from flash_attn_backward import _dkdv_kernel, _dq_kernel
from flash_attn_stable import _forward_kernel

ARITHMETICS = ("fa2", "official,stable=paper", "official,delta=dp_p,stable=bounded/fa2@1")


def shared_memory(kernel, capability: int, constants: dict, options: dict) -> int:
    """Bytes of shared memory of one kernel, compiled for contiguous BF16 tensors."""
    signature, constexprs, aligned = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], constexprs[(i,)] = "constexpr", constants[name]
        elif name.startswith("stride"):
            signature[name], constexprs[(i, 3)] = ("i32", "i32", "i32", "constexpr"), 1
            aligned |= {(i, j): [["tt.divisibility", 16]] for j in range(3)}
        else:
            types = {"scale": "fp32", "H": "i32", "T": "i32", "lse": "*fp32", "delta": "*fp32"}
            types |= {"kinds": "*i32", "seed": "*i64"}
            signature[name] = types.get(name, "*bf16")
            if name not in ("scale", "H"):
                aligned[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=aligned)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options=options).metadata.shared


def main(capability: int, shared: int):
    for D in (64, 128):
        for text in ARITHMETICS:
            A = arithmetics(text, 2, 1024, D, True, D**-0.5, torch.bfloat16)
            kernels = [
                (_forward_kernel, *forward_tiles(A, 1024, shared)),
                (_dq_kernel, *dq_tiles(A, shared)),
                (_dkdv_kernel, *dkdv_tiles(A, shared)),
            ]
            for kernel, tiled, options in kernels:
                used = shared_memory(kernel, capability, {"A": tiled}, options)
                print(D, text, kernel.__name__, used)
