"""The command line of `vitzoo transfer`."""

import argparse
import sys
from dataclasses import dataclass, field
from typing import Any

import torch

from vitzoo._arguments import constructor_arguments
from vitzoo.data import DataOptions
from vitzoo.data.options import DATA_OPTIONS
from vitzoo.errors import CommandParser, UserError, did_you_mean, format_flag
from vitzoo.mixers import list_mixers, mixer_class
from vitzoo.models._swap_record import check_mixer_kwargs
from vitzoo.options import (
    add_data_options,
    add_workers,
    check_num_classes,
    keyword,
    natural,
    nonnegative,
    positive,
    read_yaml,
    size,
    to_words,
)
from vitzoo.train.progress import parse_trackers
from vitzoo.train.recipe import FIELDS, Recipe, make_recipe

# keys of a recipe that the network stage, which is a training, has as options
TRAINING_KEYS = ('model_ema', 'model_ema_decay', 'model_ema_warmup', 'clip_grad', 'clip_mode')
NEUTRAL_TRAINING_KEYS = ('grad_accum_steps', 'checkpoint_minutes', 'log_with')


@dataclass(frozen=True)
class TransferOptions:
    """Options of a transfer; `settings` are those that its results depend on."""

    teacher: str
    mixers: list[str]
    data_dir: str
    output: str | None = None
    mixer_kwargs: dict[str, dict] = field(default_factory=dict)
    data_options: DataOptions = DataOptions()
    checkpoint: str | None = None
    num_classes: int | None = None
    img_size: tuple[int, int] | None = None
    steps: int = 500
    lr: float = 1e-4
    new_lr: float = 2e-3
    network_steps: int = 1000
    network_lr: float | str = 'auto'
    network_new_lr: float | str = 'auto'
    block_weight: float = 0.1
    labels: bool = False
    training: dict[str, Any] = field(default_factory=dict)
    batch_size: int = 32
    eval_images: int = 256
    evals: int = 20
    keep_softmax: int | str = 0
    tolerance: float = 0.5
    random_control: bool = True
    sizes: tuple[int, ...] = (224, 512, 1024)
    seed: int = 0
    probe_only: bool = False
    resume: bool = False
    overwrite: bool = False
    workers: int = 0
    amp_dtype: str = 'float32'

    @property
    def settings(self) -> dict:
        """The options that must not change when a transfer is resumed, in plain values."""
        left_out = {'mixers', 'output', 'resume', 'overwrite', 'workers', 'data_options', 'probe_only', 'sizes'}
        values = {name: value for name, value in vars(self).items() if name not in left_out}
        values['img_size'] = None if self.img_size is None else list(self.img_size)
        values['training'] = {name: value for name, value in self.training.items() if name in TRAINING_KEYS}
        return values | dict(data_options=self.data_options.given())

    @property
    def recipe(self) -> Recipe:
        """The recipe of the network stage, without its learning rates, which have a schedule of their own."""
        values: dict[str, Any] = {name: getattr(self, name) for name in ('data_dir', 'batch_size', 'workers', 'seed')}
        values |= dict(weight_decay=0.0, kd_distill_type='transfer', kd_block_weight=self.block_weight)
        if self.amp_dtype != 'float32':
            values |= dict(amp=True, amp_dtype=self.amp_dtype)
        return make_recipe(values | self.training)


def parse_args(argv: list[str] | None = None) -> TransferOptions:
    """Read the command line.

    Raises:
        UserError: A value is wrong, or options contradict each other.
    """
    argv, parser = sys.argv[1:] if argv is None else argv, _build_parser()
    _use_config(parser, argv)
    args = vars(parser.parse_args(argv))
    del args['config']
    options = _to_options(args)
    _check_options(options)
    return options


def config_keys(parser: argparse.ArgumentParser | None = None) -> set[str]:
    """The keys that a file for --config may have: the names of the options, those of `parser` if it is at hand."""
    flags = {flag for action in (parser or _build_parser())._actions for flag in action.option_strings}
    names = {flag.removeprefix('--').replace('-', '_') for flag in flags if flag.startswith('--')}
    return names - {'config', 'help'}


def _build_parser() -> CommandParser:
    parser = CommandParser(
        'vitzoo transfer',
        description='Replace the attention of a pretrained ViT by efficient mixers, without labels.',
        allow_abbrev=False,
    )
    add = parser.add_argument
    add('--config', metavar='FILE', help='YAML file of options, which the command line takes precedence over')
    add('teacher', metavar='TEACHER', help='a pretrained timm model, or the folder of a training run')
    add('--mixer', required=True, metavar='NAMES', help='a mixer, or several: ls,nystrom,performer')
    add('--mixer-kwargs', nargs='+', type=keyword, default=[], metavar='KEY=VALUE',
        help='arguments of the mixer; with several mixers NAME.KEY=VALUE')  # fmt: skip
    add('--data-dir', required=True, metavar='DIR', help='images, in class folders or not')
    add_data_options(parser)
    add('--output', metavar='DIR', help='run folder; with several mixers the folder of their run folders')
    add('--checkpoint', metavar='FILE', help='weights of the teacher, .safetensors or .pth')
    add('--num-classes', type=positive, metavar='N', help='number of classes of the checkpoint')
    add('--img-size', type=size, metavar='N', help='image size, N or HxW (default: that of the teacher)')
    defaults = TransferOptions('', [], '')
    _add_stages(parser.add_argument_group('stages'), defaults)
    _add_run(parser.add_argument_group('run'), defaults)
    return parser


def _add_stages(group: argparse._ArgumentGroup, defaults: TransferOptions) -> None:
    add = group.add_argument
    add('--probe-only', action='store_true', help='measure each block without training, and stop')
    add('--steps', type=natural, metavar='N', default=defaults.steps, help='steps of block matching [500]')
    add('--lr', type=_positive_number, metavar='X', default=defaults.lr,
        help='learning rate of inherited weights in block matching [1e-4]')  # fmt: skip
    add('--new-lr', type=_positive_number, metavar='X', default=defaults.new_lr, help='that of other parameters [2e-3]')
    add('--keep-softmax', type=_count, metavar='K|auto', default=0, help='blocks that keep softmax attention [0]')
    add('--tolerance', type=nonnegative, metavar='X', default=defaults.tolerance,
        help='percentage points below the teacher at which auto stops [0.5]')  # fmt: skip
    add('--network-steps', type=natural, metavar='N', default=defaults.network_steps,
        help='steps of the network stage, which distils the whole network [1000]')  # fmt: skip
    add('--network-lr', type=_rate_or_rule, metavar='X|auto|scaled', default=defaults.network_lr,
        help='learning rate of inherited weights in the network stage; scaled: 1e-4 times the error of the outputs at '
        'its start, at most 3e-5; auto: this, or a larger one that short trials find [auto]')  # fmt: skip
    add('--network-new-lr', type=_rate, metavar='X|auto', default=defaults.network_new_lr,
        help='that of other parameters; auto: ten times --network-lr [auto]')  # fmt: skip
    add('--block-weight', type=nonnegative, metavar='X', default=defaults.block_weight,
        help='network stage: weight of the attention outputs in the loss [0.1]')  # fmt: skip
    add('--labels', action='store_true',
        help="network stage: also learn the classes of the images, which must be the teacher's")  # fmt: skip
    for name in TRAINING_KEYS + NEUTRAL_TRAINING_KEYS:
        _add_training_option(group, name)


def _add_run(group: argparse._ArgumentGroup, defaults: TransferOptions) -> None:
    add = group.add_argument
    add('--batch-size', type=positive, metavar='N', default=defaults.batch_size, help='over all processes [32]')
    add('--eval-images', type=positive, metavar='N', default=defaults.eval_images,
        help='held-out images that choose the best state of each stage [256]')  # fmt: skip
    add('--evals', type=positive, metavar='N', default=defaults.evals, help='evaluations in each stage [20]')
    add('--no-random-control', dest='random_control', action='store_false',
        help='leave out the student from random weights, which takes as long as the stages')  # fmt: skip
    add('--sizes', nargs='*', type=positive, metavar='N', default=defaults.sizes,
        help='image sizes at which to measure the speed; without one, it is not measured [224 512 1024]')  # fmt: skip
    add('--seed', type=natural, metavar='N', default=defaults.seed, help='random seed [0]')
    add('--resume', action='store_true', help='continue the transfer in --output, or start it')
    add('--overwrite', action='store_true', help='replace the transfer in --output')
    add_workers(group)
    add(
        '--amp-dtype',
        choices=('float32', 'bfloat16'),
        default='float32',
        help='precision of the forward pass [float32]',
    )


def _to_options(args: dict[str, Any]) -> TransferOptions:
    args['mixers'] = list(dict.fromkeys(name.strip() for name in args.pop('mixer').split(',') if name.strip()))
    args['mixer_kwargs'] = _by_mixer(args['mixers'], args['mixer_kwargs'])
    args['data_options'] = DataOptions(**{name: args.pop(name) for name in DATA_OPTIONS})
    args['sizes'] = tuple(args['sizes'])
    given = {name: args.pop(name) for name in TRAINING_KEYS + NEUTRAL_TRAINING_KEYS}
    recipe = make_recipe(given)
    args['training'] = {name: getattr(recipe, name) for name, value in given.items() if value is not None}
    parse_trackers(recipe.log_with)
    return TransferOptions(**args)


# a stage has no epochs, between which a training saves checkpoints
_HELP = {'checkpoint_minutes': 'minutes between checkpoints (0: only at every evaluation)'}
_METAVARS = {'grad_accum_steps': 'N', 'log_with': 'NAMES'}


def _add_training_option(parser: argparse._ArgumentGroup, name: str) -> None:
    default, metadata = getattr(Recipe(), name), FIELDS[name].metadata
    text = f'network stage: {_HELP.get(name, metadata["help"])}' + ('' if default is None else f' [{default}]')
    if isinstance(default, bool):
        parser.add_argument(format_flag(name), action='store_const', const=True, help=text)
    else:
        parser.add_argument(
            format_flag(name), metavar='|'.join(metadata['choices']) or _METAVARS.get(name, 'X'), help=text
        )


def _use_config(parser: argparse.ArgumentParser, argv: list[str]) -> None:
    """Make the options of a --config file the parser's defaults."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument('--config')
    path = finder.parse_known_args(argv)[0].config
    if path is None:
        return
    actions = {flag: action for action in parser._actions for flag in action.option_strings}
    words, given = ['', '--mixer', '', '--data-dir', ''], []
    keys = config_keys(parser)
    for key, value in _read_mapping(path).items():
        if str(key).replace('-', '_') not in keys:
            raise UserError(f"unknown option '{key}' in '{path}'{did_you_mean(str(key), keys)}")
        flag = format_flag(str(key))
        new = to_words({key: value})
        if new:
            words += new
            given.append(actions[flag])
    values = vars(parser.parse_args(words))
    for action in given:
        action.required = False
        parser.set_defaults(**{action.dest: values[action.dest]})


def _read_mapping(path: str) -> dict:
    values = read_yaml(path, command='transfer')
    if not isinstance(values, dict):
        raise UserError(f"'{path}' must consist of options and values, such as 'steps: 500'")
    return values


def _check_options(options: TransferOptions) -> None:
    if not options.mixers:
        raise UserError('--mixer names no mixer; give one, such as --mixer ls')
    if options.output is None and not options.probe_only:
        raise UserError('--output is missing: name a folder for the result, or use --probe-only')
    check_num_classes(options.num_classes, options.checkpoint)
    if options.resume and options.overwrite:
        raise UserError('--resume continues a transfer and --overwrite deletes it; choose one')
    if options.keep_softmax == 'auto' and options.tolerance >= 100:
        raise UserError(f'--tolerance {options.tolerance} is in percentage points and must be below 100')


def _by_mixer(mixers: list[str], pairs: list[tuple[str, object]]) -> dict[str, dict]:
    """Arguments by mixer, of pairs (key, value) or (mixer.key, value)."""
    found: dict[str, dict] = {}
    for key, value in pairs:
        mixer, dot, name = key.rpartition('.')
        if not dot and len(mixers) > 1:
            raise UserError(f"--mixer-kwargs {key} is ambiguous with several mixers; write '{mixers[0]}.{key}={value}'")
        if dot and mixer not in mixers:
            raise UserError(f"--mixer-kwargs {key}: '{mixer}' is not one of the mixers {', '.join(mixers)}")
        found.setdefault(mixer or mixers[0], {})[name] = value
    try:
        for mixer, kwargs in found.items():
            check_mixer_kwargs(mixer, kwargs)
            _check_names(mixer, kwargs)
    except ValueError as error:
        raise UserError(f'--mixer-kwargs: {error}') from error
    return found


def _check_names(mixer: str, kwargs: dict[str, object]) -> None:
    """Raise ValueError if a mixer does not take an argument; an unknown mixer is reported elsewhere."""
    known = constructor_arguments(mixer_class(mixer)) if mixer in list_mixers() else kwargs.keys()
    for name in kwargs:
        if name not in known:
            raise ValueError(f"{mixer} does not take the argument '{name}'{did_you_mean(name, known)}")


def _count(text: str) -> int | str:
    return text if text == 'auto' else natural(text)


def _rate(text: str) -> float | str:
    return text if text == 'auto' else _positive_number(text)


def _rate_or_rule(text: str) -> float | str:
    return text if text == 'scaled' else _rate(text)


def _positive_number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0
    if not 0 < value < torch.inf:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number above 0")
    return value
