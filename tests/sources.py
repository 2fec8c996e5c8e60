"""Tiny models to convert, as folders and as files of other programs."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from teachers import make_teacher
from timm.models import save_for_hf
from tiny import CLASSES

import vitzoo
from vitzoo.convert import convert
from vitzoo.data import open_dataset
from vitzoo.data.held_out import HELD_OUT, write_held_out

PYRAMID = dict(depth=None, embed_dim=None, embed_dims=(16, 32), depths=(1, 1), num_heads=(2, 2))
VIL = dict(
    depth=None, patch_size=None, embed_dim=None, embed_dims=(16, 16, 16, 32), depths=(1,) * 4, num_heads=(2,) * 4
)
# timm's name, what differs from `make_teacher`, and the models that inherit from it
SOURCES = {
    'vit': ('vit_tiny_patch16_224', {}, 'deit_{}_tiny'),
    'scaled': ('vit_tiny_patch16_224', dict(init_values=0.5, dynamic_img_size=True), 'deit_{}_tiny'),
    # without a class token
    'registers': ('vit_medium_patch16_reg4_gap_256', {}, 'deit_{}_tiny'),
    'distilled': ('deit_tiny_distilled_patch16_224', {}, 'deit_{}_tiny'),
    'beit': ('beit_base_patch16_224', {}, ''),
    'relpos': ('vit_relpos_small_patch16_224', {}, ''),
    'dinov3': ('vit_small_patch16_dinov3', {}, ''),
    'eva02': ('eva02_tiny_patch14_224', {}, ''),
    'cait': ('cait_xxs24_224', {}, ''),
    'swin': (
        'swin_tiny_patch4_window7_224',
        dict(PYRAMID, embed_dim=16, embed_dims=None, patch_size=4, window_size=4),
        '',
    ),
    'pvt': ('pvt_v2_b0', dict(PYRAMID, img_size=None, patch_size=None, sr_ratios=(2, 1), mlp_ratios=(2, 2)), ''),
    'cvt': ('cvt_softmax_nano', dict(PYRAMID, patch_size=None), 'cvt_{}_nano'),
    'vil': ('vil_tiny', VIL, 'vil_{}_tiny'),
    'ls': ('deit_ls_tiny', dict(mixer_kwargs=dict(window_size=2, rank=1)), 'deit_{}_tiny'),
    'rope': ('aft_softmax_tiny', dict(pos_embed='rope'), 'aft_{}_tiny'),
    'swapped': ('deit_softmax_nano', {}, 'deit_{}_nano'),
    # as it is in timm
    'named': ('deit_softmax_nano', None, 'deit_{}_nano'),
}
LABELS = {'own': CLASSES, 'several': ['blue', 'first', 'green', 'red'], 'none': []}
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)


def arguments_of(source: str, num_classes: int, in_chans: int) -> dict:
    """The arguments with which timm makes a source of its name."""
    kwargs = SOURCES[source][1]
    own = dict(depth=2, img_size=32, patch_size=8, embed_dim=24, num_heads=2) if kwargs is not None else {}
    return {**own, 'num_classes': num_classes, 'in_chans': in_chans, **(kwargs or {})}


def save_source(source: str, head: str, channels: str, about: str, data_dir: str, seed: int, root: Path) -> Path:
    """The folder of a source as training writes it; the data and the weights depend on the seed."""
    grey, names = channels == 'grey', LABELS[head]
    kwargs = arguments_of(source, len(names), 1 if grey else 3)
    own = dict.fromkeys(('depth', 'img_size', 'patch_size', 'embed_dim', 'num_heads'))
    model = make_teacher(SOURCES[source][0], **{**own, **kwargs})
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    if source == 'swapped':
        vitzoo.swap_mixer(model, ['softmax', 'linear'])
    facts = dict(multi_label=head == 'several', data_dir=data_dir)
    facts |= dict(class_map=dict(red='blue', blue='red', green='green')) if about == 'map' else {}
    side = 128 if SOURCES[source][1] is None else 32
    config = dict(input_size=(1 if grey else 3, side, side), crop_pct=0.9 - 0.1 * seed)
    config |= dict(mean=(0.5,), std=(0.3,)) if grey else dict(mean=MEAN, std=STD)
    save_for_hf(
        model,
        str(root),
        model_config=dict(label_names=names[::-1] if seed else names, vitzoo=facts),
        safe_serialization=True,
        data_config=config,
    )
    if about == 'held out':
        images = open_dataset(data_dir, 'val', multi_label=head == 'several', val_fraction=0.2)
        write_held_out(root / HELD_OUT, images.reader)
    return root


def save_converted(folder: Path, root: Path) -> Path:
    convert(['--from', str(folder), '--swap', 'linear:1', '--out', str(root / 'converted')])
    return root / 'converted'


def write_file(kind: str, folder: Path, root: Path) -> Path:
    """The weights of a folder as a file of its own, as programs write it."""
    weights = load_file(folder / 'model.safetensors')
    if kind == 'folder':
        return folder / 'model.safetensors'
    if kind == 'safetensors':
        save_file(weights, root / 'weights.safetensors')
        return root / 'weights.safetensors'
    zeros = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    content = {
        'model': {'model': weights, 'epoch': 3},
        'module': {f'module.{name}': tensor for name, tensor in weights.items()},
        'ema': {'state_dict': zeros, 'state_dict_ema': weights},
        'lightning': {'state_dict': {f'model.{name}': tensor for name, tensor in weights.items()}},
    }[kind]
    path = root / {'module': 'weights.bin', 'lightning': 'last.ckpt', 'ema': 'best.pth.tar'}.get(kind, 'best.pth')
    torch.save(content, path)
    return path
