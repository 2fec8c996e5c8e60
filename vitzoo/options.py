"""Command-line options shared by several commands, and the types of their values."""

import argparse
import math
import os
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import yaml

from vitzoo._resources import resource_folder
from vitzoo.errors import UserError, did_you_mean, format_flag

# a number that PyYAML reads as a string, because it has no dot or no sign
_EXPONENT = re.compile(r'[-+]?(\d+\.?\d*|\.\d+)e[-+]?\d+', re.IGNORECASE)
DEFAULT_WORKERS = min(4, os.cpu_count() or 1)
AMP_DTYPES = {'float32': None, 'bfloat16': torch.bfloat16, 'float16': torch.float16}


class _Loader(yaml.SafeLoader):
    """YAML of texts, numbers, lists and mappings with each key once: a name such as 2022-03-01 is not a date."""

    # the stubs of PyYAML have a dict of anchors
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != '<<']
        for position, key in enumerate(keys):
            if any((key.tag, key.value) == (earlier.tag, earlier.value) for earlier in keys[:position]):
                problem = f"the key '{key.value}' is there twice; remove one of them"
                raise yaml.composer.ComposerError(None, None, problem, key.start_mark)
        return node


_Loader.add_constructor('tag:yaml.org,2002:timestamp', lambda loader, node: str(node.value))


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a command that runs a model on images."""
    add = parser.add_argument
    add('--checkpoint', metavar='FILE', help='weights to load, .safetensors or .pth')
    add('--num-classes', type=positive, metavar='N', help='number of classes of the checkpoint')
    add_keywords(parser, '--model-kwargs', 'arguments of the model')
    add('--img-size', type=size, metavar='N', help='image size, N or HxW (default: that of the model)')
    add('--crop-pct', type=crop_pct, metavar='P', help="center crop, as a fraction (default: the model's)")
    add('--batch-size', type=positive, default=64, metavar='N', help='batch size per process (default: %(default)s)')
    add_workers(parser)
    add('--device', type=device, default=default_device(), help='device (default: the accelerator if available)')
    add('--amp-dtype', choices=AMP_DTYPES, default='float32', help='precision of the forward pass (default: float32)')


def add_keywords(parser: argparse.ArgumentParser, flag: str, meaning: str) -> None:
    """Add an option of words KEY=VALUE, which the parser returns as a dict."""
    parser.add_argument(flag, nargs='+', type=keyword, action=_Keywords, default={}, metavar='KEY=VALUE', help=meaning)


class _Keywords(argparse.Action):
    """Collects the pairs of an option in a dict."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        setattr(namespace, self.dest, dict(values))


def add_workers(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add the option --workers."""
    parser.add_argument('--workers', type=natural, default=DEFAULT_WORKERS, metavar='N', help='data loading processes')


def add_data_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how a dataset is laid out; see `vitzoo.data.DataOptions`."""
    add = parser.add_argument
    add('--train-split', metavar='NAME', help="name of the training split; '.' if the data is not divided into splits")
    add('--val-split', '--split', metavar='NAME', help='name of the validation split')
    add('--input-key', metavar='NAME', help='column of the images in hfds/…, or their suffix in wds/…')
    add('--target-key', metavar='NAME', help='column of the labels in hfds/…; suffix or .json key in wds/…')
    add('--data-subset', metavar='NAME', help='subset (configuration) of hfds/…')
    add('--class-map', metavar='FILE', help='classes in label order (.txt), or name to label (.json, .pkl)')


def autocast(device: torch.device, amp_dtype: str) -> AbstractContextManager:
    """Autocast to the dtype given by --amp-dtype; a null context for float32."""
    dtype = AMP_DTYPES[amp_dtype]
    return torch.autocast(device.type, dtype) if dtype else nullcontext()


def num_processes() -> int:
    """Number of processes that `accelerate launch` or torchrun started."""
    return int(os.environ.get('WORLD_SIZE', '1'))


def default_device() -> torch.device:
    """The accelerator (CUDA, MPS, XPU, …) if available, else the CPU."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator or torch.device('cpu')


def device(text: str) -> torch.device:
    """Parse an available device, such as 'cpu' or 'cuda:1'."""
    try:
        found = torch.zeros(1, device=text)
        # the tensors of the meta device have no values
        found.item()
    except (AssertionError, ImportError, RuntimeError) as error:
        raise argparse.ArgumentTypeError(f"cannot use the device '{text}'") from error
    return found.device


def natural(text: str) -> int:
    """Parse an integer of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of 0 or more")
    return int(text)


def positive(text: str) -> int:
    """Parse an integer of at least 1."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of 1 or more")
    return int(text)


def nonnegative(text: str) -> float:
    """Parse a finite number of at least 0."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float('inf'):
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of 0 or more")
    return number


def size(text: str) -> tuple[int, int]:
    """Parse an image size (H, W), such as '224' or '224x288'."""
    sides = text.lower().split('x')
    if len(sides) > 2 or not all(sides):
        raise argparse.ArgumentTypeError(f"'{text}' is not a size such as 224 or 224x288")
    sizes = [positive(side) for side in sides]
    return sizes[0], sizes[-1]


def crop_pct(text: str) -> float:
    """Parse the side of a center crop as a fraction of the resized image's, from 0.01 to 1."""
    try:
        fraction = float(text)
    except ValueError:
        fraction = math.nan
    if not 0.01 <= fraction <= 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a fraction from 0.01 to 1")
    return fraction


def keyword(text: str) -> tuple[str, Any]:
    """Parse KEY=VALUE, whose value is YAML or, as in timm's commands, None."""
    key, equals, value = text.partition('=')
    try:
        if key and equals:
            return key, None if value == 'None' else parse_yaml(value)
    except yaml.YAMLError as error:
        raise argparse.ArgumentTypeError(f"'{value}' is not YAML") from error
    raise argparse.ArgumentTypeError(f"'{text}' is not KEY=VALUE, such as img_size=384")


def parse_yaml(text: str) -> Any:
    """Parse YAML, with the numbers that PyYAML takes for strings or for octal ones: '1e-3' and '010'.

    Raises:
        yaml.YAMLError: It is not YAML.
    """
    if text.isdecimal():
        return int(text)
    return float(text) if _EXPONENT.fullmatch(text) else yaml.load(text, _Loader)


def find_config(path: str | Path, command: str = '') -> Path:
    """The file at a path, or if there is none the config of the package with that name, such as 'finetune.yaml'.

    'configs/' may precede the name, as in a checkout.

    Args:
        command: 'train', 'transfer' or 'study', whose configs are named in errors; by default all.

    Raises:
        UserError: There is neither.
    """
    if Path(path).exists():
        return Path(path)
    folder = resource_folder('configs')
    packaged = {config.relative_to(folder).as_posix(): config for config in sorted(folder.rglob('*.yaml'))}
    name = Path(path).as_posix().removeprefix('configs/')
    if name in packaged:
        return packaged[name]
    own = [config for config in packaged if command in ('', _command_of(config))]
    raise UserError(
        f"there is no file '{path}'{did_you_mean(name, own)}; the configs of the package are {', '.join(own)}"
    )


def _command_of(config: str) -> str:
    """The command whose config has this name; those in no folder of another command are recipes."""
    folder = config.partition('/')[0]
    return folder if folder in ('study', 'transfer') else 'train'


def read_yaml(path: str | Path, kind: str = '', command: str = '') -> Any:
    """The contents of a YAML file or of a config of the package; see `find_config`.

    Args:
        kind: Put before the path in errors, such as 'the recipe '.
        command: As in `find_config`.

    Raises:
        UserError: The file does not exist, cannot be read, or is not YAML.
    """
    file = find_config(path, command)
    try:
        return yaml.load(file.read_text(encoding='utf-8'), _Loader)
    except OSError as error:
        raise UserError(f"cannot read {kind}'{path}': {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{kind}'{path}' is not YAML: {error}") from error
    except (ValueError, KeyError) as error:
        # of PyYAML, for a tag such as !!int or a prefix such as 0x
        raise UserError(f"{kind}'{path}' has a value that does not fit its tag or prefix: {error}") from error


def to_words(options: Mapping[str, Any], separator: str | None = None) -> list[str]:
    """A command line of options; a list is several words, or one word with a separator, and a list of sides HxW."""
    words = []
    for key, value in options.items():
        # 0 is a value
        if value is None or value is False:
            continue
        words.append(format_flag(key))
        if isinstance(value, dict):
            words += [f'{name}={item}' for name, item in value.items()]
        elif isinstance(value, list):
            items, joint = [str(item) for item in value], 'x' if key == 'img_size' else separator
            words += items if joint is None else [joint.join(items)]
        elif value is not True:
            words.append(str(value))
    return words


def check_num_classes(num_classes: int | None, checkpoint: str | None) -> None:
    """Raise UserError if a number of classes is given without the checkpoint that has it."""
    if num_classes is not None and checkpoint is None:
        raise UserError(f'--num-classes {num_classes} is for the weights of a --checkpoint, which is missing')


def check_model_kwargs(model_kwargs: Mapping[str, Any]) -> None:
    """Raise UserError if --model-kwargs has what another option is for."""
    own = dict(img_size='--img-size', num_classes='--num-classes', checkpoint_path='--checkpoint')
    for key, value in model_kwargs.items():
        if key in own:
            raise UserError(f'--model-kwargs {key}={value} is not taken here; give {own[key]}')
        if key in ('pretrained', 'features_only'):
            raise UserError(f'--model-kwargs {key}={value} is not taken here; leave it out')


def check_output(path: str, suffixes: tuple[str, ...]) -> None:
    """Check that a file can be written before a long evaluation, and create its folder.

    Raises:
        UserError: The suffix is not one of `suffixes`, or `path` cannot be written.
    """
    if Path(path).suffix.lower() not in suffixes:
        raise UserError(f"cannot tell the format of '{path}': its name must end in {' or '.join(suffixes)}")
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot create the folder of '{path}': {error.strerror}") from error
    is_new = not Path(path).exists()
    try:
        with open(path, 'ab'):
            pass
    except OSError as error:
        raise UserError(f"cannot write '{path}': {error.strerror}") from error
    if is_new:
        # a link may lead to a file that does not exist yet
        Path(path).resolve().unlink(missing_ok=True)
