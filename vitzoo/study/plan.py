"""The file of a study, and the cells that it consists of."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from vitzoo._arguments import is_whole
from vitzoo.errors import UserError, did_you_mean
from vitzoo.load import find_models
from vitzoo.mixers import list_mixers
from vitzoo.options import read_yaml, to_words
from vitzoo.study.record import TEACHER_PREFIX, CellRecord
from vitzoo.train.recipe import FIELDS, NEUTRAL, NOT_SAVED, make_recipe, read_recipe_file
from vitzoo.transfer.options import NEUTRAL_TRAINING_KEYS, config_keys
from vitzoo.transfer.options import parse_args as parse_transfer_args
from vitzoo.validate.options import EvalOptions
from vitzoo.validate.options import parse_args as parse_eval_args

_KEYS = ('title', 'output', 'data_dir', 'models', 'seeds', 'baseline', 'ways', 'evaluations')
_WAY_KEYS = {
    'train': ('train', 'models', 'overrides', 'evaluations'),
    'transfer': ('transfer', 'teacher', 'teacher_way', 'mixers', 'overrides', 'evaluations'),
}
# set by the study
_OWN_TRAIN_KEYS = ('model', 'seed', *NOT_SAVED)
_OWN_TRANSFER_KEYS = (
    *('teacher', 'checkpoint', 'num_classes', 'mixer', 'mixers'),
    *('seed', 'output', 'resume', 'overwrite', 'probe_only'),
)
# these would contradict the study, or write files of several cells to one place
_OWN_EVAL_KEYS = (
    *('models', 'no_data', 'random_weights', 'checkpoint', 'num_classes', 'ignore_labels'),
    *('results_file', 'plot', 'save_predictions', 'errors', 'from_predictions'),
)
_EVAL_KEYS = {field.name for field in fields(EvalOptions)} | {'dataset', 'split'}
# of a transfer, these influence its duration only
_NEUTRAL_TRANSFER_KEYS = ('workers', 'sizes', *NEUTRAL_TRAINING_KEYS)


@dataclass(frozen=True)
class StudyCell:
    """One model trained, or converted, in one way with one seed.

    Args:
        way: Name of the way in the study's file.
        model: Name in tables; for a transfer, teacher and mixer.
        command: 'train' or 'transfer'.
        options: Options of the command, as in a file for `--config`.
        teacher: The cell that trains the teacher of a transfer.
        overrides: Those of the options that this model has and the others of its way need not have.
    """

    way: str
    model: str
    seed: int
    command: str
    options: dict[str, Any]
    evaluations: dict[str, dict[str, Any]]
    root: Path
    teacher: 'StudyCell | None' = None
    overrides: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name in messages, and the folder within that of the study."""
        return f'{self.way}/{_to_folder(self.model)}/seed-{self.seed}'

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.root / self.name

    @cached_property
    def record(self) -> CellRecord:
        """The steps of this cell that are finished, or failed."""
        neutral = _NEUTRAL_TRANSFER_KEYS
        if self.command == 'train':
            neutral = tuple(key for key, spec in FIELDS.items() if spec.metadata['on_resume'] == NEUTRAL)
            # the same data may have been moved before a resumed training, but models of other data are not comparable
            neutral = tuple(key for key in neutral if key != 'data_dir')
        settings = {key: value for key, value in self.options.items() if key not in neutral}
        if self.teacher is not None:
            settings['teacher'] = self.teacher.name
            # a student of a teacher with another recipe is another student
            recipe = self.teacher.record.expected[self.teacher.command]
            settings |= {f'{TEACHER_PREFIX}{key}': value for key, value in recipe.items()}
        evaluations = {
            name: {key: value for key, value in options.items() if key != 'workers'}
            for name, options in self.evaluations.items()
        }
        return CellRecord(self.folder, self.command, settings, evaluations)


@dataclass(frozen=True)
class Study:
    """A study: its cells in the order in which they are computed, and the baseline of each model.

    Args:
        path: The file, as it was given.
        baselines: Models by wildcards of the models that are compared with them.
        evaluations: Options of `vitzoo validate` by the name of the evaluation.
    """

    path: str
    title: str
    folder: Path
    cells: tuple[StudyCell, ...]
    baselines: dict[str, str]
    evaluations: dict[str, dict[str, Any]]

    def choose(self, patterns: Sequence[str]) -> 'Study':
        """The study of those cells only whose names match one of the wildcards, and of their teachers.

        Raises:
            UserError: A wildcard matches no cell.
        """
        for pattern in patterns:
            if not any(fnmatchcase(cell.name, pattern) for cell in self.cells):
                raise UserError(
                    f"--cells: no cell matches '{pattern}'; their names are <way>/<model>/seed-<seed>, the first is"
                    f' {self.cells[0].name}'
                )
        chosen = [cell for cell in self.cells if any(fnmatchcase(cell.name, pattern) for pattern in patterns)]
        names = {cell.name for cell in chosen} | {cell.teacher.name for cell in chosen if cell.teacher is not None}
        return replace(self, cells=tuple(cell for cell in self.cells if cell.name in names))

    def evaluations_of(self, way: str) -> list[str]:
        """The names of the evaluations of a way."""
        return next(list(cell.evaluations) for cell in self.cells if cell.way == way)

    def baseline_of(self, cell: StudyCell) -> tuple[str, str] | None:
        """Way and model that a cell is compared with: its teacher, or the baseline in the same way."""
        if cell.teacher is not None:
            return cell.teacher.way, cell.teacher.model
        for pattern, baseline in self.baselines.items():
            if fnmatchcase(cell.model, pattern):
                return cell.way, baseline
        return None


@dataclass(frozen=True)
class _Common:
    """The parts of a study that all of its ways share."""

    data_dir: str
    folder: Path
    models: list[str]
    evaluations: dict[str, dict[str, Any]]


def read_study(path: str) -> Study:
    """Read the file of a study, and check the options of every cell.

    Raises:
        UserError: The file cannot be read, or a key, a model or an option is invalid.
    """
    values = _read_file(path, 'study')
    _check_keys(f"'{path}'", values, _KEYS, required=('output', 'data_dir', 'ways', 'evaluations'))
    folder, data_dir = Path(_text('output', values['output'])), _text('data_dir', values['data_dir'])
    evaluations = {
        _check_name(name): _read_evaluation(name, options or {}, data_dir)
        for name, options in _mapping('evaluations', values['evaluations']).items()
    }
    models = _expand('models', values['models']) if 'models' in values else []
    common = _Common(data_dir, folder, models, evaluations)
    ways = {_check_name(name): _mapping(f'ways.{name}', way) for name, way in _mapping('ways', values['ways']).items()}
    cells: dict[str, StudyCell] = {}
    # the first seed of all ways, then the second, so that a study that is stopped early compares all models
    for seed in _read_seeds(values.get('seeds', [0])):
        for name, way in ways.items():
            if 'train' in way:
                found = _train_cells(common, name, way, seed)
            else:
                found = _transfer_cells(common, name, way, seed, cells.values())
            for cell in found:
                if cell.name in cells:
                    raise UserError(f'ways.{name}: two cells have the folder {cell.name}; remove one of their models')
                cells[cell.name] = cell
    baselines = _read_baselines(values.get('baseline'), {cell.model for cell in cells.values()})
    title = _text('title', values.get('title') or Path(path).stem)
    return Study(path, title, folder, tuple(cells.values()), baselines, evaluations)


def _train_cells(common: _Common, name: str, way: dict, seed: int) -> list[StudyCell]:
    place = f'ways.{name}'
    _check_keys(place, way, _WAY_KEYS['train'])
    given = dict(_mapping(f'{place}.train', way['train'] or {}))
    _refuse_own(f'{place}.train', given, _OWN_TRAIN_KEYS)
    # the model and the seed of a recipe file are only its defaults
    base = _read_config(f'{place}.train', given, read_recipe_file, _OWN_TRAIN_KEYS)
    models = _expand(f'{place}.models', way['models']) if 'models' in way else common.models
    if not models:
        raise UserError(f"{place} has no models; give the study a list of models, such as models: ['deit_*_nano']")
    evaluations, found = _choose_evaluations(common, place, way), []
    overrides = _read_overrides(place, way, models, _OWN_TRAIN_KEYS)
    for model in models:
        own = _overrides_of(model, overrides)
        options = _with_data(_merge({**base, 'data_dir': None, **given}, own), common.data_dir)
        options |= dict(model=model, seed=seed)
        try:
            make_recipe(options)
        except UserError as error:
            raise UserError(f'{place}.train{" with its overrides" if own else ""}: {error}') from error
        cell = StudyCell(name, model, seed, 'train', options, evaluations, common.folder, overrides=own)
        found.append(cell)
    return found


def _transfer_cells(common: _Common, name: str, way: dict, seed: int, cells: Iterable[StudyCell]) -> list[StudyCell]:
    place = f'ways.{name}'
    if 'transfer' not in way:
        raise UserError(f'{place} must have the options of a training or of a transfer; add train: or transfer:')
    # the transfer itself may be {}, which stands for the defaults
    _check_keys(place, way, _WAY_KEYS['transfer'], required=('teacher', 'teacher_way', 'mixers'))
    given = dict(_mapping(f'{place}.transfer', way['transfer'] or {}))
    _refuse_own(f'{place}.transfer', given, _OWN_TRANSFER_KEYS)
    base = _read_config(f'{place}.transfer', given, partial(_read_file, command='transfer'), _OWN_TRANSFER_KEYS)
    teachers = [c for c in cells if (c.way, c.model, c.seed) == (way['teacher_way'], way['teacher'], seed)]
    if not teachers or teachers[0].command != 'train':
        raise UserError(
            f"{place}: no cell trains the teacher '{way['teacher']}' in the way '{way['teacher_way']}'; name a model"
            f' and a way of this study that comes before this one'
        )
    evaluations, known, found = _choose_evaluations(common, place, way), config_keys(), []
    mixers = _expand_mixers(f'{place}.mixers', way['mixers'])
    overrides = _read_overrides(place, way, mixers, _OWN_TRANSFER_KEYS)
    for mixer in mixers:
        own = _overrides_of(mixer, overrides)
        options = _with_data(_merge({**base, 'data_dir': None, **given}, own), common.data_dir)
        options |= dict(mixer=mixer, seed=seed)
        options = _without_kwargs_of(set(mixers) - {mixer}, options)
        words = ['teacher', '--output', 'student', *to_words(options)]
        _parse(f'{place}.transfer{" with its overrides" if own else ""}', parse_transfer_args, words, options, known)
        label = f'{way["teacher"]}_to_{mixer}'
        cell = StudyCell(name, label, seed, 'transfer', options, evaluations, common.folder, teachers[0], own)
        found.append(cell)
    return found


def _read_overrides(place: str, way: dict, names: list[str], refused: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Options by wildcards of the models, or for a transfer of the mixers, that have them."""
    place = f'{place}.overrides'
    found = _mapping(place, way.get('overrides', {}))
    for pattern, options in found.items():
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UserError(f"{place}: '{pattern}' matches none of {', '.join(names)}")
        _refuse_own(f'{place}.{pattern}', _mapping(f'{place}.{pattern}', options), (*refused, 'config'))
    return found


def _overrides_of(name: str, overrides: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The options of all wildcards that match, the last of which counts."""
    found: dict[str, Any] = {}
    for pattern, options in overrides.items():
        found = _merge(found, options) if fnmatchcase(name, pattern) else found
    return found


def _merge(options: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Options in which others take precedence; of mappings, such as `model_kwargs`, their keys."""
    both = {key: {**options[key], **value} for key, value in own.items() if _are_mappings(options.get(key), value)}
    return {**options, **own, **both}


def _with_data(options: dict[str, Any], data_dir: str) -> dict[str, Any]:
    """Options with the data of the study, unless they name their own."""
    # null is no name: the commands would take the images of the package for it, or none
    own = {key: value for key, value in options.items() if value is not None or key != 'data_dir'}
    return {'data_dir': data_dir, **own}


def _are_mappings(*values: Any) -> bool:
    return all(isinstance(value, dict) for value in values)


def _choose_evaluations(common: _Common, place: str, way: dict) -> dict[str, dict[str, Any]]:
    """The evaluations of a way, by default all."""
    names = _texts(f'{place}.evaluations', way.get('evaluations', list(common.evaluations)))
    for name in names:
        if name not in common.evaluations:
            raise UserError(
                f"{place}.evaluations: '{name}' is not an evaluation of this study"
                f'{did_you_mean(name, common.evaluations)}; the evaluations are {", ".join(common.evaluations)}'
            )
    return {name: common.evaluations[name] for name in names}


def _without_kwargs_of(others: set[str], options: dict[str, Any]) -> dict[str, Any]:
    """The options of a transfer to one of several mixers, without the arguments MIXER.KEY of the others."""
    kwargs = options.get('mixer_kwargs')
    if not isinstance(kwargs, dict | list):
        return options
    # a list has KEY=VALUE
    own = [key for key in kwargs if str(key).partition('=')[0].rpartition('.')[0] not in others]
    if not own:
        return {key: value for key, value in options.items() if key != 'mixer_kwargs'}
    return options | dict(mixer_kwargs={key: kwargs[key] for key in own} if isinstance(kwargs, dict) else own)


def _read_evaluation(name: str, options: Any, data_dir: str) -> dict[str, Any]:
    place = f'evaluations.{name}'
    if name in _WAY_KEYS:
        raise UserError(f"{place}: '{name}' is the name of a command; choose another")
    options = _with_data(_mapping(place, options), data_dir)
    _refuse_own(place, options, _OWN_EVAL_KEYS)
    size = options.get('img_size')
    if isinstance(size, list):
        # as a recipe may have it
        options['img_size'] = 'x'.join(map(str, size))
    if 'suite' in options:
        # its accuracies have no columns in the tables
        raise UserError(
            f'{place}: suite = {options["suite"]} cannot be part of a study; run vitzoo validate --suite on the folders'
            f' of its cells'
        )
    # the machine that reads the study may lack the device
    words = to_words(options | dict(device=None), ',')
    _parse(place, parse_eval_args, ['model', *words], options, _EVAL_KEYS)
    return options


def _parse(place: str, parse: Callable, words: list[str], options: dict, names: set[str]) -> None:
    """Check options by their names and by the parser of their command, and report its error as a UserError."""
    for key in options:
        if key not in names:
            raise UserError(f"{place}: unknown option '{key}'{did_you_mean(str(key), names)}")
    try:
        parse(words)
    except UserError as error:
        raise UserError(f'{place}: {error}') from error


def _read_seeds(values: Any) -> list[int]:
    seeds = values if isinstance(values, list) else [values]
    wrong = [seed for seed in seeds if not is_whole(seed) or seed < 0]
    if wrong or not seeds:
        raise UserError(f'seeds must be whole numbers of 0 or more, not {wrong[0] if wrong else "an empty list"}')
    if len(set(seeds)) < len(seeds):
        raise UserError(f'seeds has a number twice: {seeds}; a seed gives one result only')
    return seeds


def _read_baselines(value: Any, models: set[str]) -> dict[str, str]:
    """Baselines by wildcard, of one name for all models or of a mapping."""
    if value is None:
        return {}
    baselines = value if isinstance(value, dict) else {'*': value}
    for pattern, model in baselines.items():
        if not isinstance(model, str):
            raise UserError(
                f'baseline must be the name of a model, or consist of wildcards and such names, not {model!r}'
            )
        if model not in models:
            raise UserError(f"baseline: '{model}' is not a model of this study{did_you_mean(str(model), models)}")
        if not any(fnmatchcase(other, str(pattern)) for other in models):
            raise UserError(f"baseline: no model of this study matches '{pattern}'")
    return {str(pattern): model for pattern, model in baselines.items()}


def _read_config(place: str, given: dict, read: Callable[[str], dict], own: tuple[str, ...]) -> dict:
    """Take `config` out of the options of a command, and return those in its file that the study does not choose."""
    config = given.pop('config', None)
    if config is None:
        return {}
    if not isinstance(config, str):
        raise UserError(f'{place}: config must be the name of a file, not {config!r}')
    return {key: value for key, value in read(config).items() if key not in own}


def _read_file(path: str, command: str) -> dict:
    return _mapping(f"'{path}'", read_yaml(path, command=command))


def _mapping(place: str, value: Any) -> dict:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise UserError(f'{place} must consist of names and values, not {value!r}')
    return value


def _text(place: str, value: Any) -> str:
    """A name or path; YAML reads some as numbers."""
    if isinstance(value, dict | list | bool):
        raise UserError(f'{place} must be text, not {value!r}')
    return str(value)


def _texts(place: str, value: Any) -> list[str]:
    """A name, or a list of names."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise UserError(f'{place} must be a name or a list of names, not {value!r}')
    return texts


def _expand(place: str, value: Any) -> list[str]:
    """The models of names and wildcards."""
    return find_models(_texts(place, value))


def _expand_mixers(place: str, value: Any) -> list[str]:
    """The mixers of names and wildcards; a wildcard leaves out softmax attention, which the teacher has."""
    names = []
    for pattern in _texts(place, value):
        is_wildcard = any(character in pattern for character in '*?[')
        found = [name for name in list_mixers() if fnmatchcase(name, pattern) and name != 'softmax']
        if is_wildcard and not found:
            raise UserError(f"{place}: no mixer matches '{pattern}'; see `vitzoo list --mixers`")
        # otherwise the transfer would find out, after its teacher was trained
        if not is_wildcard and pattern not in list_mixers():
            hint = did_you_mean(pattern, list_mixers())
            raise UserError(f"{place}: unknown mixer '{pattern}'{hint or '; see `vitzoo list --mixers`'}")
        names += found if is_wildcard else [pattern]
    return list(dict.fromkeys(names))


def _check_keys(place: str, values: dict, known: tuple[str, ...], required: tuple[str, ...] = ()) -> None:
    for key in values:
        if key not in known:
            raise UserError(f"{place}: unknown key '{key}'{did_you_mean(key, known)}; the keys are {', '.join(known)}")
    missing = [key for key in required if not values.get(key)]
    if missing:
        raise UserError(f'{place} has no {missing[0]}; its keys are {", ".join(known)}')


def _refuse_own(place: str, values: dict, own: tuple[str, ...]) -> None:
    for key in values:
        if key in own:
            raise UserError(f"{place}: '{key}' cannot be given here, because the study chooses it for each cell")


def _check_name(name: str) -> str:
    """A name that is also one of a folder or file."""
    if not re.fullmatch(r'\w[\w.-]*', name):
        raise UserError(f"the name '{name}' must consist of letters, digits, '_', '-' and '.'")
    return name


def _to_folder(model: str) -> str:
    """A model's name without the characters that separate folders."""
    return re.sub(r'[^\w.-]+', '-', model).strip('-')
