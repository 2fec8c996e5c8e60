"""Builds the model of a run from its recipe: weights, mixer, precision, memory format and averaged copy."""

from itertools import zip_longest

import timm
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType
from timm.layers import convert_sync_batchnorm, to_2tuple
from timm.utils import ModelEmaV3
from torch import nn

from vitzoo.about import is_trained_folder, read_label_names
from vitzoo.classes import are_of_head, label_names
from vitzoo.data import resolve_data_config
from vitzoo.errors import UserError
from vitzoo.load import create_model, find_model, find_num_classes, fit_data_config, load_weights, swap_in
from vitzoo.models._official import read_checkpoint, unwrap
from vitzoo.train.average import AveragedModel
from vitzoo.train.recipe import Recipe


def has_initial_weights(recipe: Recipe) -> bool:
    """Return True if training begins with the weights of the model's name or folder."""
    name = find_model(recipe.model)
    return recipe.pretrained or is_trained_folder(name) or name.startswith('local-dir:')


def image_size(recipe: Recipe) -> int | list | None:
    """The image size of a recipe, which may be among its model arguments.

    Raises:
        UserError: There are two different ones.
    """
    size = recipe.model_kwargs.get('img_size', recipe.img_size)
    if recipe.img_size is not None and to_2tuple(size) != to_2tuple(recipe.img_size):
        raise UserError(f'img_size is {recipe.img_size}, but {size} in model_kwargs; leave out one of them')
    return size


def build_model(
    recipe: Recipe, num_classes: int, class_names: list[str] | None = None, is_resumed: bool = False
) -> nn.Module:
    """The recipe's model, with its initial weights.

    Args:
        class_names: Those of the data, for a note if the model was trained on others.
        is_resumed: Leave out the initial checkpoint, which may be gone, because the run continues from another.

    Raises:
        UserError: The model, its weights, an argument or the image size does not exist.
    """
    name = find_model(recipe.model)
    is_folder = is_trained_folder(name)
    if recipe.pretrained and not is_folder and ':' not in name and not timm.is_model_pretrained(name):
        raise UserError(f'there are no published weights of {name}; leave out pretrained')
    is_pretrained, img_size = has_initial_weights(recipe), image_size(recipe)
    model = create_model(
        name,
        img_size=img_size,
        model_kwargs=recipe.model_kwargs,
        pretrained=is_pretrained,
        num_classes=num_classes,
        in_chans=recipe.in_chans,
        drop_rate=recipe.drop,
        drop_path_rate=recipe.drop_path,
    )
    found = getattr(model, 'num_classes', None)
    if found != num_classes:
        has = 'is not a classifier' if found is None else f'has {found} classes'
        raise UserError(
            f'{name} with model_kwargs {recipe.model_kwargs} {has}, but training needs {num_classes}; correct them'
        )
    if not is_pretrained or recipe.initial_checkpoint:
        # it is that of the published weights, which the model does not have
        model.pretrained_cfg.pop('license', None)
    pretrained_classes = model.pretrained_cfg.get('num_classes')
    source, known = name, []
    if is_pretrained and not recipe.initial_checkpoint:
        _note_more_channels(name, model)
    if is_pretrained and pretrained_classes != num_classes:
        _note_new_head(name, pretrained_classes, num_classes)
    elif is_pretrained:
        known = label_names(model)
    if recipe.initial_checkpoint and not is_resumed:
        _start_from(model, recipe.initial_checkpoint)
        source, known = recipe.initial_checkpoint, read_label_names(recipe.initial_checkpoint, num_classes)
    if class_names and known not in ([], class_names):
        PartialState().print(f'note   the head of {source} is kept for other classes: {_compare(known, class_names)}')
    if recipe.mixer is not None:
        # after the checkpoint, which mixers inherit as well
        swapped = swap_in(name, model, recipe.mixer, recipe.mixer_kwargs, img_size=img_size)
        PartialState().print(f'note   the attention of {name} is replaced: {swapped}')
    elif recipe.mixer_kwargs:
        raise UserError(f'mixer_kwargs {recipe.mixer_kwargs} need a mixer; add --mixer NAME, or use --model-kwargs')
    if recipe.grad_checkpointing:
        try:
            model.set_grad_checkpointing()
        except AssertionError as error:
            raise UserError(f'{name} cannot recompute activations: {error}; leave out --grad-checkpointing') from error
    # check the image size before the first step does
    fit_data_config(name, model, img_size)
    return model


def _start_from(model: nn.Module, path: str) -> None:
    """Load a checkpoint; where its head is for another number of classes, or it has none, all but the head."""
    num_classes, weights = model.num_classes, unwrap(read_checkpoint(path))
    checkpoint_classes = find_num_classes(model, weights)
    if checkpoint_classes == num_classes or (checkpoint_classes is None and not _lacks_only_the_head(model, weights)):
        load_weights(model, path)
        return
    model.reset_classifier(checkpoint_classes or 0)
    load_weights(model, path)
    model.reset_classifier(num_classes)
    _note_new_head(path, checkpoint_classes, num_classes)


def _note_new_head(source: str, old: int | None, new: int) -> None:
    has = f'a head for {old} classes' if old else 'no head'
    PartialState().print(f'note   {source} has {has}; using a new head for {new} classes')


def _note_more_channels(name: str, model: nn.Module) -> None:
    """Say so if weights for greyscale images are those of a model for RGB, which is the default of recipes."""
    pretrained = model.pretrained_cfg['input_size'][0]
    in_chans = resolve_data_config(model)['input_size'][0]
    if pretrained < in_chans:
        PartialState().print(
            f'note   {name} takes images of {pretrained} channel, and its weights are spread over {in_chans}; add'
            f' --in-chans {pretrained} to keep it'
        )


def _compare(old: list[str], new: list[str]) -> str:
    """The first rows of a head whose classes have other names, and the number of others."""
    rows = [
        f'row {row} was {before}, is now {after}'
        for row, (before, after) in enumerate(zip_longest(old, new, fillvalue='no class'))
        if before != after
    ]
    return ', '.join(rows[:3]) + (f', and {len(rows) - 3} more' if rows[3:] else '')


def _lacks_only_the_head(model: nn.Module, weights: dict[str, torch.Tensor]) -> bool:
    missing = model.state_dict().keys() - weights.keys()
    return bool(missing) and are_of_head(model, missing)


def synchronize_batch_norm(model: nn.Module, accelerator: Accelerator) -> nn.Module:
    """Convert BatchNorm so that it normalizes over the images of all processes; parameters and their names stay.

    Raises:
        UserError: PyTorch has no synchronized BatchNorm for this device.
    """
    if accelerator.num_processes == 1:
        return model
    if accelerator.device.type == 'cpu':
        raise UserError('sync_bn needs GPUs, because PyTorch has no synchronized BatchNorm on CPUs; leave it out')
    return convert_sync_batchnorm(model)


def convert_format(model: nn.Module, recipe: Recipe, accelerator: Accelerator) -> nn.Module:
    """Convert the model, and what it is called with, to the recipe's dtype and memory format; its outputs are float32.

    Raises:
        UserError: The recipe has a dtype for the model and mixed precision, or FSDP cannot shard the format.
    """
    if recipe.channels_last and accelerator.distributed_type == DistributedType.FSDP:
        raise UserError('channels_last does not work with FSDP, which shards contiguous weights only; leave it out')
    if recipe.model_dtype != 'float32':
        if accelerator.mixed_precision != 'no':
            raise UserError(f'model_dtype {recipe.model_dtype} leaves nothing to amp; leave out one of them')
        model = model.to(getattr(torch, recipe.model_dtype))
        model.register_forward_pre_hook(_cast_input)
        model.register_forward_hook(_cast_output)
    if recipe.channels_last:
        model = model.to(memory_format=torch.channels_last)
        model.register_forward_pre_hook(_to_channels_last)
    return model


def _cast_input(model: nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
    # the averaged weights stay in float32
    return inputs[0].to(next(model.parameters()).dtype)


def _cast_output(
    model: nn.Module, inputs: tuple, logits: torch.Tensor | tuple[torch.Tensor, ...]
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    # distilled models return the logits of both heads in training
    return tuple(part.float() for part in logits) if isinstance(logits, tuple) else logits.float()


def _to_channels_last(model: nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
    return inputs[0].contiguous(memory_format=torch.channels_last)


def compile_model(model: nn.Module, backend: str | None, mode: str | None = None) -> None:
    """Compile the model's forward pass in place, which keeps its parameter names.

    Raises:
        UserError: torch.compile has no such backend, or the backend has no modes.
    """
    if mode is not None and backend != 'inductor':
        raise UserError(f'torchcompile_mode {mode} needs --torchcompile inductor')
    if backend is None:
        return
    backends = torch.compiler.list_backends(exclude_tags=())
    if backend not in backends:
        raise UserError(f"torch.compile has no backend '{backend}', only {', '.join(backends)}")
    model.compile(backend=backend, mode=mode)


def check_cuda_graphs(recipe: Recipe, device: torch.device) -> None:
    """Refuse to accumulate gradients in CUDA graphs, which some modes of the compiler use.

    The gradients of a micro-batch are memory of the graph, and its next run overwrites them: some versions of torch
    raise an error, others train with wrong gradients. https://github.com/pytorch/pytorch/issues/169545

    Raises:
        UserError: The recipe has such a mode and several micro-batches per step, and the device is a GPU.
    """
    if recipe.torchcompile_mode is None or recipe.grad_accum_steps == 1 or device.type != 'cuda':
        return
    # loads Triton
    from torch._inductor import list_mode_options

    if list_mode_options(recipe.torchcompile_mode).get('triton.cudagraphs'):
        raise UserError(
            f'torchcompile_mode {recipe.torchcompile_mode} uses CUDA graphs, which cannot accumulate gradients over'
            f' {recipe.grad_accum_steps} grad_accum_steps; use max-autotune-no-cudagraphs'
        )


def build_ema(recipe: Recipe, model: nn.Module) -> ModelEmaV3 | None:
    """An exponential moving average of the model's weights, if the recipe has one."""
    if not recipe.model_ema:
        return None
    return AveragedModel(
        model,
        recipe.model_ema_decay,
        use_warmup=recipe.model_ema_warmup,
        # small updates would be rounded to nothing in bfloat16
        dtype=torch.float32,
        exclude_buffers=True,
    )
