"""What a training run depends on: a flat recipe whose keys are the argument names of timm's train.py.

A value comes from the command line, else from the recipe file, else from the default here; a value that is null, or not
given, is inherited. `batch_size` is global: the images of one optimizer step over all processes.
"""

import argparse
import math
import sys
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_type_hints

import yaml

from vitzoo.errors import UserError, did_you_mean


def key(default: Any, meaning: str, *, choices: tuple = (), low: float = -math.inf, high: float = math.inf, items=()):
    """One key of the recipe: its default, one line for --help, and what it may be (`items`: how many of a list)."""
    metadata = dict(meaning=meaning, choices=choices, low=low, high=high, items=items)
    if isinstance(default, dict | list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class Recipe:
    """Every key of a recipe."""

    # model
    model: str = key('cvt_ls_13', 'timm or vitzoo model name, or a folder that training wrote')
    pretrained: bool = key(False, 'start from the published weights of the model')
    initial_checkpoint: str | None = key(None, 'start from the weights in this file (.safetensors, .pth)')
    num_classes: int | None = key(None, 'outputs of the head; by default the classes in the data', low=2)
    in_chans: int = key(3, 'channels of the images, 3 for colour or 1 for grey', choices=(1, 3))
    img_size: int | list | None = key(
        None, "side of the images, or height and width; by default the model's", items=(2,)
    )
    drop: float | None = key(None, "dropout of the head; by default the model's", low=0, high=1)
    drop_path: float | None = key(None, "stochastic depth rate; by default the model's", low=0, high=1)
    model_kwargs: dict = key({}, 'further arguments of the model, as YAML or name=value …')
    grad_checkpointing: bool = key(False, 'trade time for memory by computing activations twice')

    freeze: str | None = key(
        None, "what is not trained: 'backbone' for all but the head, or modules such as patch_embed,blocks.0"
    )
    torchcompile: str | None = key(None, 'compile the model with this backend of torch.compile, such as inductor')

    # data
    data_dir: str = key(
        'sample', "folder, .tar or .zip of class folders, in train/ and val/ or not; 'sample', wds/…, torch/… or hfds/…"
    )
    val_fraction: float = key(
        0.2, 'share of each class that is held out where data_dir has no validation part', low=0, high=0.9
    )
    multi_label: bool = key(False, 'images have any number of labels, from labels.csv (columns file, labels)')
    workers: int = key(4, 'loader processes of each training process', low=0)
    validation_batch_size: int | None = key(
        None, 'images per evaluation batch; by default batch_size, at most 256', low=1
    )
    crop_pct: float | None = key(
        None, "share of the centre kept in evaluation; by default the model's", low=0.01, high=1
    )

    # augmentation
    aug: str = key('timm', 'library that changes the look of images after the crop', choices=('timm', 'albumentations'))
    albumentations: str | list = key('medium', 'light, medium, strong, or a list of {Name: {argument: value}}')
    scale: list = key([0.08, 1.0], 'smallest and largest share of the image area that is cropped', low=0, items=(2,))
    ratio: list = key([3 / 4, 4 / 3], 'narrowest and widest aspect ratio of the crop', low=0, items=(2,))
    hflip: float = key(0.5, 'probability of a left-right flip', low=0, high=1)
    vflip: float = key(0.0, 'probability of an up-down flip', low=0, high=1)
    train_interpolation: str = key('random', 'how crops are resized', choices=('random', 'bilinear', 'bicubic'))
    color_jitter: float | list = key(
        0.4, 'strength of colour jitter (timm, without effect beside aa)', low=0, items=(3, 4)
    )
    aa: str | None = key(None, 'AutoAugment policy such as rand-m9-mstd0.5-inc1 or 3a (timm)')
    reprob: float = key(0.0, 'probability of random erasing', low=0, high=1)
    remode: str = key('pixel', 'what erased parts are filled with', choices=('const', 'rand', 'pixel'))
    recount: int = key(1, 'most erased parts per image', low=1)
    aug_repeats: int = key(1, 'augmented copies of an image in an epoch (which then has fewer images)', low=1)
    mixup: float = key(0.0, 'alpha of mixup; 0 is off', low=0)
    cutmix: float = key(0.0, 'alpha of cutmix; 0 is off', low=0)
    mixup_prob: float = key(1.0, 'share of batches that are mixed', low=0, high=1)
    mixup_switch_prob: float = key(0.5, 'share of cutmix where both are on', low=0, high=1)
    mixup_mode: str = key('batch', 'what shares one mixing weight', choices=('batch', 'pair', 'elem'))

    # loss
    smoothing: float = key(0.1, 'label smoothing', low=0, high=0.99)
    bce_loss: bool = key(False, 'binary cross-entropy for each class')
    bce_target_thresh: float | None = key(
        None, 'make mixed targets 0 or 1 at this value (with bce_loss)', low=0, high=1
    )

    balance: str = key(
        'none',
        'what makes up for classes of unequal size: weights in the loss, or drawing each class equally often',
        choices=('none', 'loss', 'sampler'),
    )

    # distillation
    kd_model_name: str | None = key(None, 'teacher: a timm model with weights, or a folder that training wrote')
    kd_distill_type: str = key(
        'logit',
        "what is learnt from the teacher: its probabilities, its choice, or either by the student's own token",
        choices=('logit', 'hard', 'token'),
    )
    kd_token_distill_type: str = key('soft', 'what the token learns', choices=('soft', 'hard'))
    kd_temperature: float = key(4.0, 'how much the probabilities are softened', low=0.01)
    distill_loss_weight: float | None = key(None, "weight of the teacher's loss; by default 1, or 1 - task's", low=0)
    task_loss_weight: float | None = key(None, "weight of the labels' loss; by default 1", low=0)

    # optimisation
    epochs: int = key(100, 'passes over the training images', low=1)
    batch_size: int = key(128, 'images per optimizer step, over all processes', low=1)
    grad_accum_steps: int = key(1, 'parts in which a process computes its share of a batch', low=1)
    opt: str = key('adamw', 'any optimizer of timm')
    opt_eps: float | None = key(None, "epsilon of the optimizer; by default the optimizer's", low=0)
    opt_betas: list | None = key(None, "betas of the optimizer; by default the optimizer's", low=0, high=1)
    momentum: float = key(0.9, 'momentum of the optimizer, where it has one', low=0, high=1)
    weight_decay: float = key(0.05, 'weight decay, not applied to biases and norms', low=0)
    layer_decay: float | None = key(
        None, 'factor of the learning rate from each layer to the one before it', low=0, high=1
    )
    lr: float | None = key(None, 'learning rate; by default from lr_base', low=0)
    lr_base: float = key(5e-4, 'learning rate at a batch of lr_base_size', low=0)
    lr_base_size: int = key(512, 'batch that lr_base is meant for', low=1)
    lr_base_scale: str = key('linear', 'how lr_base grows with the batch', choices=('linear', 'sqrt'))
    clip_grad: float | None = key(None, 'limit of the gradient; 0 is off', low=0)
    clip_mode: str = key('norm', 'what clip_grad limits', choices=('norm', 'value', 'agc'))

    # schedule, by optimizer step
    sched: str = key(
        'cosine',
        'course of the learning rate',
        choices=('cosine', 'tanh', 'step', 'multistep', 'poly', 'wsd', 'rsqrt', 'constant'),
    )
    warmup_epochs: float = key(5.0, 'epochs of linear warm-up, part of epochs', low=0)
    warmup_lr: float = key(1e-6, 'learning rate at the start of the warm-up', low=0)
    min_lr: float = key(1e-6, 'learning rate at the end', low=0)
    cooldown_epochs: int = key(0, 'epochs at min_lr after the others', low=0)
    decay_epochs: float | None = key(None, 'period of step, length of the decay of wsd and rsqrt', low=0)
    decay_milestones: list = key([90, 180, 270], 'epochs at which multistep decays', low=0)
    decay_rate: float = key(0.1, 'factor of step and multistep, power of poly', low=0)

    # precision and averaging
    amp: bool | None = key(None, 'mixed precision; by default what accelerate launch says, else float32')
    amp_dtype: str = key('bfloat16', 'number format of mixed precision', choices=('bfloat16', 'float16'))
    model_ema: bool = key(False, 'keep a moving average of the weights and evaluate both')
    model_ema_decay: float = key(0.9998, 'decay of the moving average', low=0, high=1)
    model_ema_warmup: bool = key(False, 'let the decay grow from 0, for short runs')

    # run
    seed: int = key(42, 'decides the initial weights, the order of the images and their augmentation', low=0)
    output: str | None = key(None, 'folder of the run; by default runs/<model>')
    overwrite: bool = key(False, 'replace the run that is in the output folder')
    resume: str | None = key(None, "'auto' (newest checkpoint of the output folder), or a run or checkpoint folder")
    log_interval: int = key(20, 'steps between updates of the progress bar', low=1)
    log_with: str | None = key(None, 'trackers of Accelerate, such as tensorboard,wandb,mlflow,trackio')
    checkpoint_every: int = key(0, 'steps between checkpoints; 0 for one after each epoch only', low=0)
    checkpoint_minutes: float = key(0.0, 'minutes between checkpoints; 0 for one after each epoch only', low=0)
    checkpoint_hist: int = key(2, 'newest checkpoints that are kept', low=1)


FIELDS = {f.name: f for f in fields(Recipe)}
HINTS = get_type_hints(Recipe)
DEFAULTS = asdict(Recipe())
# the sections of --help, by their first key
SECTIONS = dict(
    model='model',
    data_dir='data',
    aug='augmentation',
    smoothing='loss',
    kd_model_name='distillation',
    epochs='optimisation',
    sched='schedule, by optimizer step',
    amp='precision and averaging',
    seed='run',
)
# about one launch rather than about what is trained; a replayed recipe must not write over the first run
NOT_SAVED = ('output', 'overwrite', 'resume')


def load_recipe(argv: list[str] | None = None) -> Recipe:
    """The recipe of a command line: command line > --config file > default.

    With `--resume` and no `--config`, the file is the recipe.yaml of the run that is resumed.

    Raises:
        UserError: A key does not exist, or a value has the wrong type or is out of range.
    """
    given = _parse_command_line(argv)
    file = given.pop('config', None) or _resumed_recipe(given)
    return make_recipe({**(read_recipe_file(file) if file else {}), **given})


def make_recipe(values: dict[str, Any]) -> Recipe:
    """A recipe with these values, converted to the types of their keys and checked; None inherits the default."""
    for name in values:
        if name not in FIELDS:
            raise UserError(f"unknown recipe key '{name}'{did_you_mean(str(name), FIELDS)}")
    return Recipe(**{name: _convert(name, value) for name, value in values.items() if value is not None})


def read_recipe_file(path: str | Path) -> dict[str, Any]:
    """The keys of a recipe file and their values, as YAML has them."""
    try:
        values = yaml.safe_load(Path(path).read_text(encoding='utf-8'))
    except OSError as error:
        raise UserError(f"cannot read the recipe '{path}': {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"the recipe '{path}' is not YAML: {error}") from error
    if not isinstance(values, dict | None):
        raise UserError(f"the recipe '{path}' has no keys with values, such as 'epochs: 10'")
    unknown = [name for name in values or {} if name not in FIELDS]
    if unknown:
        raise UserError(f"unknown key '{unknown[0]}' in the recipe '{path}'{did_you_mean(str(unknown[0]), FIELDS)}")
    return values or {}


def save_recipe(recipe: Recipe, path: Path, header: list[str]) -> None:
    """Write every key, so that `--config` replays the run even where a default has changed since."""
    values = {name: value for name, value in asdict(recipe).items() if name not in NOT_SAVED}
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, default_flow_style=None, width=120)
    path.write_text(''.join(f'# {line}\n' for line in header) + text, encoding='utf-8')


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise UserError(message)


class _HelpFormatter(argparse.HelpFormatter):
    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        # argparse shows every option that may take several words as '[VALUE ...]'
        return action.metavar or ''


def _parse_command_line(argv: list[str] | None) -> dict[str, Any]:
    parser = _Parser(
        prog='vitzoo train',
        usage='vitzoo train [--config FILE] [--<key> VALUE …]',
        description='Train an image classifier. Every key of a recipe file is an option here, and wins over the file.',
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: _HelpFormatter(prog, max_help_position=32, width=120),
    )
    parser.add_argument('--config', metavar='FILE', help='recipe file (YAML)')
    for name, spec in FIELDS.items():
        if name in SECTIONS:
            group = parser.add_argument_group(SECTIONS[name])
        default = '' if DEFAULTS[name] in (None, {}) else f' [{_show(DEFAULTS[name])}]'
        meaning = (spec.metadata['meaning'] + default).replace('%', '%%')
        group.add_argument(_flag(name), dest=name, nargs='*', metavar=_describe_kind(name), help=meaning)
    given, unknown = parser.parse_known_args([_with_hyphens(word) for word in (sys.argv[1:] if argv is None else argv)])
    if unknown:
        flag = unknown[0].partition('=')[0]
        raise UserError(f"unknown option '{flag}'{did_you_mean(flag, map(_flag, FIELDS))}")
    return {name: _join_words(name, words) for name, words in vars(given).items()}


def _flag(name: str) -> str:
    return f'--{name.replace("_", "-")}'


def _with_hyphens(word: str) -> str:
    """--batch_size is --batch-size."""
    flag, equals, value = word.partition('=')
    return flag.replace('_', '-') + equals + value if word.startswith('--') else word


def _show(value: Any) -> str:
    return ' '.join(f'{item:.4g}' for item in value) if isinstance(value, list) else str(value)


def _describe_kind(name: str) -> str:
    words = {bool: 'yes|no', int: 'N', float: 'X', str: 'NAME', list: 'LIST', dict: 'YAML'}
    choices = FIELDS[name].metadata['choices']
    return '|'.join(map(str, choices)) or '|'.join(words[kind] for kind in _kinds(name))


def _join_words(name: str, words: list[str] | str) -> Any:
    """The value that the words after an option stand for: `--scale 0.5 1`, `--pretrained`, `--model-kwargs depth=2`."""
    if isinstance(words, str):
        return words
    kinds = _kinds(name)
    if not words and bool in kinds:
        return True
    if not words:
        raise UserError(f'{_flag(name)} needs a value')
    if dict in kinds and all('=' in word and word[0] not in '{[' for word in words):
        return {left: yaml.safe_load(right) for left, _, right in (word.partition('=') for word in words)}
    if len(words) == 1:
        return words[0]
    if list not in kinds:
        raise UserError(f'{_flag(name)} takes one value, not {len(words)}: {" ".join(words)}')
    return words


def _resumed_recipe(given: dict[str, Any]) -> Path | None:
    """The recipe.yaml of the run that `--resume` continues, if there is one."""
    source = given.get('output') if given.get('resume') == 'auto' else given.get('resume')
    if source is None:
        return None
    folder = Path(source).resolve()
    # a checkpoint is two levels below its run
    candidates = [folder / 'recipe.yaml', folder.parent.parent / 'recipe.yaml']
    return next((path for path in candidates if path.is_file()), None)


def _kinds(name: str) -> tuple[type, ...]:
    hint = HINTS[name]
    kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    return tuple(kind for kind in kinds if kind is not type(None))


def _convert(name: str, value: Any) -> Any:
    """A value in the type of its key, or a UserError."""
    kinds, limits = _kinds(name), FIELDS[name].metadata
    try:
        converted = _to_kind(value, kinds)
    except (ValueError, TypeError, yaml.YAMLError):
        words = {
            bool: 'yes or no',
            int: 'a whole number',
            float: 'a number',
            str: 'text',
            list: 'a list',
            dict: 'a mapping',
        }
        raise UserError(f"{name} must be {' or '.join(words[kind] for kind in kinds)}, not '{value}'") from None
    if limits['choices'] and converted not in limits['choices']:
        raise UserError(f"{name} must be one of {', '.join(map(str, limits['choices']))}, not '{value}'")
    if isinstance(converted, list) and limits['items'] and len(converted) not in limits['items']:
        raise UserError(f'{name} must have {" or ".join(map(str, limits["items"]))} items, not {len(converted)}')
    numbers = [
        item for item in (converted if isinstance(converted, list) else [converted]) if isinstance(item, int | float)
    ]
    if not all(limits['low'] <= number <= limits['high'] for number in numbers):
        bounds = (
            f'from {limits["low"]} to {limits["high"]}' if limits['high'] < math.inf else f'at least {limits["low"]}'
        )
        raise UserError(f'{name} must be {bounds}, not {value}')
    return converted


def _to_kind(value: Any, kinds: tuple[type, ...]) -> Any:
    """Convert to the first fitting kind; YAML and the shell may have left a number ('1e-3') or a list a string."""
    if isinstance(value, str):
        parsed = yaml.safe_load(value) if kinds != (str,) else value
        value = parsed if str not in kinds or isinstance(parsed, list | dict) else value
    if isinstance(value, bool) and bool in kinds:
        return value
    if isinstance(value, list | tuple) and list in kinds:
        return [item if isinstance(item, dict) else _to_kind(item, (int, float)) for item in value]
    if isinstance(value, dict) and dict in kinds:
        return value
    if isinstance(value, str) and str in kinds:
        return value
    if not isinstance(value, bool) and int in kinds and float(value).is_integer():
        return int(value)
    if not isinstance(value, bool) and float in kinds and math.isfinite(float(value)):
        return float(value)
    raise ValueError(value)
