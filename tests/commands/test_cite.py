"""`vitzoo cite`, its table of papers, and CITATION.cff, which is made from it."""

import re
import sys
from pathlib import Path

import docs_citation
import pytest
import timm
from timm.models import save_for_hf

import vitzoo
from vitzoo.cite import cite, find_papers, main, read_papers
from vitzoo.mixers import mixer_class

PAPERS = read_papers()
OWN = [name for name in timm.list_models() if timm.model_entrypoint(name).__module__.startswith('vitzoo.')]


def keys(bibtex: str) -> list[str]:
    return re.findall(r'^@\w+\{(\w+),$', bibtex, re.MULTILINE)


@pytest.mark.parametrize(
    ('name', 'expected'),
    [
        ('cvt_ls_13', ['wu2021cvt', 'zhu2021longshort']),
        ('aft_full_tiny', ['zhai2021aft']),
        ('deit_performer_small', ['touvron2021deit', 'choromanski2021performer']),
        ('vil_tiny.msft_in1k', ['zhang2021vil', 'vaswani2017attention', 'russakovsky2015imagenet']),
        (
            'cvt_21.msft_in22k_ft_in1k_384',
            ['wu2021cvt', 'vaswani2017attention', 'deng2009imagenet', 'russakovsky2015imagenet'],
        ),
        ('cvt_softmax_nano.vz_cifar10', ['wu2021cvt', 'vaswani2017attention', 'krizhevsky2009cifar']),
        ('cvt_softmax_nano', ['wu2021cvt', 'vaswani2017attention', 'russakovsky2015imagenet']),
        ('vil_softmax_nano.vz_imagenette', ['zhang2021vil', 'vaswani2017attention', 'russakovsky2015imagenet']),
        ('resnet50.tv_in1k', ['wightman2019timm', 'russakovsky2015imagenet']),
    ],
)
def test_a_model_has_the_papers_of_its_backbone_its_mixers_and_its_data(name, expected):
    assert keys(cite([name])) == expected


def test_a_paper_of_several_models_is_printed_once_with_all_reasons():
    text = cite(['cvt_ls_13', 'cvt_performer_13'])
    assert keys(text) == ['wu2021cvt', 'zhu2021longshort', 'choromanski2021performer']
    assert text.startswith('% backbone of cvt_ls_13\n% backbone of cvt_performer_13\n@inproceedings{wu2021cvt,')


def test_papers_of_weights_without_an_entry_are_links():
    assert '% published weights of resnet50.a1_in1k: https://arxiv.org/abs/' in cite(['resnet50.a1_in1k'])


@pytest.mark.parametrize(
    ('recipe', 'expected'),
    [
        ('data_dir: sample', ['krizhevsky2009cifar']),
        ('data_dir: data/ImageNet-1k/', ['russakovsky2015imagenet']),
        ('data_dir: sample\nmodel: cvt_13\npretrained: true', ['krizhevsky2009cifar', 'russakovsky2015imagenet']),
        (
            'data_dir: sample\nmodel: cvt_softmax_nano\npretrained: true',
            ['krizhevsky2009cifar', 'russakovsky2015imagenet'],
        ),
    ],
)
@pytest.mark.parametrize('folder', ['.', 'best'])
def test_a_run_has_the_papers_of_its_data_and_of_the_weights_it_began_with(recipe, expected, folder, tmp_path):
    (tmp_path / folder).mkdir(exist_ok=True)
    model = timm.create_model('cvt_ls_13', num_classes=3)
    save_for_hf(model, str(tmp_path / folder), safe_serialization=True)
    (tmp_path / 'recipe.yaml').write_text(recipe)
    found = keys(cite([str(tmp_path / folder)]))
    assert found[:2] == ['wu2021cvt', 'zhu2021longshort']
    assert found[2:] == expected


@pytest.mark.parametrize(
    'origin',
    [
        dict(parent='cvt_13', weights='published'),
        dict(parent='cvt_softmax_nano.vz_imagenette', weights='published'),
        dict(teacher='cvt_13'),
        dict(teacher='cvt_13', weights='published'),
    ],
    ids=str,
)
def test_a_converted_model_has_the_papers_of_the_data_and_the_weights_of_its_parent(origin, tmp_path):
    model = timm.create_model('cvt_ls_13', num_classes=3)
    about = dict(data_dir='sample', **origin)
    save_for_hf(model, str(tmp_path), safe_serialization=True, model_config=dict(vitzoo=about))
    found = keys(cite([str(tmp_path)]))
    assert found == ['wu2021cvt', 'zhu2021longshort', 'krizhevsky2009cifar', 'russakovsky2015imagenet']


@pytest.mark.parametrize(
    'origin', [dict(parent='cvt_13', weights='own.pth'), dict(teacher='cvt_13', weights='checkpoint')]
)
def test_a_model_that_began_with_a_checkpoint_does_not_have_the_papers_of_published_weights(origin, tmp_path):
    save_for_hf(timm.create_model('cvt_ls_13', num_classes=3), str(tmp_path), model_config=dict(vitzoo=origin))
    assert keys(cite([str(tmp_path)])) == ['wu2021cvt', 'zhu2021longshort']


@pytest.mark.parametrize(
    ('origin', 'recipe'),
    [
        (dict(parent='{run}', weights='trained'), None),
        (dict(teacher='{run}', weights='trained'), None),
        ({}, 'model: {run}'),
        ({}, 'model: local-dir:{run}'),
    ],
    ids=str,
)
def test_a_model_has_the_papers_of_the_run_that_it_began_with(origin, recipe, tmp_path):
    model = timm.create_model('cvt_ls_13', num_classes=3)
    run, derived = tmp_path / 'run', tmp_path / 'derived'
    save_for_hf(model, str(run))
    (run / 'recipe.yaml').write_text('data_dir: sample\nmodel: cvt_13\npretrained: true')
    about = {key: text.format(run=run) for key, text in origin.items()}
    save_for_hf(model, str(derived), model_config=dict(vitzoo=about))
    if recipe is not None:
        (derived / 'recipe.yaml').write_text(recipe.format(run=run))
    found = keys(cite([str(derived)]))
    assert found == ['wu2021cvt', 'zhu2021longshort', 'krizhevsky2009cifar', 'russakovsky2015imagenet']
    if origin:
        about['weights'] = 'checkpoint'
        save_for_hf(model, str(derived), model_config=dict(vitzoo=about))
        assert keys(cite([str(derived)])) == ['wu2021cvt', 'zhu2021longshort']


@pytest.mark.parametrize(('pretrained', 'expected'), [('true', ['russakovsky2015imagenet']), ('false', [])])
def test_a_run_in_a_folder_of_the_name_of_its_model_has_its_papers(pretrained, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_for_hf(timm.create_model('cvt_softmax_nano'), 'cvt_softmax_nano')
    Path('cvt_softmax_nano/recipe.yaml').write_text(f'model: cvt_softmax_nano\npretrained: {pretrained}')
    assert keys(cite(['cvt_softmax_nano']))[2:] == expected


def test_a_run_that_began_with_a_checkpoint_does_not_have_the_papers_of_published_weights(tmp_path):
    save_for_hf(timm.create_model('cvt_ls_13', num_classes=3), str(tmp_path))
    (tmp_path / 'recipe.yaml').write_text('model: cvt_13\npretrained: true\ninitial_checkpoint: own.pth')
    assert keys(cite([str(tmp_path)])) == ['wu2021cvt', 'zhu2021longshort']


def test_the_source_of_other_data_is_left_to_the_user(tmp_path):
    model = timm.create_model('cvt_ls_13', num_classes=3)
    save_for_hf(model, str(tmp_path), safe_serialization=True)
    (tmp_path / 'recipe.yaml').write_text('data_dir: my/photos')
    assert cite([str(tmp_path)]).endswith(f'% training data of {tmp_path}: cite the source of my/photos')


def test_a_swapped_model_of_timm_has_the_papers_of_its_mixers(tmp_path):
    model = timm.create_model('vit_tiny_patch16_224', num_classes=3, depth=1)
    vitzoo.swap_mixer(model, 'hydra')
    save_for_hf(model, str(tmp_path), safe_serialization=True)
    assert keys(cite([str(tmp_path)])) == ['wightman2019timm', 'bolya2022hydra']


def test_a_mixer_without_a_paper_is_named(monkeypatch):
    monkeypatch.setattr(sys.modules['vitzoo.mixers.hydra'], '__doc__', None)
    assert '% mixer hydra of cvt_hydra_13: no arXiv paper in the docstring of' in cite(['cvt_hydra_13'])


def test_an_unknown_model_is_refused(capsys):
    with pytest.raises(SystemExit) as end:
        main(['cvt_14'])
    assert end.value.code == 2
    assert "unknown model 'cvt_14'" in capsys.readouterr().err


def test_the_table_has_the_papers_of_every_backbone_and_mixer_of_vitzoo_and_no_others():
    modules = {mixer_class(name).__module__ for name in vitzoo.list_mixers()}
    # converted models have the papers of their base
    modules |= {timm.model_entrypoint(name).__module__ for name in OWN} - {'vitzoo.models.converted'}
    first = {module: re.search(r'arxiv\.org/abs/([\d.]+)', sys.modules[module].__doc__) for module in modules}
    cited = {match[1] for module, match in first.items() if module.startswith('vitzoo.')}
    data = {'1409.0575', 'deng2009imagenet', 'krizhevsky2009cifar', 'wightman2019timm'}
    assert set(PAPERS) == cited | data, 'add the paper to vitzoo/papers.bib and run `make docs`'


@pytest.mark.parametrize('paper', PAPERS.values(), ids=[paper.key for paper in PAPERS.values()])
def test_an_entry_is_complete(paper):
    assert {'title', 'author', 'year'} <= set(paper.fields)
    assert re.fullmatch(r'\d{4}', paper.fields['year']) and paper.fields['year'] in paper.key
    assert all(name.count(', ') == 1 for name in paper.fields['author'].split(' and '))
    assert paper.bibtex.count('{') == paper.bibtex.count('}') and paper.bibtex.endswith(',\n}')
    own = re.match(r'@\w+\{\w+,\n', paper.bibtex)[0]
    assert own + ''.join(f'  {key} = {{{value}}},\n' for key, value in paper.fields.items()) + '}' == paper.bibtex


def test_keys_are_unique():
    assert len({paper.key for paper in PAPERS.values()}) == len(PAPERS)


def test_weights_name_the_papers_of_models_of_vitzoo():
    ids = [source for source, reason in find_papers('vil_ls_medium.nvidia_in1k') if reason.startswith('published')]
    assert ids == ['2107.02192']


def test_weights_that_began_with_those_of_their_own_name_end(tmp_path, monkeypatch):
    name = 'cvt_softmax_nano.vz_imagenette'
    save_for_hf(timm.create_model('cvt_softmax_nano', num_classes=10), tmp_path, safe_serialization=True)
    (tmp_path / 'recipe.yaml').write_text(f'{{model: {name}, pretrained: true, data_dir: imagenette}}')
    monkeypatch.setattr('vitzoo.about.shipped_folders', lambda: {name: tmp_path})
    assert [source for source, reason in find_papers(name) if reason.startswith('training data')] == ['1409.0575']


def test_the_citation_file_is_current():
    assert docs_citation.FILE.read_text(encoding='utf-8') == docs_citation.render(), 'run `make docs`'
