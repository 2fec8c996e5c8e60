"""Runs mixers and models on a GPU that is not there, and lists faults that a CPU does not show.

    python tools/pretend_gpu/check.py                   # every mixer, its options, every backbone: ten minutes
    python tools/pretend_gpu/check.py --mixers swin ls  # some
    python tools/pretend_gpu/check.py --quick           # every mixer once, and in one backbone: a minute

torch is started with a CUDA runtime of one device that computes nothing, and tensors have shapes, dtypes and a device,
but no values. Under autocast, and in forward and backward passes as on a GPU, this shows

- tensors on different devices, attention masks of another dtype than the queries, and more heads than fit on a grid;
- host waits: copies between host and device, sizes and values that the host reads. They are slow, and a CUDA graph with
  them cannot be captured.

It does not show wrong numbers, faults inside kernels, or a lack of memory. The exit code is 1 for a failure, or for a
host wait in a file that `EXPECTED_WAITS` in run.py does not name, and 2 if the check cannot run. Needs Linux, gcc,
and a build of torch with CUDA.
"""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]


def main() -> None:
    """Compile the runtime, and run the cases with it in another process."""
    with TemporaryDirectory(prefix='pretend_gpu_') as folder:
        # the name of the driver, which torch loads only if none has this name yet
        library = Path(folder) / 'libcuda.so.1'
        compile_runtime(library)
        paths = [str(ROOT), str(ROOT / 'tests'), *filter(None, [os.environ.get('PYTHONPATH')])]
        env = os.environ | dict(LD_PRELOAD=str(library), PYTHONPATH=os.pathsep.join(paths))
        code = subprocess.run([sys.executable, '-W', 'ignore', FOLDER / 'run.py', *sys.argv[1:]], env=env).returncode
    if code < 0:
        refuse(f'run.py was ended by signal {-code}; if it crashed, torch needs a function that runtime.c lacks')
    sys.exit(code)


def compile_runtime(library: Path) -> None:
    """Compile runtime.c, with a function that returns 0 for every other one of CUDA that torch needs."""
    torch_folder = Path(find_spec('torch').origin).parent
    torch_libraries = sorted((torch_folder / 'lib').glob('*.so'))
    headers = sorted(torch_folder.parent.glob('nvidia/**/cuda_runtime_api.h'))
    if not headers or torch_folder / 'lib' / 'libtorch_cuda.so' not in torch_libraries:
        refuse('torch has no libtorch_cuda.so, or no cuda_runtime_api.h near it; install a build with CUDA from PyPI')
    # NVIDIA's package of CUDA 13 lacks a header that Triton has
    include = [headers[0].parent, torch_folder.parent / 'triton' / 'backends' / 'nvidia' / 'include']
    names = {name for path in torch_libraries for name in undefined_names(path) if re.match('cu(da)?[A-Z]', name)}
    rest = library.with_name('rest.c')
    rest.write_text(''.join(f'__attribute__((weak)) int {name}() {{ return 0; }}\n' for name in sorted(names)))
    sources = [FOLDER / 'runtime.c', rest]
    options = ['-shared', '-fPIC', '-w', f'-Wl,-soname,{library.name}', *(f'-I{folder}' for folder in include)]
    run_tool('gcc', *options, '-o', library, *sources)


def undefined_names(library: Path) -> list[str]:
    """The functions that a library expects of others."""
    lines = run_tool('nm', '--dynamic', '--undefined-only', library).splitlines()
    return [line.split()[-1].partition('@')[0] for line in lines]


def run_tool(*command: str | Path) -> str:
    """The output of gcc or of nm, which comes with it."""
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        refuse(f"'{command[0]}' is not installed; install gcc and binutils, as with `apt-get install gcc`")
    if done.returncode:
        refuse(f'{command[0]} failed with this version of torch: {done.stderr.strip().partition(chr(10))[0]}')
    return done.stdout


def refuse(message: str) -> NoReturn:
    """Exit with 2, as for a mistake of a user."""
    print(f'check.py: error: {message}', file=sys.stderr)
    raise SystemExit(2)


if __name__ == '__main__':
    main()
