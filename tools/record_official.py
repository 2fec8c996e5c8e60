"""Record the authors' classes on grids of awkward sizes: python tools/record_official.py CLONES

A mixer whose authors published no code that runs here is recorded from a package of others.

CLONES is a folder with a clone of each repository of `CASES`, in a folder of its name. The classes run in float64 on a
CPU, with the weights of the recordings in tests/golden or, if their shapes depend on the grid or there are none, with
random ones. tests/golden/awkward.safetensors then has for each case its input, its output and the gradient of half the
sum of squares of the output with respect to the input, all as tokens (1, P + N, C), and the weights that are new.
"""

import __future__

import ast
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from vitzoo import create_mixer
from vitzoo.mixers.bigbird import draw_blocks

GOLDEN = Path(__file__).parents[1] / 'tests' / 'golden'
OUTPUT = GOLDEN / 'awkward.safetensors'
DIM, HEADS = 48, 3
# standard deviation of the random weights
_STD = 0.3


def as_tokens(layer: nn.Module, x: Tensor, grid: tuple[int, int], definitions: dict[str, Any]) -> Tensor:
    """Tokens (B, P + N, C)."""
    return layer(x)


def as_tokens_with_grid(layer: nn.Module, x: Tensor, grid: tuple[int, int], definitions: dict[str, Any]) -> Tensor:
    """Tokens, and the height and width."""
    return layer(x, *grid)


def as_sequence_first(layer: nn.Module, x: Tensor, grid: tuple[int, int], definitions: dict[str, Any]) -> Tensor:
    """Tokens (N, B, C)."""
    return layer(x.transpose(0, 1)).transpose(0, 1)


def as_maps(layer: nn.Module, x: Tensor, grid: tuple[int, int], definitions: dict[str, Any]) -> Tensor:
    """A map (B, H, W, C)."""
    return layer(x.unflatten(1, grid)).flatten(1, 2)


def as_rmt(layer: nn.Module, x: Tensor, grid: tuple[int, int], definitions: dict[str, Any]) -> Tensor:
    """A map (B, H, W, C), with rotations and decays of another class."""
    positions = definitions['RetNetRelPos2d'](DIM, HEADS, 2, 4).double()
    is_decomposed = isinstance(layer, definitions['VisionRetentionChunk'])
    return layer(x.unflatten(1, grid), positions(grid, chunkwise_recurrent=is_decomposed)).flatten(1, 2)


def as_mala(layer: nn.Module, x: Tensor, grid: tuple[int, int], definitions: dict[str, Any]) -> Tensor:
    """A map (B, C, H, W), with rotations of another class."""
    positions = definitions['RoPE'](DIM, HEADS).double()(grid)
    return layer(x.mT.unflatten(2, grid), *positions).flatten(2).mT


def as_nystrom(layer: nn.Module, x: Tensor, grid: tuple[int, int], definitions: dict[str, Any]) -> Tensor:
    """Tokens, without the values of its single head, which the class adds to its output."""
    return layer(x) - layer.qkv(x).chunk(3, dim=2)[2]


def as_bigbird(layer: nn.Module, x: Tensor, grid: tuple[int, int], definitions: dict[str, Any]) -> Tensor:
    """A strip of blocks, of which the first and the last are global, with the random blocks of our mixer.

    The prefix tokens are the last block.
    """
    size, tokens = layer.block_size, x.shape[1]
    options: dict[str, Any] = dict(block_size=size, num_random_blocks=layer.num_random_blocks)
    seeds = create_mixer('bigbird', DIM, HEADS, grid_size=grid, num_prefix_tokens=size, **options).seeds
    # without those of the first block, which attends everything
    drawn = draw_blocks(seeds, grid, size, 1, layer.num_random_blocks)[:, 1:].numpy()
    layer._bigbird_block_rand_mask_with_head = lambda **kwargs: list(drawn)
    blocked = x.new_ones(1, tokens // size, size)
    band = x.new_ones(1, 1, tokens // size - 4, size, 3 * size)
    masks = band, x.new_ones(1, 1, tokens, 1), x.new_ones(1, 1, 1, tokens), blocked, blocked
    return layer(x.roll(-size, dims=1), *masks)[0].roll(size, dims=1)


def as_local(layer: nn.Module, x: Tensor, grid: tuple[int, int], definitions: dict[str, Any]) -> Tensor:
    """The heads (B, heads, N, head_dim) of tokens, which are queries, keys and values."""
    heads = x.unflatten(2, (HEADS, -1)).transpose(1, 2)
    # without a mask, the class attends the zeros with which it fills the last block
    mask = torch.ones(x.shape[:2], dtype=torch.bool)
    return layer(heads, heads, heads, mask=mask).transpose(1, 2).flatten(2)


@dataclass
class Case:
    """A class of a repository on a grid.

    Attributes:
        name: A mixer, or a mixer and a form of it.
        source: Repository, file and class.
        commit: That was recorded, or its tag.
        grid: Height and width.
        options: Arguments of the class.
        run: Calls the class with tokens; its inputs have the form that the name of the function says.
        weights: The recording in tests/golden whose weights it has; without one, they are random.
        prefix: What precedes the names of the weights in that recording.
        num_prefix_tokens: Class tokens before those of the grid.
        dtype: Of the computation; the recording is in float32.
        whose: The owner of the class, such as "the authors'".
    """

    name: str
    source: str
    commit: str
    grid: tuple[int, int]
    options: dict[str, Any]
    run: Callable[..., Tensor] = as_tokens
    weights: str = ''
    prefix: str = 'state.'
    num_prefix_tokens: int = 0
    dtype: torch.dtype = torch.float64
    whose: str = "the authors'"

    @property
    def key(self) -> str:
        """The name and the grid, such as 'mala_5x7'."""
        return f'{self.name}_{self.grid[0]}x{self.grid[1]}'


_HEADS: dict[str, Any] = dict(dim=DIM, num_heads=HEADS)
_RMT = 'qhfan/RMT classfication_release/RMT.py'
_OF_RMT: dict[str, Any] = dict(
    commit='32ea21417a4d82ba6481f930f94cb4696dda0a8e',
    grid=(5, 7),
    options=dict(embed_dim=DIM, num_heads=HEADS),
    run=as_rmt,
    weights='modern_structure rmt_decomposed_a.',
    prefix='state.attn.',
)
_CIRCULANT = (
    'LeapLabTHU/Circulant-Attention models/ca_deit.py CirculantAttention',
    '21323da749e05f75e19e3e20c0c1d92199bc06e0',
)
CASES = [
    Case(
        'agent',
        'LeapLabTHU/Agent-Attention agent_transformer/models/agent_deit.py AgentAttention',
        '207ce3eb357b22ef8a15f8fa21cd1f14697bbaba',
        (5, 5),
        dict(_HEADS, qkv_bias=True, agent_num=16, window=5),
        num_prefix_tokens=1,
    ),
    Case(
        'inline',
        'LeapLabTHU/InLine models/inline_deit.py InLineAttention',
        'e463a6f4dbb95893726b294ff83f61a58644bf6e',
        (5, 5),
        dict(_HEADS, qkv_bias=True),
        weights='modern_kernels inline_a/',
        num_prefix_tokens=1,
    ),
    Case(
        'focused',
        'LeapLabTHU/FLatten-Transformer models/flatten_pvt.py FocusedLinearAttention',
        'abdb115f5406c0e1b6864aad7fe998a3f424ae76',
        (5, 7),
        dict(_HEADS, num_patches=35, qkv_bias=True),
        as_tokens_with_grid,
    ),
    Case(
        'polaformer',
        'ZacharyMeng/PolaFormer models/pola_pvt.py PolaLinearAttention',
        '44cdd39e2f6c2a409ab1c16a9b836f08f22cfc79',
        (5, 7),
        dict(_HEADS, num_patches=35, qkv_bias=True),
        as_tokens_with_grid,
    ),
    Case(
        'mala',
        'qhfan/MALA classfication_release/model.py AddLinearAttention',
        '7114e6391e16a79e52382cbbcaa7f035705f3449',
        (5, 7),
        _HEADS,
        as_mala,
        weights='modern_kernels mala_a/',
    ),
    Case(
        'flowformer',
        'thuml/Flowformer Flowformer_CV/flowformer.py Flow_Attention',
        '61f5d8c83907955a8bc226af03b81b59b2724c8f',
        (5, 7),
        _HEADS,
    ),
    Case(
        'cosformer',
        'OpenNLPLab/cosFormer cosformer.py CosformerAttention',
        '8e12da111e2a683ea875711e0bf5810c6b4e8f9f',
        (5, 7),
        dict(embed_dim=DIM, num_heads=HEADS),
        as_sequence_first,
    ),
    Case(
        'ls',
        'NVIDIA/transformer-ls imagenet/models/layers/transformer_ls.py AttentionLS',
        '1527c5cc760daf1432a5c5c1fdc2ffb2f074c969',
        (6, 6),
        dict(_HEADS, qkv_bias=True, rpe=True, dp_rank=5, w=3),
        as_tokens_with_grid,
        num_prefix_tokens=1,
        # the class casts some values to it
        dtype=torch.float32,
    ),
    Case(
        'nystrom',
        'mlpen/Nystromformer ImageNet/T2T-ViT/models/token_nystromformer.py NysAttention',
        '56893131bf3fa99b5a2d3ab452a591dca722529a',
        (5, 7),
        dict(dim=DIM, num_heads=1, in_dim=DIM, qkv_bias=True, num_landmarks=8, kernel_size=3),
        as_nystrom,
    ),
    Case(
        'srformer',
        'whai362/PVT classification/pvt.py Attention',
        '57e2dfaa5a46f9050d76f306a4fcd9a7c061f520',
        (5, 7),
        dict(_HEADS, qkv_bias=True, sr_ratio=2),
        as_tokens_with_grid,
    ),
    Case(
        'xca',
        'facebookresearch/xcit xcit.py XCA',
        '82f5291f412604970c39a912586e008ec009cdca',
        (5, 7),
        dict(_HEADS, qkv_bias=True),
    ),
    Case('rmt_decomposed', f'{_RMT} VisionRetentionChunk', **_OF_RMT),
    Case('rmt_whole', f'{_RMT} VisionRetentionAll', **_OF_RMT),
    Case(
        'ttt',
        'LeapLabTHU/ViTTT ttt_block.py TTT',
        'e3477587d099e6b9e83e9e7c80b1b999e0989a20',
        (5, 7),
        _HEADS,
        as_tokens_with_grid,
        weights='modern_structure vittt_a.',
    ),
    Case('circulant', *_CIRCULANT, (5, 5), dict(dim=DIM), weights='modern_structure circulant_a.'),
    Case('circulant', *_CIRCULANT, (6, 6), dict(dim=DIM), weights='modern_structure circulant_a.'),
    Case(
        'vssd',
        'YuHengsss/VSSD classification/models/mamba2.py Mamba2',
        '87b753b356dd0cd176a6356fdb82fa536d8435eb',
        (5, 7),
        dict(d_model=DIM, headdim=32, linear_attn_duality=True, d_state=16),
        as_tokens_with_grid,
        weights='modern_structure vssd_a.',
    ),
    Case(
        'biformer',
        'rayleizhu/BiFormer ops/bra_legacy.py BiLevelRoutingAttention',
        '1697bbbeafb8680524898f1dcaac10defd0604be',
        (4, 12),
        dict(_HEADS, side_dwconv=5, n_win=4, topk=4),
        as_maps,
        weights='modern_structure biformer_a.',
    ),
    Case(
        'bigbird',
        'huggingface/transformers src/transformers/models/big_bird/modeling_big_bird.py BigBirdBlockSparseAttention',
        'v5.24.0',
        (1, 36),
        dict(
            config=SimpleNamespace(
                hidden_size=DIM,
                num_attention_heads=HEADS,
                block_size=3,
                num_random_blocks=2,
                max_position_embeddings=4096,
                use_bias=True,
            )
        ),
        as_bigbird,
        num_prefix_tokens=3,
        whose="with the same random blocks, transformers'",
    ),
    Case(
        'local',
        'lucidrains/local-attention local_attention/local_attention.py LocalAttention',
        'af58e53f81e5e1d87a7d50cb193d5c26f3c0e03f',
        (1, 33),
        dict(window_size=7, autopad=True),
        as_local,
        whose="local-attention's",
    ),
]


def read_definitions(clones: Path, case: Case) -> dict[str, Any]:
    """The classes and functions of a file that can be defined with the packages that are installed.

    The rest of the file is not run, nor are functions with decorators, which register models with timm.
    """
    repository, file, _ = case.source.split()
    command = ['git', '-C', str(clones / repository.split('/')[1]), 'show', f'{case.commit}:{file}']
    shown = subprocess.run(command, capture_output=True, text=True)
    if shown.returncode:
        raise SystemExit(f'{clones} has no clone of https://github.com/{repository}: {shown.stderr.strip()}')
    definitions: dict[str, Any] = dict(__name__=repository)
    for node in ast.parse(shown.stdout).body:
        is_definition = isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.decorator_list
        if not is_definition and not isinstance(node, ast.Import | ast.ImportFrom | ast.Assign):
            continue
        try:
            # annotations name classes of modules that cannot be imported
            code = compile(ast.Module([node], []), file, 'exec', __future__.annotations.compiler_flag)
            exec(code, definitions)
        except (ImportError, NameError) as error:
            # other classes of the file, and packages that a class does not need
            print(f'{file}:{node.lineno} is left out: {error}', file=sys.stderr)
    return definitions


def read_weights(case: Case) -> dict[str, Tensor]:
    """The weights of a recording in tests/golden, by their names in the class."""
    file, start = case.weights.split()
    start += case.prefix
    recorded = safetensors.torch.load_file(GOLDEN / f'{file}.safetensors')
    return {key.removeprefix(start): value for key, value in recorded.items() if key.startswith(start)}


def record(clones: Path, case: Case) -> dict[str, Tensor]:
    """Run a class on its grid."""
    torch.manual_seed(0)
    definitions = read_definitions(clones, case)
    layer = definitions[case.source.split()[2]](**case.options).eval().to(case.dtype)
    # in float32, as they are kept
    random = {name: _STD * torch.randn(x.shape) for name, x in layer.named_parameters()}
    weights = read_weights(case) if case.weights else random
    layer.load_state_dict(weights, strict=bool(case.weights))
    x = torch.randn(1, case.num_prefix_tokens + case.grid[0] * case.grid[1], DIM)
    given = x.to(case.dtype, copy=True).requires_grad_()
    output = case.run(layer, given, case.grid, definitions)
    (gradient,) = torch.autograd.grad(output.square().sum() / 2, given)
    found = dict(input=x, output=output.detach().float(), gradient=gradient.float())
    new = {} if case.weights else {f'state.{name}': value for name, value in random.items()}
    return {f'{case.key}/{name}': tensor.contiguous() for name, tensor in {**found, **new}.items()}


def main(argv: list[str]) -> None:
    """Record all cases."""
    if len(argv) != 1:
        raise SystemExit(__doc__)
    tensors, metadata = {}, {}
    for case in CASES:
        tensors |= record(Path(argv[0]), case)
        weights = case.weights or 'seed 0'
        metadata[case.key] = f'{case.source} {case.commit}; {case.options}; weights of {weights}; {case.whose}'
    safetensors.torch.save_file(tensors, OUTPUT, metadata=metadata)
    print(f'wrote {OUTPUT}')


if __name__ == '__main__':
    main(sys.argv[1:])
