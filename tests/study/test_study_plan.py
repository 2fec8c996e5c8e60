"""The file of a study: its cells, and wrong values."""

from pathlib import Path

import pytest
import timm
import torch
import yaml
from studies import STUDY, write_study
from timm.layers import to_2tuple

from vitzoo.errors import UserError
from vitzoo.mixers import list_mixers
from vitzoo.options import to_words
from vitzoo.study.plan import _OWN_TRANSFER_KEYS, read_study
from vitzoo.transfer.options import config_keys, parse_args

CONFIGS = sorted((Path(__file__).parents[2] / 'configs' / 'study').glob('*.yaml'))


def test_the_cells_of_the_first_seed_come_first(tmp_path):
    study = read_study(write_study(tmp_path, seeds=[3, 5]))
    names = [cell.name for cell in study.cells]
    assert names == [
        f'{name}/seed-{seed}'
        for seed in (3, 5)
        for name in (
            'scratch/deit_softmax_nano',
            'scratch/deit_ls_nano',
            'teacher/vit_tiny_patch16_224',
            'converted/vit_tiny_patch16_224_to_ls',
            'converted/vit_tiny_patch16_224_to_performer',
        )
    ]
    converted = study.cells[-1]
    assert converted.teacher is study.cells[-3] and converted.teacher.seed == converted.seed == 5
    assert converted.folder == tmp_path / 'out' / names[-1]


def test_options_override_the_recipe_and_the_cell_chooses_model_and_seed(tmp_path):
    recipe = tmp_path / 'recipe.yaml'
    recipe.write_text('model: cvt_13\nseed: 42\nepochs: 9\nlr: 1.0e-4\ndata_dir: elsewhere')
    ways = dict(scratch=dict(train=dict(config=str(recipe), epochs=4)))
    cell = read_study(write_study(tmp_path, ways=ways)).cells[0]
    assert cell.options == dict(model='deit_softmax_nano', seed=0, epochs=4, lr=1e-4, data_dir='sample')


def test_options_override_the_file_of_a_transfer_and_the_cell_chooses_mixer_and_seed(tmp_path):
    options = tmp_path / 'transfer.yaml'
    options.write_text('mixer: xca\nseed: 42\nsteps: 9\nnetwork_steps: 5\ndata_dir: elsewhere')
    ways = dict(STUDY['ways'])
    ways['converted'] = dict(ways['converted'], transfer=dict(config=str(options), steps=4))
    cell = read_study(write_study(tmp_path, ways=ways, seeds=[2])).cells[-1]
    assert cell.options == dict(steps=4, network_steps=5, data_dir='sample', mixer='performer', seed=2)


def test_options_whose_data_is_null_have_that_of_the_study(tmp_path):
    empty = dict(data_dir=None)
    ways = dict(
        scratch=dict(train=dict(data_dir='elsewhere'), overrides={'*_ls_*': empty}),
        teacher=dict(train=empty, models='vit_tiny_patch16_224'),
        converted=dict(transfer=empty, teacher='vit_tiny_patch16_224', teacher_way='teacher', mixers='ls'),
    )
    study = read_study(write_study(tmp_path, data_dir='photos', seeds=0, ways=ways, evaluations=dict(clean=empty)))
    assert [cell.options['data_dir'] for cell in study.cells] == ['elsewhere', 'photos', 'photos', 'photos']
    assert {cell.evaluations['clean']['data_dir'] for cell in study.cells} == {'photos'}


def test_a_wildcard_stands_for_all_its_models(tmp_path):
    study = read_study(
        write_study(tmp_path, models=['deit_l*_nano'], baseline='deit_ls_nano', ways=dict(a=dict(train={})))
    )
    assert {cell.model for cell in study.cells} == {
        f'deit_{name}_nano' for name in ('linear', 'linformer', 'local', 'longformer', 'ls')
    }


def test_a_wildcard_stands_for_all_mixers_but_softmax_after_those_that_are_named(tmp_path):
    ways = dict(STUDY['ways'])
    ways['converted'] = dict(ways['converted'], mixers=['ls', '*'])
    names = [cell.options['mixer'] for cell in read_study(write_study(tmp_path, ways=ways)).cells if cell.teacher]
    assert names[: len(list_mixers()) - 1] == ['ls', *(name for name in list_mixers() if name not in ('ls', 'softmax'))]


def test_a_converted_model_is_compared_with_its_teacher_and_others_with_the_baseline_of_their_way(tmp_path):
    study = read_study(write_study(tmp_path, baseline={'deit_*': 'deit_softmax_nano'}))
    baselines = {cell.model: study.baseline_of(cell) for cell in study.cells}
    assert baselines['deit_ls_nano'] == ('scratch', 'deit_softmax_nano')
    assert baselines['vit_tiny_patch16_224'] is None
    assert baselines['vit_tiny_patch16_224_to_ls'] == ('teacher', 'vit_tiny_patch16_224')


def with_mixer_kwargs(kwargs: dict | list) -> dict:
    return {**STUDY['ways'], 'converted': dict(STUDY['ways']['converted'], transfer=dict(mixer_kwargs=kwargs))}


@pytest.mark.parametrize(
    ('kwargs', 'ls', 'performer'),
    [
        ({'ls.window_size': 4}, {'ls.window_size': 4}, None),
        ({'ls.window_size': 4, 'qkv_bias': False}, {'ls.window_size': 4, 'qkv_bias': False}, {'qkv_bias': False}),
        (['performer.dwc=v', 'ls.rank=2'], ['ls.rank=2'], ['performer.dwc=v']),
        ({}, None, None),
    ],
)
def test_each_mixer_of_a_way_has_its_own_arguments(tmp_path, kwargs, ls, performer):
    cells = read_study(write_study(tmp_path, seeds=[0], ways=with_mixer_kwargs(kwargs))).cells
    found = {cell.options['mixer']: cell.options.get('mixer_kwargs') for cell in cells if cell.teacher}
    assert found == dict(ls=ls, performer=performer)


def test_overrides_change_the_options_of_single_models_and_the_last_that_matches_counts(tmp_path):
    ways = {name: dict(way) for name, way in STUDY['ways'].items()}
    ways['scratch']['overrides'] = {'*_ls_*': dict(lr=0.1, epochs=9), '*_nano': dict(lr=0.2)}
    ways['converted']['overrides'] = {'perf*': dict(steps=3)}
    cells = {cell.model: cell for cell in read_study(write_study(tmp_path, seeds=[0], ways=ways)).cells}
    softmax, ls = (cells[f'deit_{name}_nano'] for name in ('softmax', 'ls'))
    assert (ls.options['lr'], ls.options['epochs'], softmax.options['lr']) == (0.2, 9, 0.2)
    assert softmax.options['epochs'] == STUDY['ways']['scratch']['train']['epochs']
    students = [cells[f'vit_tiny_patch16_224_to_{mixer}'] for mixer in ('ls', 'performer')]
    assert [cell.overrides for cell in students] == [{}, dict(steps=3)]
    ways['scratch'] = dict(
        train=dict(model_kwargs=dict(img_size=64)), overrides={'*_ls_*': dict(model_kwargs=dict(drop_rate=0.1))}
    )
    cells = {cell.model: cell for cell in read_study(write_study(tmp_path, seeds=[0], ways=ways)).cells}
    assert cells['deit_ls_nano'].options['model_kwargs'] == dict(img_size=64, drop_rate=0.1)


def test_the_options_of_overrides_are_part_of_the_recipe(tmp_path):
    ways = {name: dict(way) for name, way in STUDY['ways'].items()}
    ways['scratch']['overrides'] = {'*_ls_*': dict(epochs=9)}
    ls = next(cell for cell in read_study(write_study(tmp_path, ways=ways)).cells if cell.model == 'deit_ls_nano')
    # so that a cell computed with others is not taken for this one
    assert ls.record.expected['train']['epochs'] == 9


def with_way(**way) -> dict:
    return dict(ways={**STUDY['ways'], 'other': way})


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        (dict(seed=[1]), "unknown key 'seed', did you mean seeds"),
        (dict(seeds=[0, 0]), 'seeds has a number twice'),
        (dict(seeds=['a']), "whole numbers of 0 or more, not a"),
        (dict(output=['a']), r"output must be text, not \['a'\]"),
        (dict(data_dir=True), 'data_dir must be text, not True'),
        (dict(models=['deit_lss_nano']), "unknown model 'deit_lss_nano', did you mean"),
        (dict(models=[3]), 'models must be a name or a list of names'),
        (dict(baseline='cvt_nano'), "'cvt_nano' is not a model of this study"),
        (dict(baseline={'cvt_*': 'deit_ls_nano'}), "no model of this study matches 'cvt_"),
        (dict(baseline=['deit_ls_nano']), r"baseline must be the name of a model.*not \['deit_ls_nano'\]"),
        (dict(evaluations=None), 'has no evaluations'),
        (dict(evaluations=dict(clean=dict(corupt=True))), "unknown option 'corupt', did you mean corrupt"),
        (dict(evaluations=dict(clean=dict(measures=['cosin']))), "evaluations.clean: .*'cosin' is not one of"),
        (dict(evaluations=dict(clean=dict(plot='a.png'))), "'plot' cannot be given here"),
        (dict(evaluations=dict(train={})), "'train' is the name of a command"),
        (dict(evaluations={'a/b': {}}), "the name 'a/b' must consist of"),
        (with_way(train=dict(epoch=2)), "ways.other.train: unknown recipe key 'epoch', did you mean epochs"),
        (with_way(train=dict(epochs=0)), 'ways.other.train: epochs must be at least 1'),
        (with_way(train=dict(img_size=-1)), 'ways.other.train: img_size must be at least 1, not -1'),
        (with_way(train=dict(config=['a.yaml'])), r"config must be the name of a file, not \['a.yaml'\]"),
        (with_way(train=dict(seed=1)), "ways.other.train: 'seed' cannot be given here"),
        (with_way(train={}, overrides={'cvt_*': dict(lr=1)}), "ways.other.overrides: 'cvt_.*' matches none of"),
        (with_way(train={}, overrides={'*': dict(seed=1)}), "ways.other.overrides.*: 'seed' cannot be given here"),
        (with_way(train={}, overrides={'*': dict(rate=1)}), "train with its overrides: unknown recipe key 'rate'"),
        (with_way(train={}, overrides=['amp']), 'ways.other.overrides must consist of names and values'),
        (with_way(train={}, evaluations=['clear']), "'clear' is not an evaluation of this study, did you mean clean"),
        (with_way(), 'add train: or transfer:'),
        (with_way(transfer={}, teacher='deit_ls_nano'), 'ways.other has no teacher_way'),
        (with_way(transfer={}, teacher='cvt_13', teacher_way='scratch', mixers='ls'), "the teacher 'cvt_13'"),
        (
            with_way(transfer={}, teacher='vit_tiny_patch16_224', teacher_way='teacher', mixers='y*'),
            r"no mixer matches 'y\*'",
        ),
        (
            with_way(transfer={}, teacher='vit_tiny_patch16_224', teacher_way='teacher', mixers=['perfomer']),
            "ways.other.mixers: unknown mixer 'perfomer', did you mean performer",
        ),
        (
            dict(ways=with_mixer_kwargs({'window_size': 4})),
            "ways.converted.transfer: --mixer-kwargs: performer does not take the argument 'window_size'",
        ),
        (dict(ways=with_mixer_kwargs({'lss.rank': 2})), "mixer-kwargs lss.rank: 'lss' is not one of the mixers ls"),
        (
            with_way(transfer=dict(steps=-1), teacher='vit_tiny_patch16_224', teacher_way='teacher', mixers='ls'),
            "ways.other.transfer: .*'-1' is not",
        ),
        *(
            (
                with_way(transfer={key: value}, teacher='vit_tiny_patch16_224', teacher_way='teacher', mixers='ls'),
                f"ways.other.transfer: unknown option '{key}'",
            )
            for key, value in (('random_control', False), ('training', None), ('data_options', None))
        ),
        *(
            (
                with_way(transfer={key: value}, teacher='vit_tiny_patch16_224', teacher_way='teacher', mixers='ls'),
                f"ways.other.transfer: '{key}' cannot be given here",
            )
            for key, value in (('num_classes', 3), ('checkpoint', 'own.pth'))
        ),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence(tmp_path, changes, message):
    with pytest.raises(UserError, match=message) as caught:
        read_study(write_study(tmp_path, **changes))
    assert '\n' not in str(caught.value)


def test_the_transfer_of_a_cell_takes_every_key_that_a_study_may_give_it(tmp_path):
    ways = {name: dict(way) for name, way in STUDY['ways'].items()}
    given = dict.fromkeys(config_keys() - {*_OWN_TRANSFER_KEYS}) | dict(data_dir='elsewhere')
    assert {'no_random_control', 'split', 'model_ema', 'log_with', 'sizes'} <= given.keys()
    ways['converted']['transfer'] = given
    cell = read_study(write_study(tmp_path, ways=ways)).cells[-1]
    options = tmp_path / 'options.yaml'
    options.write_text(yaml.safe_dump(cell.options))
    assert parse_args(['teacher', '--output', 'student', '--config', str(options)]).mixers == ['performer']


def test_a_file_that_is_not_a_mapping_is_refused(tmp_path):
    path = tmp_path / 'study.yaml'
    with pytest.raises(UserError, match='there is no file'):
        read_study(str(path))
    path.write_text('- models')
    with pytest.raises(UserError, match='must consist of names and values'):
        read_study(str(path))


def test_options_become_the_words_of_a_command_line():
    options = dict(img_size=96, measures=['a', 'b'], corrupt=True, health=False, device=None, workers=0)
    options |= dict(mixer_kwargs=dict(rank=2))
    assert to_words(options) == [
        *('--img-size', '96', '--measures', 'a', 'b', '--corrupt', '--workers', '0', '--mixer-kwargs', 'rank=2')
    ]
    assert to_words(dict(measures=['a', 'b'], img_size=[32, 64]), ',') == ['--measures', 'a,b', '--img-size', '32x64']
    # as a recipe may have it
    assert to_words(dict(img_size=[32, 64])) == ['--img-size', '32x64']


def test_a_way_chooses_its_evaluations(tmp_path):
    ways = {**STUDY['ways'], 'scratch': dict(train=dict(epochs=3), evaluations='corrupt')}
    study = read_study(write_study(tmp_path, ways=ways))
    assert {cell.way: list(cell.evaluations) for cell in study.cells} == dict(
        scratch=['corrupt'], teacher=['clean', 'corrupt'], converted=['clean', 'corrupt']
    )
    assert study.evaluations_of('scratch') == ['corrupt']


@pytest.mark.parametrize('path', CONFIGS, ids=lambda path: path.stem)
def test_the_shipped_studies_are_valid(path):
    study = read_study(str(path))
    assert all(study.baseline_of(cell) for cell in study.cells if cell.way != 'teacher')


@pytest.mark.slow
@pytest.mark.parametrize('way', ['image_strip', 'image_grid'])
def test_every_kind_of_attention_of_the_long_range_study_takes_a_strip_and_a_grid(way):
    (path,) = (path for path in CONFIGS if path.stem == 'long_range')
    cells = [cell for cell in read_study(str(path)).cells if (cell.way, cell.seed) == (way, 0)]
    assert len(cells) == 11
    for cell in cells:
        size = to_2tuple(cell.options['img_size'])
        kwargs = dict(num_classes=10, img_size=size, in_chans=1, **cell.options['model_kwargs'])
        model = timm.create_model(cell.model, **kwargs)
        assert model.patch_embed.grid_size == tuple(size)
        model(torch.randn(2, 1, *size)).square().mean().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_a_date_is_the_name_that_was_written(tmp_path):
    path = Path(write_study(tmp_path, evaluations=dict(clean=dict(data_subset='SUBSET'))))
    path.write_text(path.read_text().replace('SUBSET', '2022-03-01'))
    cell = read_study(str(path)).cells[0]
    assert cell.record.expected['clean']['data_subset'] == '2022-03-01'


@pytest.mark.parametrize(('size', 'word'), [([96, 128], '96x128'), ('96x128', '96x128'), (96, 96)])
def test_the_image_size_of_an_evaluation_may_be_a_list(tmp_path, size, word):
    cell = read_study(write_study(tmp_path, evaluations=dict(clean=dict(img_size=size)))).cells[0]
    assert cell.evaluations['clean']['img_size'] == word


def test_the_first_wildcard_that_matches_chooses_the_baseline(tmp_path):
    baselines = {'deit_ls_*': 'vit_tiny_patch16_224', 'deit_*': 'deit_softmax_nano'}
    study = read_study(write_study(tmp_path, baseline=baselines))
    found = {cell.model: study.baseline_of(cell) for cell in study.cells}
    assert found['deit_ls_nano'] == ('scratch', 'vit_tiny_patch16_224')


def test_a_suite_is_refused_because_tables_have_no_columns_for_it(tmp_path):
    evaluations = dict(clean=dict(suite='robust', data_root='variants'))
    with pytest.raises(UserError, match='evaluations.clean: suite = robust cannot be part of a study; run vitzoo'):
        read_study(write_study(tmp_path, evaluations=evaluations))
