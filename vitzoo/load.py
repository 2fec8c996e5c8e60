"""Finding, creating and loading models: timm names, wildcards, folders written by training, and checkpoints."""

import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import timm
import torch
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError
from timm.layers import to_2tuple
from timm.models import build_model_with_cfg
from torch import Tensor, nn

import vitzoo
from vitzoo._arguments import constructor_arguments, named_parameters
from vitzoo.about import fit_config, is_trained_folder, read_about, read_config, read_img_size
from vitzoo.classes import num_classes_in
from vitzoo.data import resolve_data_config
from vitzoo.errors import UserError, did_you_mean, is_first_process
from vitzoo.models._official import has_two_sets, read_checkpoint, unwrap
from vitzoo.models._resample import resample_checkpoint
from vitzoo.models._swap_record import ARCHITECTURE, describe_swaps, parse_swaps

SOURCES = ('local-dir:', 'hf-hub:')
Weights = Literal['checkpoint', 'trained', 'published', 'random weights']


@dataclass(frozen=True)
class LoadedModel:
    """A model of `load_model` and where its weights come from.

    Attributes:
        name: The name that it was loaded by, from `find_models`.
        model: In eval mode.
        weights: Origin of its weights.
        checkpoint: Their file, if it was given.
    """

    name: str
    model: nn.Module
    weights: Weights
    checkpoint: str | None = None

    @property
    def about(self) -> dict:
        """Facts about its data, as in `read_about`."""
        return read_about(self.name, self.weights, self.checkpoint)

    @property
    def license(self) -> str | None:
        """The licence of its weights, None if it is not known."""
        # that of a trained model is of the published weights that it began with, or chosen by `vitzoo push`
        return self.model.pretrained_cfg.get('license') if self.weights in ('published', 'trained') else None

    def require_weights(self) -> None:
        """Raise UserError if the weights are random."""
        if self.weights == 'random weights':
            raise UserError(
                f'there are no weights of {self.name}; pass a --checkpoint, or the folder of a trained model'
            )


def find_models(patterns: Iterable[str]) -> list[str]:
    """Expand names, wildcards and folders of trained models to names for `load_model`, each once.

    Raises:
        UserError: A name is unknown or malformed, a wildcard matches nothing, or a folder does not contain a model.
    """
    found: dict[str | Path, str] = {}
    for pattern in patterns:
        for name in _expand(pattern):
            # a folder may be given by several paths
            found.setdefault(Path(name).resolve() if is_trained_folder(name) else name, name)
    return list(found.values())


def find_model(name: str) -> str:
    """Expand a name, wildcard or folder that stands for exactly one model.

    Raises:
        UserError: It stands for none, or for several.
    """
    names = find_models([name])
    if len(names) > 1:
        raise UserError(f"'{name}' stands for {len(names)} models ({_first(names)}), but this command takes one")
    return names[0]


def check_source(name: str) -> None:
    """Check what follows the prefix of a name: a folder, or a repository of the hub, perhaps with @REVISION.

    Raises:
        UserError: It is missing, or the hub does not have such names.
    """
    prefix, _, source = name.partition(':')
    if prefix == 'local-dir':
        if not source:
            raise UserError(f"'{name}' does not name a folder; give local-dir:FOLDER")
        return
    repository, *revisions = source.split('@')
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise UserError(
            f"'{name}' cannot be a repository of the hub; give hf-hub:ORG/NAME, of letters, digits, '-', '_' and '.'"
            " but without '--' and '..'"
        ) from error
    if len(revisions) > 1 or '' in revisions:
        raise UserError(f"'{name}' does not name one revision; give hf-hub:ORG/NAME or hf-hub:ORG/NAME@REVISION")


def load_model(
    name: str,
    *,
    img_size: tuple[int, int] | None = None,
    num_classes: int | None = None,
    checkpoint: str | None = None,
    pretrained: bool = True,
    model_kwargs: dict | None = None,
) -> LoadedModel:
    """Create a model with the weights of a checkpoint, else of its folder, else published ones, else random ones.

    Args:
        name: A name from `find_models`.
        img_size: Height and width, for models built for one image size; by default those that the folder of the
            checkpoint has, then those of the name.
        num_classes: New number of classes; without a checkpoint the weights are then random.
        checkpoint: A .safetensors or .pth file.
        pretrained: Whether to download published weights.
        model_kwargs: Model arguments chosen by the user; they override the others.

    Raises:
        UserError: The model does not support the image size, or the weights do not fit or cannot be read or fetched.
    """
    weights: Weights = 'random weights'
    if is_trained_folder(name):
        weights = 'trained'
    elif name.startswith(SOURCES) or timm.is_model_pretrained(name):
        weights = 'published' if pretrained else weights
    if checkpoint is not None:
        weights = 'checkpoint'
    elif num_classes is not None:
        weights = 'random weights'
    pretrained = weights in ('trained', 'published')
    # the images that a file of a run was trained on, not those of the name
    is_given = img_size is not None or 'img_size' in (model_kwargs or {})
    own_size = None if checkpoint is None or is_given else read_img_size(checkpoint)
    model = create_model(
        name, img_size=img_size or own_size, model_kwargs=model_kwargs, num_classes=num_classes, pretrained=pretrained
    )
    if checkpoint is not None:
        load_weights(model, checkpoint)
    if checkpoint is not None or num_classes is not None:
        fit_config(name, model, checkpoint)
    if own_size is not None:
        model.pretrained_cfg['input_size'] = (model.pretrained_cfg['input_size'][0], *own_size)
    return LoadedModel(name, model.eval(), weights, checkpoint)


def load_as_chosen(name: str, options: Any, pretrained: bool = True) -> LoadedModel:
    """Load a model by `load_model` with those of the options of `add_model_options` that it takes."""
    return load_model(
        name,
        img_size=options.img_size,
        num_classes=options.num_classes,
        checkpoint=options.checkpoint,
        pretrained=pretrained,
        model_kwargs=options.model_kwargs,
    )


def create_model(
    name: str, *, img_size: int | Sequence[int] | None = None, model_kwargs: dict | None = None, **kwargs: Any
) -> nn.Module:
    """Create a model with `timm.create_model`, and report mistakes in its arguments as a `UserError`.

    Args:
        name: A name from `find_models`.
        img_size: One number or (H, W); ignored by models without such an argument, which take any image size.
        model_kwargs: Model arguments chosen by the user; they override the others.
        kwargs: Further arguments of `timm.create_model`.

    Raises:
        UserError: The model does not have an argument, cannot be built with its value, or its weights cannot be
            fetched.
    """
    source = _source_of(name)
    chosen = {'img_size': tuple(img_size) if isinstance(img_size, list) else img_size, **(model_kwargs or {})}
    chosen = {key: value for key, value in chosen.items() if value is not None}
    num_classes = chosen.get('num_classes')
    if isinstance(num_classes, int) and num_classes < 0:
        # timm would leave out the classifier, as with 0
        raise UserError(f'{name} cannot be made with num_classes={num_classes}; give a number of 0 or more')
    try:
        return timm.create_model(source, **{**kwargs, **chosen})
    except TypeError as error:
        accepted = accepted_arguments(type(build_on_meta(chosen.get('base_model', name))))
        if name == ARCHITECTURE:
            accepted |= {'base_model', 'swap_mixer'}
        if img_size is not None and 'img_size' not in accepted:
            return create_model(name, model_kwargs=model_kwargs, **kwargs)
        problem = _explain_unknown(name, {**kwargs, **chosen}, accepted, error)
        if not problem and not model_kwargs:
            raise
        raise UserError(problem or _explain_failure(name, chosen, error)) from error
    except (AssertionError, RuntimeError, ValueError, ZeroDivisionError) as error:
        problem = _explain_misfit(name, chosen, error)
        if not problem and not chosen and not is_trained_folder(name) and name != ARCHITECTURE:
            raise
        raise UserError(problem or _explain_failure(name, chosen, error)) from error
    except KeyError as error:
        if error.args != ('architecture',):
            raise
        raise UserError(
            f"the config.json of {name} does not name an 'architecture' of timm; give a folder of `vitzoo train`, "
            '`vitzoo convert` or timm'
        ) from error
    except SafetensorError as error:
        raise UserError(f'the weights of {name} are damaged ({error}); copy or fetch them again') from error
    except OSError as error:
        advice = 'download the repository, and give its folder'
        if is_trained_folder(name):
            raise UserError(
                f'cannot read the weights in {name} ({error}); check its files and their permissions'
            ) from error
        if not name.startswith('hf-hub:'):
            advice = f'give a folder of them, which `vitzoo convert FILE --model {name} --out DIR` makes of their file'
        raise UserError(f'cannot fetch the weights of {name} ({error}); {advice}') from error


def build_on_meta(name: str) -> nn.Module:
    """A model of a name from `find_models` without memory for its weights."""
    with torch.device('meta'):
        return timm.create_model(_source_of(name))


def _source_of(name: str) -> str:
    """The name by which timm loads a name from `find_models`."""
    return f'local-dir:{name}' if is_trained_folder(name) else name


def accepted_arguments(model_cls: type[nn.Module]) -> set[str]:
    """The arguments that `timm.create_model` takes for models of this class."""
    of_timm = named_parameters(timm.create_model) | named_parameters(build_model_with_cfg)
    return of_timm | constructor_arguments(model_cls)


def swap_in(
    name: str,
    model: nn.Module,
    mixer: str,
    mixer_kwargs: dict,
    blocks: str | None = None,
    img_size: int | Sequence[int] | None = None,
) -> str:
    """Replace the attention of a model as the user asks for it, and describe the result.

    Args:
        name: Name of the model in errors.
        mixer: A mixer, or mixers with their blocks such as 'ls:0-9,softmax:10,11'.
        mixer_kwargs: Arguments of the mixer; if there are several, a mapping of their names to the arguments of each.
        blocks: Blocks of the mixer, such as '2,3,5-11'; by default all.
        img_size: Image size of the mixers, which that of the model may not be: timm builds PVTv2 for images of any.

    Raises:
        UserError: The text is wrong, or the model, a block or a mixer cannot be swapped.
    """
    try:
        swaps = parse_swaps(mixer, blocks, mixer_kwargs)
        for swap in swaps:
            vitzoo.swap_mixer(model, **swap)
        size = None if img_size is None else to_2tuple(img_size)
        if size is not None and size != resolve_data_config(model)['input_size'][1:]:
            model.set_input_size(size)
    except (TypeError, ValueError) as error:
        raise UserError(f'the mixers of {name} cannot be changed: {error}') from error
    return describe_swaps(model._model_args['swap_mixer'])


def fit_data_config(
    name: str, model: nn.Module, img_size: int | Sequence[int] | None = None, crop_pct: float | None = None
) -> dict:
    """The model's data config, with another crop or image size if given; the model must run on an image of that size.

    Raises:
        UserError: The model does not support this image size.
    """
    try:
        data_config = resolve_data_config(model, img_size, crop_pct)
    except ValueError as error:
        raise UserError(f'{name} cannot take another image size: {error}') from error
    if img_size is not None:
        _try_one_image(name, model, data_config['input_size'])
    return data_config


def load_weights(model: nn.Module, path: str) -> None:
    """Load a checkpoint that fits the model exactly, EMA weights first.

    Wrappers such as {'model': …} and prefixes such as `module.` are removed. A checkpoint in the layout of the official
    release is converted by the model's `checkpoint_filter_fn`. Weights for another image size are resampled.

    Raises:
        UserError: The file cannot be read, keys are missing, unexpected or of another shape, or the weights fit at
            several image sizes and nothing in the file's folder tells which they are for.
    """
    state_dict = read_weights(path)
    try:
        resampled = resample_checkpoint(state_dict, model, read_img_size(path))
    except ValueError as error:
        raise UserError(f'the checkpoint {path} is ambiguous: {error}') from error
    misfit, converted, failure = _load_if_fits(model, resampled), {}, None
    convert = find_filter(model)
    if misfit and convert is not None:
        # given the weights of another model, a converter may fail in any way: then they do not fit
        try:
            converted = convert(state_dict, model)
            misfit = _load_if_fits(model, converted) and misfit
        except Exception as error:
            misfit, failure = f'{misfit}; converting it from the official layout fails with {error!r}', error
    if not misfit:
        return
    own = getattr(model, 'num_classes', None)
    found = _fit_head(model, resampled) or _fit_head(model, converted)
    if found:
        raise UserError(f'the checkpoint {path} has {found} classes, and the model {own}; add --num-classes {found}')
    raise UserError(f'the checkpoint {path} does not fit {type(model).__name__}: {misfit}') from failure


def read_weights(path: str) -> dict[str, Tensor]:
    """The weights in a checkpoint, EMA weights first, with a note if it has both.

    Raises:
        UserError: The file cannot be read.
    """
    checkpoint = read_checkpoint(path)
    if has_two_sets(checkpoint) and is_first_process():
        # a command may write to stdout
        print(f'note   {path} has EMA weights and raw weights; using the EMA weights', file=sys.stderr)
    return unwrap(checkpoint)


def find_num_classes(model: nn.Module, state_dict: dict[str, Tensor]) -> int | None:
    """The number of classes of a checkpoint in the layout of the model or the official one; None if it has no head."""
    num_classes, convert = num_classes_in(model, state_dict), find_filter(model)
    if num_classes is None and convert is not None:
        # given the weights of another model, a converter may fail in any way
        with suppress(Exception):
            num_classes = num_classes_in(model, convert(state_dict, model))
    return num_classes


def find_filter(model: nn.Module) -> Callable[..., dict] | None:
    """The function that converts official checkpoints for models of this class, None if there is none."""
    filter_fn = getattr(sys.modules[type(model).__module__], 'checkpoint_filter_fn', None)
    if filter_fn is not None and 'adapt_layer_scale' in inspect.signature(filter_fn).parameters:
        # as timm does for the files of DeiT III
        return partial(filter_fn, adapt_layer_scale=True)
    return filter_fn


def _expand(pattern: str) -> list[str]:
    # timm's name of a folder
    path = Path(pattern.removeprefix('local-dir:')).expanduser()
    if pattern.startswith(SOURCES) and not is_trained_folder(path):
        check_source(pattern)
        return [pattern]
    if path.name in ('config.json', 'model.safetensors') and path.is_file():
        path = path.parent
    if is_trained_folder(path):
        # a mistake in it would be one of timm's, in other words
        read_config(path)
        return [str(path)]
    if any(character in pattern for character in '*?['):
        names = timm.list_models(pattern, include_tags='.' in pattern)
        if not names:
            raise UserError(f"no model matches '{pattern}'; `vitzoo list --all` lists all names")
        return names
    if path.is_dir() and not timm.is_model(pattern):
        raise UserError(f"the folder '{pattern}' has no config.json, so it is not a trained model")
    if '/' in pattern and not timm.is_model(pattern):
        raise UserError(f"there is no model '{pattern}': no such folder, and names of models have no '/'")
    if not timm.is_model(pattern):
        names = timm.list_models()
        raise UserError(f"unknown model '{pattern}'{did_you_mean(pattern, names) or '; `vitzoo list` lists the names'}")
    architecture, _, tag = pattern.partition('.')
    tags = timm.list_models(f'{architecture}.*', include_tags=True)
    if tag and pattern not in tags:
        raise UserError(f"{architecture} has no weights '{tag}', it has {', '.join(tags) or 'none'}")
    return [pattern]


def _explain_unknown(name: str, given: dict, accepted: set[str], error: Exception) -> str:
    """One sentence about the first argument that the model does not have, empty if it has all."""
    unknown = [key for key, value in given.items() if value is not None and key not in accepted]
    if not unknown:
        return ''
    hint = did_you_mean(unknown[0], accepted)
    return f"{name} has no argument '{unknown[0]}'{hint or f': {error}'}"


def _explain_misfit(name: str, chosen: dict, error: Exception) -> str:
    """One sentence for the error of load_state_dict, whose message has a line for each problem; empty for others."""
    summary, *problems = str(error).split('\n\t')
    if not summary.startswith('Error(s) in loading state_dict'):
        return ''
    made = f' made{_with_arguments(chosen)}' if chosen else ''
    others = f', and {len(problems) - 1} more' if len(problems) > 1 else ''
    is_of_size = chosen.keys() == {'img_size'} and all(problem.startswith('size mismatch') for problem in problems)
    advice = '; choose the image size of the weights' if is_of_size else ''
    return f'the weights of {name} do not fit the model{made}: {problems[0].rstrip(". ")}{others}{advice}'


def _explain_failure(name: str, chosen: dict, error: Exception) -> str:
    return f'{name} cannot be made{_with_arguments(chosen)}: {error}'


def _with_arguments(chosen: dict) -> str:
    arguments = ', '.join(f'{key}={value}' for key, value in chosen.items())
    return f' with {arguments}' if chosen else ''


@torch.no_grad()
def _try_one_image(name: str, model: nn.Module, input_size: tuple[int, int, int]) -> None:
    image = torch.zeros(1, *input_size, device=next(model.parameters()).device)
    try:
        model.eval()(image)
    except (AssertionError, RuntimeError, ValueError) as error:
        raise UserError(f'{name} cannot take images of {input_size[1]} x {input_size[2]}: {error}') from error


def _fit_head(model: Any, state_dict: dict[str, Tensor]) -> int | None:
    """Give a model a head for the classes of a state dict; returns their number if the state dict fits then."""
    found = num_classes_in(model, state_dict)
    if found in (None, model.num_classes):
        return None
    model.reset_classifier(found)
    return None if _load_if_fits(model, state_dict) else found


def _load_if_fits(model: nn.Module, state_dict: dict[str, Tensor]) -> str:
    """Load a state dict, and describe the keys that do not fit; empty if all do."""
    own = model.state_dict()
    wrong = [key for key in own if key in state_dict and own[key].shape != state_dict[key].shape]
    keys = model.load_state_dict({key: state_dict[key] for key in state_dict if key not in wrong}, strict=False)
    missing = [key for key in keys.missing_keys if key not in wrong]
    wrong = [f'{key} ({tuple(state_dict[key].shape)}, not {tuple(own[key].shape)})' for key in wrong]
    problems = {'missing': missing, 'unexpected': keys.unexpected_keys, 'of another shape': wrong}
    return '; '.join(f'{len(keys)} {problem} ({_first(keys)})' for problem, keys in problems.items() if keys)


def _first(keys: list[str]) -> str:
    return ', '.join(keys[:3]) + (', …' if len(keys) > 3 else '')
