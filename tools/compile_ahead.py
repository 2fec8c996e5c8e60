"""Compile a kernel for GPUs that are not present, with the launches of its op, and report its use of resources.

Run by the tests of the kernels in a subprocess, where the compiler is active rather than the interpreter:
`python tools/compile_ahead.py KERNEL [ARCH DTYPE SIZES]` prints a line of JSON for each launch, by default for every
architecture, dtype and head dimension of ARCHS and SIZES.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

CUOBJDUMP = Path(triton.__file__).parent / 'backends' / 'nvidia' / 'bin' / 'cuobjdump'
POINTERS = {torch.float32: '*fp32', torch.bfloat16: '*bf16', torch.float16: '*fp16'}


def record(calls: Callable[[], None]) -> list[tuple[JITFunction, dict, dict]]:
    """The launches of `calls()`, none of which is executed: kernel, arguments by name, and compiler options."""
    launches, run = [], JITFunction.run

    def append(self, *args, grid, warmup, **kwargs):
        names = dict(zip(self.arg_names, args))
        options = {key: kwargs.pop(key) for key in [*kwargs] if key in ('num_warps', 'num_stages')}
        launches.append((self, {**names, **kwargs}, options))

    JITFunction.run = append
    try:
        calls()
    finally:
        JITFunction.run = run
    return launches


def compile_for(arch: int, kernel: JITFunction, args: dict, options: dict) -> dict:
    """Registers per thread, bytes of local memory per thread (spills and stack) and of shared memory per block."""
    constant = {param.name for param in kernel.params if param.is_constexpr}
    plain = constant | {param.name for param in kernel.params if param.do_not_specialize}
    signature = {name: 'constexpr' if name in constant else triton_type(args[name]) for name in kernel.arg_names}
    constants = {(kernel.arg_names.index(name),): args[name] for name in constant}
    # as the launcher specializes: tensors are aligned to 16 bytes, and some integers are multiples of 16
    aligned = [i for i, name in enumerate(kernel.arg_names) if name not in plain and is_aligned(args[name])]
    attributes = {(i,): [['tt.divisibility', 16]] for i in aligned}
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget('cuda', arch, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix='.cubin') as file:
        file.write(compiled.asm['cubin'])
        file.flush()
        usage = subprocess.run([CUOBJDUMP, '-res-usage', file.name], capture_output=True, text=True, check=True).stdout
    found = {key: int(number) for key, number in re.findall(r'(REG|STACK|LOCAL|SHARED):(\d+)', usage)}
    return dict(
        kernel=kernel.__name__,
        arch=arch,
        registers=found['REG'],
        spills=found['STACK'] + found['LOCAL'],
        shared=compiled.metadata.shared,
        **options,
    )


def triton_type(value: torch.Tensor | float | int) -> str:
    """The type of a kernel argument in a Triton signature."""
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    return 'fp32' if isinstance(value, float) else 'i32'


def is_aligned(value: torch.Tensor | float | int) -> bool:
    """Return True if Triton's launcher marks the argument as divisible by 16."""
    return isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)


def aft_conv(dtype: torch.dtype, head_dim: int) -> None:
    """Both passes of AFT-conv, with the paper's 11 x 11 kernel."""
    from vitzoo.kernels import aft_conv

    x = torch.zeros(1, 49, 3, 2, head_dim, dtype=dtype)
    q, k, v = x.transpose(1, 3).unbind(2)
    args = q, k[..., :1], v, torch.zeros(2, 11, 11), 7, 7
    saved = aft_conv.forward_op._init_fn(*args)
    aft_conv.backward_op._init_fn(q, *args[:4], *saved, 7, 7)


def favor(dtype: torch.dtype, head_dim: int) -> None:
    """Both passes of FAVOR+, with 256 features."""
    from vitzoo.kernels import favor

    q, k, v = torch.zeros(1, 49, 3, 2, head_dim, dtype=dtype).transpose(1, 3).unbind(2)
    args = q, k, v, torch.zeros(256, head_dim)
    saved = favor.forward_op._init_fn(*args, 0.125)
    favor.backward_op._init_fn(q, *args, *saved, 0.125)


def window(dtype: torch.dtype, head_dim: int, window_size: int = 7, halo: int = 3) -> None:
    """Both passes of window attention, with 9 shared keys and both biases."""
    from vitzoo.kernels.window import window_attention_triton

    side, S = 2 * window_size + 1, 9
    q, k, v = torch.zeros(1, side**2, 3, 2, head_dim, dtype=dtype, requires_grad=True).permute(2, 0, 3, 1, 4)
    shared = torch.zeros(2, 1, 2, S, head_dim, dtype=dtype, requires_grad=True)
    bias = torch.zeros(2, window_size**2, (window_size + 2 * halo) ** 2, requires_grad=True)
    bias_shared = torch.zeros(2, S, requires_grad=True)
    sizes = (side, side), (window_size, window_size), (halo, halo), (0, 0)
    window_attention_triton(q, k, v, *shared, *sizes, 0.1, bias, bias_shared).sum().backward()


SIZES = [
    ('bfloat16', 32), ('bfloat16', 64), ('bfloat16', 128), ('float16', 64), ('float16', 128), ('float32', 64),
]  # fmt: skip
# the heads of the paper's models have one channel
MORE_SIZES = {'aft_conv': [('bfloat16', 1)]}
# 86 has the least shared memory, as 89 and 120 do
ARCHS = (80, 86, 90, 100)


def main(name: str, *case: str) -> None:
    """Print a line of JSON for each launch of each case."""
    cases = [(arch, *sizes) for sizes in SIZES + MORE_SIZES.get(name, []) for arch in ARCHS]
    for arch, dtype, *sizes in [case] if case else cases:
        for launch in record(partial(globals()[name], getattr(torch, dtype), *map(int, sizes))):
            fields = dict(dtype=dtype, head_dim=int(sizes[0])) | compile_for(int(arch), *launch)
            print(json.dumps(fields), flush=True)


if __name__ == '__main__':
    main(*sys.argv[1:])
