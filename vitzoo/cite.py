"""`vitzoo cite`: print BibTeX of the papers of a model: of its backbone, its mixers, its weights and its data.

Examples:
    vitzoo cite cvt_ls_13
    vitzoo cite runs/photos 'vil_tiny*' > papers.bib

The docstring of a backbone's or a mixer's module names its paper, and papers.bib has an entry for each. Papers of
options, which follow the first in the docstring of a mixer, are not included.
"""

import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import timm
import torch
from torch import nn

from vitzoo.about import find_shipped, is_trained_folder, read_about
from vitzoo.errors import CommandParser, run_command
from vitzoo.load import create_model, find_models
from vitzoo.mixers import TokenMixer, list_mixers, mixer_class
from vitzoo.mixers.base import named_mixers
from vitzoo.options import read_yaml

__all__ = ['Paper', 'cite', 'find_papers', 'read_papers']

_TIMM, _CIFAR = 'wightman2019timm', 'krizhevsky2009cifar'
_IMAGENET, _WHOLE_IMAGENET = '1409.0575', 'deng2009imagenet'
# by the name of the folder, in lower case without separators
_DATASETS = {
    **dict.fromkeys(('sample', 'cifar10', 'cifar100'), _CIFAR),
    # Imagenette is a part of ImageNet
    **dict.fromkeys(('imagenet', 'imagenet1k', 'imagenet2012', 'ilsvrc2012', 'imagenette'), _IMAGENET),
}


class Paper(NamedTuple):
    """An entry of papers.bib: its key, its fields, and its text."""

    key: str
    fields: dict[str, str]
    bibtex: str


def main(argv: list[str] | None = None) -> None:
    """Run the command and exit with its exit code."""
    run_command(_print_citations, argv)


def cite(names: list[str]) -> str:
    """BibTeX of the papers of some models, each once, after comments with the reasons to cite it.

    Args:
        names: Names from `vitzoo.load.find_models`.

    Raises:
        UserError: A model cannot be created.
    """
    reasons: dict[str, list[str]] = {}
    for name in names:
        for source, reason in find_papers(name):
            reasons.setdefault(source, []).append(reason)
    return '\n\n'.join(_format_source(source, list(dict.fromkeys(of))) for source, of in reasons.items())


def find_papers(name: str) -> Iterator[tuple[str, str]]:
    """The papers of a model, each an arXiv id, a key of papers.bib or a description, with the reason to cite it.

    Raises:
        UserError: The model cannot be created.
    """
    with torch.device('meta'):
        model = create_model(name, pretrained=False)
    yield _paper_of_backbone(model), f'backbone of {name}'
    mixers = {mixer_class(mixer): mixer for mixer in list_mixers()}
    for cls in dict.fromkeys(type(mixer) for _, mixer in named_mixers(model)):
        yield _paper_of_mixer(cls), f'mixer {mixers.get(cls, cls.__name__)} of {name}'
    if is_trained_folder(name):
        yield from _papers_of_run(Path(name), name)
    else:
        yield from _papers_of_published(name, model.pretrained_cfg)


@cache
def read_papers() -> dict[str, Paper]:
    """The entries of papers.bib, by arXiv id, or by key if they have none."""
    text = Path(__file__).with_name('papers.bib').read_text(encoding='utf-8')
    papers = {}
    for entry in re.split(r'\n+(?=@)', text.strip()):
        (key,) = re.findall(r'^@\w+\{(\w+),', entry)
        fields = dict(re.findall(r'^  (\w+) = \{(.*)\},$', entry, re.MULTILINE))
        papers[fields.get('eprint', key)] = Paper(key, fields, entry)
    return papers


def _print_citations(argv: list[str] | None) -> None:
    parser = CommandParser('vitzoo cite', description=__doc__.partition('\n')[0])
    parser.add_argument('models', nargs='+', metavar='MODEL', help='names, wildcards in quotes, or trained folders')
    print(cite(find_models(parser.parse_args(argv).models)))


def _format_source(source: str, reasons: list[str]) -> str:
    paper = read_papers().get(source)
    if paper:
        return '\n'.join([*(f'% {reason}' for reason in reasons), paper.bibtex])
    link = f'https://arxiv.org/abs/{source}' if re.fullmatch(r'[\d.]+', source) else source
    return '\n'.join(f'% {reason}: {link}' for reason in reasons)


def _paper_of_backbone(model: nn.Module) -> str:
    """That of timm for its models, also after a swap of their mixers."""
    own = [cls for cls in type(model).__mro__ if cls.__module__.startswith('vitzoo.models.')]
    return next((ids[0] for cls in own if (ids := _arxiv_ids(cls))), _TIMM)


def _paper_of_mixer(cls: type[TokenMixer]) -> str:
    ids = _arxiv_ids(cls)
    return ids[0] if ids else f'no arXiv paper in the docstring of {cls.__module__}'


def _arxiv_ids(cls: type) -> list[str]:
    """The arXiv ids in the docstring of the module of a class."""
    return re.findall(r'arxiv\.org/abs/(\d{4}\.\d{4,5})', sys.modules[cls.__module__].__doc__ or '')


def _papers_of_published(name: str, config: dict, before: frozenset[Path] = frozenset()) -> Iterator[tuple[str, str]]:
    """The papers of the published weights of a name; `config` is for names that timm does not list."""
    shipped = find_shipped(name)
    if shipped is None:
        # models that are created without weights may lack the tag
        listed = timm.get_pretrained_cfg(name)
        yield from _papers_of_weights(name, config if listed is None else listed.to_dict())
    elif shipped.resolve() not in before:
        yield from _papers_of_run(shipped, name, before, is_local=False)


def _papers_of_weights(name: str, config: dict) -> Iterator[tuple[str, str]]:
    """The papers of published weights, and of the data that they were trained on, by the tag."""
    ids, tag = config.get('paper_ids') or (), config.get('tag') or ''
    for paper in (ids,) if isinstance(ids, str) else ids:
        yield re.sub(r'^arXiv:|v\d+$', '', paper), f'published weights of {name}'
    if re.search(r'in(12|21|22)k', tag):
        yield _WHOLE_IMAGENET, f'ImageNet, training data of the published weights of {name}'
    if 'in1k' in tag:
        yield _IMAGENET, f'ImageNet-1k, training data of the published weights of {name}'


def _papers_of_run(
    folder: Path, name: str, before: frozenset[Path] = frozenset(), is_local: bool = True
) -> Iterator[tuple[str, str]]:
    """The papers of the data of a run or a converted model, and those of the model that it began with.

    Args:
        before: The folders that began with this one, directly or not.
        is_local: False for weights that come with vitzoo, which began with folders of another machine.
    """
    before = before | {folder.resolve()}
    # the best epoch has a folder inside that of the run
    recipes = [path for path in (folder / 'recipe.yaml', folder.resolve().parent / 'recipe.yaml') if path.is_file()]
    # of a training or of a transfer
    recipe = (read_yaml(recipes[0], 'the recipe ') if recipes else None) or {}
    about = read_about(str(folder))
    data = recipe.get('data_dir') or about.get('data_dir')
    if data:
        dataset = re.sub('[-_]', '', Path(data).name.lower())
        yield _DATASETS.get(dataset, f'cite the source of {data}'), f'training data of {name}'
    for parent, is_published in _parents(recipe, about):
        path = Path(parent.removeprefix('local-dir:')).expanduser()
        # a run may be in a folder of the name of its model
        if is_local and is_trained_folder(path) and path.resolve() not in before:
            yield from _papers_of_run(path, parent, before)
        elif is_published and timm.is_model(parent):
            yield from _papers_of_published(parent, {}, before)


def _parents(recipe: dict, about: dict) -> Iterator[tuple[str, bool]]:
    """The models and folders that a model began with, and whether published weights of that name were used."""
    weights = about.get('weights')
    if recipe.get('model') and not recipe.get('initial_checkpoint'):
        yield recipe['model'], bool(recipe.get('pretrained'))
    if about.get('parent') and weights in ('published', 'trained'):
        yield about['parent'], weights == 'published'
    if about.get('teacher') and weights != 'checkpoint':
        yield about['teacher'], True


if __name__ == '__main__':
    main()
