"""Swaps as text on a command line, and as the arguments of an exported model."""

from collections import Counter
from typing import Any

from timm.models._input import get_model_input_config, get_model_traits, update_model_args, update_model_input_size

__all__ = [
    *('ARCHITECTURE', 'check_mixer_kwargs', 'describe_blocks', 'describe_swaps', 'name_entrypoint', 'parse_blocks'),
    *('parse_swaps', 'recorded_swaps'),
]

# the entrypoint of swapped.py, which is the architecture in the config of every swapped model
ARCHITECTURE = 'vitzoo_swapped'


def recorded_swaps(model: Any) -> list[dict[str, Any]]:
    """The arguments of each call of `swap_mixer` that made a model, in order; empty if none did."""
    return getattr(model, '_model_args', {}).get('swap_mixer', [])


def name_entrypoint(model: Any) -> None:
    """Let timm export a swapped model as one of `ARCHITECTURE`, which has one image size.

    Models that timm did not create stay as they are.
    """
    config = getattr(model, 'pretrained_cfg', None)
    if not config or config['architecture'] == ARCHITECTURE:
        return
    update_model_args(model, base_model=config['architecture'])
    model.pretrained_cfg = model.default_cfg = {**config, 'architecture': ARCHITECTURE}
    # the mixers have a grid even if the base model takes images of any size
    update_model_input_size(model, _image_size(model))
    model._traits = {**model._traits, 'fixed_input_size': True}


def _image_size(model: Any) -> tuple[int, int]:
    """The image size that the mixers of a model are for."""
    if hasattr(getattr(model, 'patch_embed', None), 'img_size'):
        return model.patch_embed.img_size
    if hasattr(model, 'embeds') and get_model_traits(model).get('img_size') is None:
        # NaFlexVit
        grid_size, patch_size = model.embeds.pos_embed_grid_size, model.embeds.patch_size
        return tuple(side * patch for side, patch in zip(grid_size, patch_size))
    return tuple(get_model_input_config(model)['input_size'][1:])


def parse_swaps(text: str, blocks: str | None = None, mixer_kwargs: dict | None = None) -> list[dict[str, Any]]:
    """The arguments of each call of `swap_mixer` that 'ls' or 'ls:0-9,softmax:10,11' stands for.

    Args:
        text: A mixer for all blocks, or mixers with their blocks; several numbers or ranges are joined by commas.
        blocks: Numbers and ranges such as '2,3,5-11', for a mixer without any.
        mixer_kwargs: Arguments of the mixer; if there are several, a mapping of their names to the arguments of each.

    Raises:
        ValueError: The text is not of this form, a block has two mixers, or arguments have no mixer.
    """
    ranges = _split_mixers(text)
    if blocks is not None:
        if len(ranges) > 1 or any(ranges.values()):
            raise ValueError(f"'{text}' already has the blocks of its mixers; leave out the blocks '{blocks}'")
        ranges = dict.fromkeys(ranges, blocks)
    elif len(ranges) > 1 and not all(ranges.values()):
        mixer = next(mixer for mixer, numbers in ranges.items() if not numbers)
        raise ValueError(f"'{text}' has no blocks for {mixer}; write them as in 'ls:0-9,softmax:10,11'")
    indices = {mixer: None if numbers is None else parse_blocks(numbers) for mixer, numbers in ranges.items()}
    _check_overlap(text, indices)
    kwargs = _kwargs_by_mixer(list(ranges), mixer_kwargs or {})
    return [{'mixer': mixer, 'blocks': numbers, **kwargs[mixer]} for mixer, numbers in indices.items()]


def check_mixer_kwargs(mixer: str, kwargs: dict[str, Any]) -> None:
    """Raise ValueError if one of a mixer's arguments is a parameter of `swap_mixer` itself."""
    reserved = [name for name in ('model', 'mixer', 'blocks') if name in kwargs]
    if reserved:
        raise ValueError(f"'{reserved[0]}' is not an argument of the mixer {mixer}")


def parse_blocks(text: str) -> list[int]:
    """The numbers in '2,3,5-11', whose ranges include both ends; raises ValueError if it has another form."""
    numbers: list[int] = []
    for part in text.split(','):
        first, dash, last = (word.strip() for word in part.partition('-'))
        if not first.isdecimal() or (dash and not last.isdecimal()) or int(last or first) < int(first):
            raise ValueError(f"'{part.strip()}' in the blocks '{text}' is not a number or a range such as 5-11")
        numbers += range(int(first), int(last or first) + 1)
    number, times = Counter(numbers).most_common(1)[0]
    if times > 1:
        raise ValueError(f"block {number} is in '{text}' twice")
    return numbers


def describe_swaps(swaps: list[dict[str, Any]]) -> str:
    """The mixer of each swapped block, such as 'ls in blocks 0-9, softmax in blocks 10-11'."""
    mixer_of: dict[int, str] = {}
    everywhere = None
    for swap in swaps:
        mixer, blocks = swap['mixer'], swap.get('blocks')
        if not isinstance(mixer, str):
            mixer_of |= zip(range(len(mixer)) if blocks is None else blocks, mixer)
        elif blocks is None:
            mixer_of, everywhere = {}, mixer
        else:
            mixer_of |= dict.fromkeys(blocks, mixer)
    texts = [] if everywhere is None else [f'{everywhere} in all {"other " if mixer_of else ""}blocks']
    for mixer in dict.fromkeys(mixer_of.values()):
        numbers = sorted(index for index, name in mixer_of.items() if name == mixer)
        texts.append(f'{mixer} in {describe_blocks(numbers)}')
    return ', '.join(texts)


def describe_blocks(numbers: list[int]) -> str:
    """Sorted numbers of blocks as 'blocks 2,3,5-11'."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    text = ','.join(f'{first}-{last}' if first < last else f'{first}' for first, last in ranges)
    return f'block{"s" if len(numbers) > 1 else ""} {text}'


def _split_mixers(text: str) -> dict[str, str | None]:
    """The blocks of each mixer as text, None if it has none."""
    ranges: dict[str, str | None] = {}
    mixer = ''
    for part in (part.strip() for part in text.split(',')):
        name, colon, numbers = (word.strip() for word in part.partition(':'))
        before = ranges.get(mixer)
        if name[:1].isdigit() and not colon and before:
            # further blocks of the same mixer
            ranges[mixer] = f'{before},{name}'
            continue
        if not name or name[0].isdigit() or bool(colon) != bool(numbers) or (name in ranges and not numbers):
            raise ValueError(f"'{part}' in '{text}' is not a mixer with its blocks, such as ls:0-9 or softmax:10,11")
        mixer = name
        ranges[mixer] = f'{ranges[mixer]},{numbers}' if ranges.get(mixer) else numbers or None
    return ranges


def _check_overlap(text: str, blocks: dict[str, list[int] | None]) -> None:
    mixer_of: dict[int, str] = {}
    for mixer, numbers in blocks.items():
        for number in numbers or []:
            if number in mixer_of:
                raise ValueError(f"block {number} has two mixers in '{text}', {mixer_of[number]} and {mixer}")
            mixer_of[number] = mixer


def _kwargs_by_mixer(mixers: list[str], kwargs: dict[str, Any]) -> dict[str, dict]:
    """The arguments of each mixer, from those of the only one or from a mapping of mixers to arguments."""
    if len(mixers) == 1:
        kwargs = {mixers[0]: kwargs}
    for name, value in kwargs.items():
        if name not in mixers or not isinstance(value, dict):
            raise ValueError(
                f"there are {len(mixers)} mixers, so the mixer arguments '{name}' must be those of one of them, such "
                f'as {mixers[0]}={{seed: 1}}'
            )
        check_mixer_kwargs(name, value)
    return {mixer: kwargs.get(mixer, {}) for mixer in mixers}
