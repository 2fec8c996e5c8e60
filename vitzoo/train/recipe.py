"""Recipes: all settings of a training run in one flat dataclass, with the argument names of timm's train.py.

A value is taken from the command line, else from the recipe file, else from the default below; null in a file inherits
the default. `batch_size` is global: the number of images per optimizer step over all processes.
"""

import math
import re
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_type_hints

import yaml

from vitzoo._files import replace_file
from vitzoo.errors import UserError, did_you_mean
from vitzoo.options import DEFAULT_WORKERS, parse_yaml, read_yaml, size


def option(
    default: Any,
    help: str,
    *,
    group: str,
    choices: tuple = (),
    low: float = -math.inf,
    high: float = math.inf,
    lengths: tuple[int, ...] = (),
    on_resume: str,
) -> Any:
    """A recipe key: its default, help text, group in `--help`, and allowed values.

    Args:
        low: Smallest number, also of a list.
        high: Largest number, also of a list.
        lengths: Allowed lengths of a list.
        on_resume: FIXED for what the weights, the optimizer state, the order of the images or the scores of earlier
            epochs depend on; CHANGES for a key whose new value takes effect from the next step; NEUTRAL for one that
            does not influence the weights.
    """
    metadata = dict(help=help, group=group, choices=choices, low=low, high=high, lengths=lengths, on_resume=on_resume)
    if isinstance(default, dict | list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


FIXED, CHANGES, NEUTRAL = 'fixed', 'changes', 'neutral'

# each group with what most of its keys do on resume
_model = partial(option, group='model', on_resume=FIXED)
_data = partial(option, group='data', on_resume=FIXED)
_augmentation = partial(option, group='augmentation', on_resume=CHANGES)
_loss = partial(option, group='loss', on_resume=CHANGES)
_distillation = partial(option, group='distillation', on_resume=CHANGES)
_optimizer = partial(option, group='optimizer', on_resume=CHANGES)
_schedule = partial(option, group='schedule, by optimizer step', on_resume=CHANGES)
_precision = partial(option, group='precision and averaging', on_resume=CHANGES)
_run = partial(option, group='run', on_resume=NEUTRAL)


@dataclass
class Recipe:
    """All keys of a recipe."""

    model: str = _model('cvt_ls_13', 'timm or vitzoo model name, or the folder of a training run')
    pretrained: bool = _model(False, 'start from the published weights of the model')
    initial_checkpoint: str | None = _model(None, 'start from the weights in this file (.safetensors, .pth)')
    num_classes: int | None = _model(None, 'number of classes; by default that of the dataset', low=2)
    in_chans: int = _model(3, 'image channels: 3 for RGB, 1 for greyscale', choices=(1, 3))
    img_size: int | list | None = _model(
        None, "image size, or height and width; by default the model's", lengths=(2,), low=1
    )
    drop: float | None = _model(
        None, "dropout rate of the classifier; by default the model's", low=0, high=1, on_resume=CHANGES
    )
    drop_path: float | None = _model(
        None, "stochastic depth rate; by default the model's", low=0, high=1, on_resume=CHANGES
    )
    model_kwargs: dict = _model({}, 'further model arguments, as YAML or name=value …')
    mixer: str | None = _model(
        None, "replace the attention of a timm model, in all blocks (ls) or in some ('ls:0-9,softmax:10,11')"
    )
    mixer_kwargs: dict = _model({}, 'arguments of the mixer, as YAML or name=value …')
    grad_checkpointing: bool = _model(
        False, 'recompute activations in the backward pass to save memory', on_resume=NEUTRAL
    )
    freeze: str | None = _model(
        None, "modules to freeze, such as patch_embed,blocks.0, or 'backbone' for all but the classifier"
    )
    sync_bn: bool = _model(
        False, 'BatchNorm normalizes over the images of all processes (GPUs only)', on_resume=CHANGES
    )
    dist_bn: str = _model(
        'reduce',
        "BatchNorm's running statistics after an epoch: averaged over the processes, or those of the first",
        choices=('none', 'reduce', 'broadcast'),
        on_resume=CHANGES,
    )
    torchcompile: str | None = _model(
        None, 'compile the model with this torch.compile backend, such as inductor', on_resume=NEUTRAL
    )
    torchcompile_mode: str | None = _model(
        None,
        'mode of torchcompile inductor',
        choices=('default', 'reduce-overhead', 'max-autotune', 'max-autotune-no-cudagraphs'),
        on_resume=NEUTRAL,
    )
    channels_last: bool = _model(False, 'channels-last memory format', on_resume=NEUTRAL)

    data_dir: str = _data(
        'sample',
        "folder, .tar or .zip of class folders, or of train/ and val/; 'sample', wds/…, torch/… or hfds/…",
        on_resume=NEUTRAL,
    )
    val_fraction: float = _data(
        0.2, 'fraction of each class held out for validation if data_dir has no validation split', low=0, high=0.9
    )
    train_split: str | None = _data(None, "name of the training split; '.' if data_dir is not divided into splits")
    val_split: str | None = _data(None, 'name of the validation split')
    input_key: str | None = _data(None, 'column of the images in hfds/…, or their suffix in wds/…')
    target_key: str | None = _data(None, 'column of the labels in hfds/…; suffix of their file, or .json key, in wds/…')
    data_subset: str | None = _data(None, 'subset (configuration) of hfds/…')
    class_map: str | None = _data(
        None, 'classes in label order (.txt), or name to label (.json, .pkl); others are left out'
    )
    multi_label: bool = _data(False, 'multi-label classification, with labels.csv (columns file, labels)')
    workers: int = _data(DEFAULT_WORKERS, 'data loader workers per process', low=0, on_resume=NEUTRAL)
    validation_batch_size: int | None = _data(
        None, 'validation batch size per process; by default batch_size, at most 256', low=1, on_resume=NEUTRAL
    )
    crop_pct: float | None = _data(
        None, "center-crop fraction for evaluation; by default the model's", low=0.01, high=1
    )

    aug: str = _augmentation('timm', 'library for augmentation after crop and flip', choices=('timm', 'albumentations'))
    albumentations: str | list = _augmentation(
        'medium', 'albumentations pipeline: light, medium, strong, or a list of {Name: {argument: value}}'
    )
    no_aug: bool = _augmentation(False, 'only resize the training images, without random crops and augmentation')
    train_crop_mode: str = _augmentation(
        'rrc',
        'random resized crop (rrc), or resize and a central (rkrc) or random (rkrr) crop, with half of the images'
        ' stretched by ratio and half zoomed by scale',
        choices=('rrc', 'rkrc', 'rkrr'),
    )
    scale: list = _augmentation([0.08, 1.0], 'area range of random resized crops', low=0, lengths=(2,))
    ratio: list = _augmentation([3 / 4, 4 / 3], 'aspect ratio range of random resized crops', low=0, lengths=(2,))
    hflip: float = _augmentation(0.5, 'horizontal flip probability', low=0, high=1)
    vflip: float = _augmentation(0.0, 'vertical flip probability', low=0, high=1)
    train_interpolation: str = _augmentation(
        'random', 'interpolation of random resized crops', choices=('random', 'bilinear', 'bicubic')
    )
    color_jitter: float | list = _augmentation(
        0.4, 'color jitter factor (timm; ignored with aa)', low=0, lengths=(3, 4)
    )
    color_jitter_prob: float | None = _augmentation(
        None, 'probability of color_jitter; by default it is always applied', low=0, high=1
    )
    grayscale_prob: float = _augmentation(0.0, 'probability of conversion to greyscale (timm)', low=0, high=1)
    gaussian_blur_prob: float = _augmentation(0.0, 'probability of Gaussian blur (timm)', low=0, high=1)
    aa: str | None = _augmentation(None, 'AutoAugment policy, such as rand-m9-mstd0.5-inc1 or 3a (timm)')
    reprob: float = _augmentation(0.0, 'random erasing probability', low=0, high=1)
    remode: str = _augmentation('pixel', 'fill of erased regions', choices=('const', 'rand', 'pixel'))
    recount: int = _augmentation(1, 'maximum number of erased regions per image', low=1)
    aug_repeats: int = _augmentation(
        1,
        'repeated augmentation: copies of an image in an epoch, which then has fewer distinct images',
        low=1,
        on_resume=FIXED,
    )
    mixup: float = _augmentation(0.0, 'mixup alpha (0 disables mixup)', low=0)
    cutmix: float = _augmentation(0.0, 'cutmix alpha (0 disables cutmix)', low=0)
    cutmix_minmax: list | None = _augmentation(
        None, 'range of the side of the cutmix box relative to the image; enables cutmix', low=0, high=1, lengths=(2,)
    )
    mixup_prob: float = _augmentation(1.0, 'probability of applying mixup or cutmix', low=0, high=1)
    mixup_switch_prob: float = _augmentation(
        0.5, 'probability of cutmix rather than mixup if both are enabled', low=0, high=1
    )
    mixup_mode: str = _augmentation(
        'batch', 'how mixing weights are drawn: per batch, pair or element', choices=('batch', 'pair', 'elem')
    )
    mixup_off_epoch: int = _augmentation(0, 'disable mixup and cutmix after this many epochs (0: never)', low=0)

    smoothing: float = _loss(0.1, 'label smoothing', low=0, high=0.99)
    bce_loss: bool = _loss(False, 'use binary cross-entropy instead of softmax cross-entropy')
    bce_target_thresh: float | None = _loss(
        None, 'threshold for binarizing mixed targets (with bce_loss)', low=0, high=1
    )
    balance: str = _loss(
        'none',
        'compensate for class imbalance by weights in the loss, or by sampling all classes equally often',
        choices=('none', 'loss', 'sampler'),
        on_resume=FIXED,
    )

    kd_model_name: str | None = _distillation(None, 'teacher: a pretrained timm model, or the folder of a training run')
    kd_distill_type: str = _distillation(
        'logit',
        "distillation target: the teacher's soft labels, its predicted class, either with a distillation token, or for"
        ' a student with other mixers its final tokens, attention outputs and soft labels',
        choices=('logit', 'hard', 'token', 'transfer'),
    )
    kd_token_distill_type: str = _distillation(
        'soft', 'distillation target of the distillation token', choices=('soft', 'hard')
    )
    kd_temperature: float = _distillation(4.0, 'distillation temperature', low=0.01)
    kd_block_weight: float = _distillation(0.1, 'weight of the attention outputs (with transfer)', low=0)
    distill_loss_weight: float | None = _distillation(
        None, 'weight of the distillation loss; by default 1, without transfer 1 - task_loss_weight if given', low=0
    )
    task_loss_weight: float | None = _distillation(
        None, 'weight of the classification loss; by default 1, with transfer 0', low=0
    )

    epochs: int = _optimizer(100, 'number of epochs', low=1)
    batch_size: int = _optimizer(128, 'images per optimizer step, over all processes', low=1, on_resume=FIXED)
    grad_accum_steps: int = _optimizer(1, 'gradient accumulation steps', low=1, on_resume=NEUTRAL)
    opt: str = _optimizer('adamw', 'optimizer, any of timm', on_resume=FIXED)
    opt_eps: float | None = _optimizer(None, "optimizer epsilon; by default the optimizer's", low=0)
    opt_betas: list | None = _optimizer(
        None, "optimizer betas; by default the optimizer's", low=0, high=1, lengths=(2, 3)
    )
    momentum: float = _optimizer(0.9, 'momentum, of optimizers that have one', low=0, high=1)
    weight_decay: float = _optimizer(0.05, 'weight decay, not applied to biases and norms', low=0)
    layer_decay: float | None = _optimizer(None, 'layer-wise learning-rate decay', low=0, high=1, on_resume=FIXED)
    lr: float | None = _optimizer(None, 'learning rate; by default scaled from lr_base', low=0)
    lr_base: float = _optimizer(5e-4, 'learning rate at a batch size of lr_base_size', low=0)
    lr_base_size: int = _optimizer(512, 'batch size that lr_base refers to', low=1)
    lr_base_scale: str = _optimizer('linear', 'scaling of lr_base with the batch size', choices=('linear', 'sqrt'))
    clip_grad: float | None = _optimizer(None, 'gradient clipping threshold (0 disables clipping)', low=0)
    clip_mode: str = _optimizer(
        'norm', 'gradient clipping by norm, by value, or adaptive', choices=('norm', 'value', 'agc')
    )

    sched: str = _schedule(
        'cosine',
        'learning-rate schedule',
        choices=('cosine', 'tanh', 'step', 'multistep', 'poly', 'wsd', 'rsqrt', 'constant'),
    )
    warmup_epochs: float = _schedule(5.0, 'linear warm-up epochs, included in epochs', low=0)
    warmup_lr: float = _schedule(1e-6, 'learning rate at the start of the warm-up', low=0)
    min_lr: float = _schedule(1e-6, 'minimum learning rate', low=0)
    cooldown_epochs: int = _schedule(0, 'further epochs at min_lr; step, multistep and constant go on', low=0)
    decay_epochs: float | None = _schedule(
        None, 'decay interval of step, length of the decay phase of wsd and rsqrt, in epochs', low=0
    )
    decay_milestones: list = _schedule([90, 180, 270], 'epochs at which multistep decays the learning rate', low=0)
    decay_rate: float = _schedule(0.1, 'decay factor of step and multistep; power of poly', low=0)

    amp: bool | None = _precision(None, 'mixed precision; by default as configured in accelerate launch, else float32')
    amp_dtype: str = _precision(
        'bfloat16', 'dtype for mixed precision; float16 needs a GPU', choices=('bfloat16', 'float16')
    )
    model_dtype: str = _precision(
        'float32',
        'dtype of the weights and of all computations; bfloat16 needs half the memory of amp but rounds small updates',
        choices=('float32', 'bfloat16'),
        on_resume=FIXED,
    )
    model_ema: bool = _precision(
        False, 'exponential moving average (EMA) of the weights, evaluated too', on_resume=FIXED
    )
    model_ema_decay: float = _precision(0.9998, 'EMA decay', low=0, high=1)
    model_ema_warmup: bool = _precision(False, 'increase the EMA decay from 0, for short runs')

    seed: int = _run(42, 'random seed of initial weights, data order and augmentation', low=0, on_resume=FIXED)
    output: str | None = _run(None, 'run folder; by default runs/<model>, or runs/<model>_<mixer>')
    overwrite: bool = _run(False, 'replace the run in the output folder')
    resume: str | None = _run(None, "'auto' (newest checkpoint in the output folder), or a run or checkpoint folder")
    eval_metric: str | None = _run(
        None,
        'metric that selects the best epoch; by default top1, or map with multi_label',
        choices=('top1', 'top5', 'loss', 'map'),
        on_resume=FIXED,
    )
    val_interval: int = _run(1, 'epochs between validations; the last epoch is always validated', low=1)
    log_interval: int = _run(20, 'steps between updates of the progress bar', low=1)
    log_with: str | None = _run(None, 'Accelerate trackers, such as tensorboard,wandb,mlflow,trackio')
    checkpoint_every: int = _run(0, 'steps between checkpoints (0: only one after every epoch)', low=0)
    checkpoint_minutes: float = _run(0.0, 'minutes between checkpoints (0: only one after every epoch)', low=0)
    checkpoint_hist: int = _run(2, 'number of checkpoints to keep', low=1)


FIELDS = {f.name: f for f in fields(Recipe)}
FIXED_KEYS = tuple(name for name, spec in FIELDS.items() if spec.metadata['on_resume'] == FIXED)
_HINTS = get_type_hints(Recipe)
# settings of one launch; a replayed recipe must not write to the folder of the first run
NOT_SAVED = ('output', 'overwrite', 'resume')
_TYPE_NAMES = {
    bool: 'yes or no',
    int: 'a whole number',
    float: 'a number',
    str: 'a string',
    list: 'a list',
    dict: 'a mapping',
}


def make_recipe(values: dict[str, Any]) -> Recipe:
    """A recipe of these values, converted to the types of their keys; None inherits the default.

    Raises:
        UserError: A key does not exist, or a value has the wrong type or is out of range.
    """
    for name in values:
        if name not in FIELDS:
            raise UserError(f"unknown recipe key '{name}'{did_you_mean(str(name), FIELDS)}")
    return Recipe(**{name: _convert(name, value) for name, value in values.items() if value is not None})


def read_recipe_file(path: str | Path) -> dict[str, Any]:
    """The keys and values of a recipe file, not yet converted.

    Raises:
        UserError: The file cannot be read, is not a YAML mapping, or has an unknown key.
    """
    values = read_yaml(path, 'the recipe ', 'train')
    if not isinstance(values, dict | None):
        raise UserError(f"the recipe '{path}' must consist of keys and values, such as 'epochs: 10'")
    unknown = [name for name in values or {} if name not in FIELDS]
    if unknown:
        raise UserError(f"unknown key '{unknown[0]}' in the recipe '{path}'{did_you_mean(str(unknown[0]), FIELDS)}")
    return values or {}


def save_recipe(recipe: Recipe, path: Path, header: list[str]) -> None:
    """Write all keys, so that `--config` replays the run even if a default changes later."""
    values = {name: value for name, value in asdict(recipe).items() if name not in NOT_SAVED}
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, default_flow_style=None, width=120)
    with replace_file(path) as partial:
        partial.write_text(''.join(f'# {_one_line(line)}\n' for line in header) + text, encoding='utf-8')


def _one_line(text: str) -> str:
    """A comment, whose names of folders and classes may have line breaks and other characters that YAML refuses."""
    return ''.join(letter if letter.isprintable() else ' ' for letter in text)


def option_types(name: str) -> tuple[type, ...]:
    """The types that the value of a key may have, without None."""
    hint = _HINTS[name]
    types = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    return tuple(kind for kind in types if kind is not type(None))


def _convert(name: str, value: Any) -> Any:
    """Convert a value to the type of its key, and check its range."""
    types, limits = option_types(name), FIELDS[name].metadata
    if name == 'img_size' and isinstance(value, str) and re.fullmatch(r'[1-9]\d*x[1-9]\d*', value, re.IGNORECASE):
        # the form of the other commands
        value = list(size(value))
    try:
        converted = _to_type(value, types)
    except (ValueError, TypeError, OverflowError, yaml.YAMLError):
        raise UserError(f"{name} must be {' or '.join(_TYPE_NAMES[kind] for kind in types)}, not '{value}'") from None
    choices, lengths, low, high = (limits[key] for key in ('choices', 'lengths', 'low', 'high'))
    if choices and converted not in choices:
        raise UserError(f"{name} must be one of {', '.join(map(str, choices))}, not '{value}'")
    items = converted if isinstance(converted, list) else [converted]
    if isinstance(converted, list) and lengths and len(items) not in lengths:
        raise UserError(f'{name} must have {" or ".join(map(str, lengths))} items, not {len(items)}')
    if not all(low <= item <= high for item in items if isinstance(item, int | float)):
        bounds = f'from {low} to {high}' if high < math.inf else f'at least {low}'
        raise UserError(f'{name} must be {bounds}, not {value}')
    return converted


def _to_type(value: Any, types: tuple[type, ...]) -> Any:
    """Convert to the first type that fits."""
    value = _parse(value, types)
    if isinstance(value, bool) and bool in types:
        return value
    if isinstance(value, list | tuple) and list in types:
        # a key that is a whole number may be a list of them
        of_items = (int,) if int in types else (int, float)
        return [item if isinstance(item, dict) and str in types else _to_type(item, of_items) for item in value]
    if isinstance(value, dict) and dict in types:
        return value
    if isinstance(value, str) and str in types:
        return value
    if not isinstance(value, bool) and int in types and float(value).is_integer():
        return int(value)
    if not isinstance(value, bool) and float in types and math.isfinite(float(value)):
        return float(value)
    raise ValueError(value)


def _parse(value: Any, types: tuple[type, ...]) -> Any:
    """Parse what YAML and the shell leave as strings, some numbers ('1e-3') and lists; a number is a list of one."""
    if isinstance(value, str):
        parsed = parse_yaml(value) if types != (str,) else value
        value = parsed if str not in types or isinstance(parsed, list | dict) else value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return [value] if types == (list,) and is_number else value
