"""Compile the kernels of window attention for a GPU that is not here, as they are launched, and print what they take.

Run by test_kernels_window.py in a process of its own, in which no interpreter stands in for the compiler:
`python tests/compile_window.py ARCH DTYPE HEAD_DIM WINDOW_SIZE HALO` prints a line of JSON for each kernel.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from vitzoo.kernels.window import window_attention

CUOBJDUMP = Path(triton.__file__).parent / 'backends' / 'nvidia' / 'bin' / 'cuobjdump'
POINTERS = {torch.float32: '*fp32', torch.bfloat16: '*bf16', torch.float16: '*fp16'}


def recorded_launches(dtype: torch.dtype, head_dim: int, window_size: int, halo: int) -> list[tuple]:
    """Kernel, arguments by name and options of each launch of a forward and backward pass with all inputs."""
    launches = []

    def run(self, *args, grid, warmup, num_warps, num_stages, **kwargs):
        options = {'num_warps': num_warps, 'num_stages': num_stages}
        launches.append((self, dict(zip(self.arg_names, args)) | kwargs, options))

    JITFunction.run = run
    side, S = 2 * window_size + 1, 9
    # as a layer of queries, keys and values makes them
    q, k, v = torch.zeros(1, side**2, 3, 2, head_dim, dtype=dtype, requires_grad=True).permute(2, 0, 3, 1, 4)
    shared = torch.zeros(2, 1, 2, S, head_dim, dtype=dtype, requires_grad=True)
    bias = torch.zeros(2, window_size**2, (window_size + 2 * halo) ** 2, requires_grad=True)
    bias_shared = torch.zeros(2, S, requires_grad=True)
    window, reach = (window_size, window_size), (halo, halo)
    window_attention(q, k, v, *shared, (side, side), window, reach, 0.1, bias, bias_shared).sum().backward()
    return launches


def compile_for(arch: int, kernel: JITFunction, args: dict, options: dict) -> dict:
    """Registers of a thread, its bytes of local memory (spills), and the shared memory of a block in bytes."""
    constant = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
    signature = {name: 'constexpr' if name in constant else type_of(args[name]) for name in kernel.arg_names}
    constants = {name: args[name] for name in constant}
    # what the launcher would find: pointers, and the strides of heads and rows, are multiples of 16
    whole = [
        i for i, name in enumerate(kernel.arg_names) if signature[name][0] == '*' or name[-2:] in ('_b', '_h', '_n')
    ]
    attributes = {(i,): [['tt.divisibility', 16]] for i in whole}
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget('cuda', arch, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix='.cubin') as file:
        file.write(compiled.asm['cubin'])
        file.flush()
        usage = subprocess.run([CUOBJDUMP, '-res-usage', file.name], capture_output=True, text=True, check=True).stdout
    found = {key: int(number) for key, number in re.findall(r'(REG|STACK|LOCAL):(\d+)', usage)}
    blocks = {name: size for name, size in args.items() if name.startswith('BLOCK')}
    return {
        'kernel': kernel.__name__,
        'registers': found['REG'],
        'spilled': found['STACK'] + found['LOCAL'],
        'shared': compiled.metadata.shared,
        **options,
        **blocks,
    }


def type_of(value: torch.Tensor | int | float) -> str:
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    return 'fp32' if isinstance(value, float) else 'i32'


def main(arch: str, dtype: str, *sizes: str) -> None:
    """Print a line of JSON for each kernel."""
    for launch in recorded_launches(getattr(torch, dtype), *map(int, sizes)):
        print(json.dumps(compile_for(int(arch), *launch)), flush=True)


if __name__ == '__main__':
    main(*sys.argv[1:])
