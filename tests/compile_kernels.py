"""Compile every kernel for a GPU that need not be there, and print the shared memory of each."""

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import flash_attn_stable as fas
from attention_reference import Precision
from attention_tiles import backward_tiles, constants, forward_tiles


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
            signature[name] = types.get(name, "*bf16")
            if name not in ("scale", "H"):
                aligned[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=aligned)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options=options).metadata.shared


def main(capability: int, shared: int):
    for D in (64, 128):
        for arithmetic in ("fa2", "official,stable=paper"):
            P = Precision.parse(arithmetic)
            dkdv, dq = backward_tiles(D, shared)
            kernels = [
                (fas._forward_kernel, *forward_tiles(1024, D, P, shared)),
                (fas._dkdv_kernel, *dkdv),
                (fas._dq_kernel, *dq),
            ]
            for kernel, tile, options in kernels:
                C = constants(D, True, 0.125, P, **tile)
                used = shared_memory(kernel, capability, {"C": C}, options)
                print(D, arithmetic, kernel.__name__, used)
