"""Small versions of every backbone with every mixer, for tests."""

import timm
import torch

import vitzoo
from vitzoo.mixers import mixer_class
from vitzoo.models._block import Block

SMALL = {
    'aft': dict(embed_dim=24, num_heads=2, depth=2),
    'cvt': dict(embed_dims=(16, 24, 32), num_heads=(1, 2, 2), depths=(1, 1, 1)),
    'deit': dict(embed_dim=24, num_heads=2, depth=2),
    'vil': dict(embed_dims=(16, 24, 24, 32), num_heads=(1, 2, 2, 2), depths=(1, 1, 1, 1)),
}
SMALLEST = {'aft': 'tiny', 'cvt': '13', 'deit': 'tiny', 'vil': 'tiny'}
COMBINATIONS = [
    f'{backbone}_{mixer.removeprefix(backbone + "_")}_{size}'
    for backbone, size in SMALLEST.items()
    for mixer in vitzoo.list_mixers()
    if f'{backbone}_{mixer}' not in vitzoo.list_mixers()
]


def build(name, img_size=64, **kwargs):
    torch.manual_seed(0)
    kwargs = {**SMALL[name.split('_')[0]], 'num_classes': 5, **kwargs}
    return timm.create_model(name, img_size=img_size, **kwargs).eval()


def images(*size, batch_size=2, in_chans=3):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch_size, in_chans, *(size or (64, 64)), generator=generator)


def blocks(model):
    return [module for module in model.modules() if isinstance(module, Block)]


def mixers_of_ours():
    """The mixers of vitzoo itself, without those of installed plugins."""
    return [name for name in vitzoo.list_mixers() if mixer_class(name).__module__.startswith('vitzoo.')]
