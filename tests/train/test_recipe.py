"""Recipes: precedence, types and limits of values, and the files in configs/."""

import math
import re
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml
from toys import SHIPPED_RECIPES, read_metrics

import vitzoo
from vitzoo.errors import UserError
from vitzoo.options import find_config, read_yaml
from vitzoo.study.plan import read_study
from vitzoo.train.loop import train
from vitzoo.train.recipe import FIELDS, Recipe, make_recipe, read_recipe_file, save_recipe
from vitzoo.train.recipe_cli import load_recipe
from vitzoo.transfer.options import parse_args as parse_transfer_args


@pytest.fixture
def recipe_file(tmp_path):
    def write(text: str) -> str:
        (tmp_path / 'recipe.yaml').write_text(text)
        return str(tmp_path / 'recipe.yaml')

    return write


@pytest.mark.parametrize(
    ('file', 'arguments', 'epochs'),
    [
        ('', [], Recipe().epochs),
        ('epochs: 7', [], 7),
        ('epochs: 7', ['--epochs', '3'], 3),
        ('', ['--epochs', '3'], 3),
        ('epochs: null', [], Recipe().epochs),
        ('epochs:', ['--epochs=3'], 3),
    ],
)
def test_the_command_line_wins_over_the_file_and_the_file_over_the_default(recipe_file, file, arguments, epochs):
    assert load_recipe(['--config', recipe_file(file), *arguments]).epochs == epochs


@pytest.mark.parametrize('name', ['layer_decay', 'opt_betas', 'mixer', 'clip_grad', 'amp'])
def test_null_on_the_command_line_unsets_a_key_of_the_file(recipe_file, name):
    value = dict(layer_decay=0.5, opt_betas=[0.9, 0.99], mixer='ls', clip_grad=1, amp=True)[name]
    config = ['--config', recipe_file(f'{name}: {value}')]
    assert getattr(load_recipe(config), name) == value
    assert getattr(load_recipe([*config, f'--{name}', 'null']), name) is None


@pytest.mark.parametrize('words', [['--img-size', '64x96'], ['--img-size=64X96'], ['--img-size', '64', '96']])
def test_height_and_width_are_given_as_for_other_commands_or_as_two_words(words):
    assert load_recipe(words).img_size == [64, 96]


def test_height_and_width_are_given_in_a_file_as_on_the_command_line(recipe_file):
    assert load_recipe(['--config', recipe_file('img_size: 64x96')]).img_size == [64, 96]


@pytest.mark.parametrize('text', ['64x', '64x96x3', '32.5', '[32.5, 64]'])
def test_what_is_not_a_size_is_refused(text):
    with pytest.raises(UserError, match='img_size must'):
        load_recipe(['--img-size', text])


@pytest.mark.parametrize('spelling', [['--batch-size', '8'], ['--batch_size', '8'], ['--batch_size=8']])
def test_an_option_is_spelled_with_hyphens_or_underscores(spelling):
    assert load_recipe(spelling).batch_size == 8


@pytest.mark.parametrize(
    ('name', 'text', 'value'),
    [
        ('lr', '1e-3', 1e-3),
        ('lr', '1', 1.0),
        ('batch_size', '64', 64),
        ('seed', '1e3', 1000),
        ('amp', 'yes', True),
        ('amp', 'false', False),
        ('img_size', '64', 64),
        ('img_size', '[32, 64]', [32, 64]),
        ('color_jitter', '0.2', 0.2),
        ('color_jitter', '[0.1, 0.2, 1e-1]', [0.1, 0.2, 0.1]),
        ('scale', '[0.5, 1]', [0.5, 1]),
        ('decay_milestones', '30', [30]),
        ('model_kwargs', '{depth: 2, mixer_kwargs: {rank: 4}}', {'depth': 2, 'mixer_kwargs': {'rank': 4}}),
        ('albumentations', 'light', 'light'),
        ('albumentations', '[{Rotate: {limit: 10}}]', [{'Rotate': {'limit': 10}}]),
        ('output', '2024', '2024'),
        ('model_kwargs', '{tag: 2022-03-01}', {'tag': '2022-03-01'}),
    ],
)
def test_a_value_has_the_type_of_its_key(recipe_file, name, text, value):
    from_line = getattr(load_recipe([f'--{name}', text]), name)
    assert from_line == value
    assert type(from_line) is type(value)
    if name != 'output':
        assert getattr(load_recipe(['--config', recipe_file(f'{name}: {text}')]), name) == value


def test_a_key_that_is_there_twice_is_refused_and_merged_mappings_are_not(tmp_path):
    path = tmp_path / 'recipe.yaml'
    path.write_text('epochs: 3\nlr: 0.1\nepochs: 1\n')
    with pytest.raises(UserError, match=r"the key 'epochs' is there twice.*line 3"):
        read_recipe_file(str(path))
    path.write_text('a: &a {x: 1, y: 2}\nb: &b {<<: *a, y: 3}\nc: {<<: *b, y: 4}')
    assert read_yaml(path)['c'] == dict(x=1, y=4)


def test_words_are_numbers_where_yaml_would_read_others():
    words = ['--batch-size', '010', '--decay-milestones', '30', '--model-kwargs', 'drop_path_rate=1e-1', 'depth=08']
    recipe = load_recipe(words)
    assert (recipe.batch_size, recipe.decay_milestones) == (10, [30])
    assert recipe.model_kwargs == {'drop_path_rate': 0.1, 'depth': 8}


def test_options_take_several_words():
    words = ['--pretrained', '--scale', '0.5', '1', '--model-kwargs', 'depth=2', 'mixer_kwargs={rank: 4}']
    recipe = load_recipe(words)
    assert recipe.pretrained is True
    assert recipe.scale == [0.5, 1]
    assert recipe.model_kwargs == {'depth': 2, 'mixer_kwargs': {'rank': 4}}


@pytest.mark.parametrize(
    ('arguments', 'sentence'),
    [
        (['--bach-size', '8'], "unknown option '--bach-size', did you mean --batch-size"),
        (['stray'], "unknown option 'stray'"),
        (['--batch-size'], '--batch-size needs a value'),
        (['--batch-size', '1', '2'], '--batch-size takes one value, not 2'),
        (['--batch-size', 'many'], "batch_size must be a whole number, not 'many'"),
        (['--batch-size', '3.5'], "batch_size must be a whole number, not '3.5'"),
        (['--batch-size', '0'], 'batch_size must be at least 1, not 0'),
        (['--epochs', 'true'], "epochs must be a whole number, not 'true'"),
        (['--lr', 'nan'], "lr must be a number, not 'nan'"),
        (['--amp', 'perhaps'], "amp must be yes or no, not 'perhaps'"),
        (['--hflip', '2'], 'hflip must be from 0 to 1, not 2'),
        (['--scale', '0.5'], 'scale must have 2 items, not 1'),
        (['--scale', ''], "scale must be a list, not ''"),
        (['--seed', '9' * 400], 'seed must be a whole number'),
        (['--decay-milestones', '[{a: 1}]'], 'decay_milestones must be a list'),
        (['--scale', '1', '2', '3'], 'scale must have 2 items, not 3'),
        (['--aug', 'cv2'], "aug must be one of timm, albumentations, not 'cv2'"),
        (['--model-kwargs', 'deep'], "model_kwargs must be a mapping, not 'deep'"),
        (['--config', 'nowhere'], "there is no file 'nowhere'; the configs of the package are "),
        (['--config'], 'argument --config'),
    ],
)
def test_a_mistake_on_the_command_line_gets_one_sentence(arguments, sentence):
    with pytest.raises(UserError) as error:
        load_recipe(arguments)
    assert str(error.value).startswith(sentence)
    assert '\n' not in str(error.value)


@pytest.mark.parametrize(
    ('text', 'sentence'),
    [
        ('epoch: 3', "unknown key 'epoch' in the recipe .*, did you mean epochs"),
        ('learning_rate: 3', "unknown key 'learning_rate' in the recipe"),
        ('- epochs', 'must consist of keys and values'),
        ('epochs: [', 'is not YAML'),
        ('epochs: !!int x', 'has a value that does not fit its tag or prefix: invalid literal'),
        ('amp: !!bool x', "has a value that does not fit its tag or prefix: 'x'"),
        ('epochs: ten', "epochs must be a whole number, not 'ten'"),
    ],
)
def test_a_mistake_in_the_file_gets_one_sentence(recipe_file, text, sentence):
    with pytest.raises(UserError, match=sentence):
        load_recipe(['--config', recipe_file(text)])


def test_a_saved_recipe_replays_but_writes_elsewhere(tmp_path):
    recipe = make_recipe(
        dict(lr='3e-4', img_size=[32, 48], output='runs/a', resume='auto', albumentations=[{'Blur': {}}])
    )
    save_recipe(recipe, tmp_path / 'recipe.yaml', ['batch 8'])
    assert (tmp_path / 'recipe.yaml').read_text().startswith('# batch 8\nmodel: ')
    replayed = load_recipe(['--config', str(tmp_path / 'recipe.yaml')])
    assert asdict(replayed) == {**asdict(recipe), 'output': None, 'resume': None}


@pytest.mark.parametrize('name', ['a\nb: c', 'a\r', 'a\u2028b', '\x1b[1m'], ids=ascii)
def test_a_name_in_the_summary_of_a_recipe_may_have_any_characters(tmp_path, name):
    save_recipe(make_recipe(dict(epochs=7, data_dir=name)), tmp_path / 'recipe.yaml', [f'data   {name}: 3 images'])
    assert load_recipe(['--config', str(tmp_path / 'recipe.yaml')]) == make_recipe(dict(epochs=7, data_dir=name))


def test_help_groups_every_key(capsys):
    with pytest.raises(SystemExit):
        load_recipe(['--help'])
    titles = [line.removesuffix(':') for line in capsys.readouterr().out.splitlines() if line.endswith(':')]
    assert [title for title in titles if title != 'options'] == list(
        dict.fromkeys(field.metadata['group'] for field in FIELDS.values())
    )


def test_resuming_takes_the_recipe_of_the_run(tmp_path):
    save_recipe(make_recipe(dict(epochs=7, lr=0.5)), tmp_path / 'recipe.yaml', [])
    checkpoint = tmp_path / 'checkpoints' / 'step-00000003'
    checkpoint.mkdir(parents=True)
    (checkpoint / 'state.json').write_text('{}')
    for source in (tmp_path, checkpoint.parent, checkpoint):
        assert load_recipe(['--resume', str(source)]).epochs == 7
    assert load_recipe(['--resume', 'auto', '--output', str(tmp_path)]).epochs == 7
    recipe = load_recipe(['--resume', str(checkpoint), '--epochs', '9'])
    assert (recipe.epochs, recipe.lr) == (9, 0.5)


def test_help_explains_every_key(capsys):
    with pytest.raises(SystemExit) as exit:
        load_recipe(['--help'])
    assert exit.value.code == 0
    shown = capsys.readouterr().out
    assert [name for name in FIELDS if f'--{name.replace("_", "-")} ' not in shown] == []


@pytest.mark.parametrize(
    ('name', 'path'),
    [
        ('finetune.yaml', 'finetune.yaml'),
        ('configs/finetune.yaml', 'finetune.yaml'),
        ('imagenet/cvt.yaml', 'imagenet/cvt.yaml'),
    ],
)
def test_a_config_of_the_package_is_found_by_its_name(name, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_config(name) == Path(vitzoo.__file__).parents[1] / 'configs' / path
    # a file of the user has precedence
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).touch()
    assert find_config(name) == Path(name)


def test_other_files_of_the_package_are_not_configs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r'papers.bib.; the configs of the package are .*, finetune.yaml, '):
        find_config('../papers.bib')


@pytest.mark.parametrize(
    ('command', 'mistyped', 'meant'),
    [
        ('train', 'finetun.yaml', 'finetune.yaml'),
        ('transfer', 'transfr/gpu.yaml', 'transfer/gpu.yaml'),
        ('study', 'imagenete.yaml', 'study/imagenette.yaml'),
    ],
)
def test_a_mistyped_config_gets_suggestions_from_those_of_its_command(command, mistyped, meant):
    read = dict(
        train=lambda path: load_recipe(['--config', path]),
        transfer=lambda path: parse_transfer_args(['teacher', '--config', path]),
        study=read_study,
    )
    with pytest.raises(UserError, match=f"no file '{mistyped}', did you mean {meant}") as caught:
        read[command](mistyped)
    listed = re.findall(r'[\w/]+\.yaml', str(caught.value).partition('the configs of the package are ')[2])
    folders = {name.partition('/')[0] for name in listed}
    assert folders == {command} if command != 'train' else {'study', 'transfer'}.isdisjoint(folders)


def test_there_are_recipes_for_every_backbone():
    names = {path.name for path in SHIPPED_RECIPES}
    assert names >= {'quickstart.yaml', 'finetune.yaml', 'deit.yaml', 'cvt.yaml', 'vil.yaml', 'aft.yaml'}


@pytest.mark.parametrize('path', SHIPPED_RECIPES, ids=lambda path: path.stem)
def test_every_shipped_recipe_is_valid(path):
    recipe = load_recipe(['--config', str(path)])
    written = read_recipe_file(path)
    assert {name: value for name, value in asdict(recipe).items() if name in written} == {
        name: asdict(make_recipe({name: value}))[name] for name, value in written.items()
    }


@pytest.mark.parametrize(
    'path', [path for path in SHIPPED_RECIPES if path.parent.name == 'imagenet'], ids=lambda path: path.stem
)
def test_the_header_of_a_paper_recipe_is_complete(path):
    comment = [line for line in path.read_text().splitlines() if line.startswith('#')]
    header = '\n'.join(comment)
    for word in ('Paper', 'arxiv.org', 'Command', 'accelerate launch', 'Hardware', 'Expected', 'Differences'):
        assert word in header
    assert yaml.safe_load(path.read_text())['batch_size'] >= 1024


@pytest.mark.usefixtures('fresh_accelerate')
@pytest.mark.parametrize(
    'config',
    [
        # large models
        pytest.param(
            path, marks=[pytest.mark.slow] * (path.parent.name == 'imagenet' or '13' in path.stem), id=path.stem
        )
        for path in SHIPPED_RECIPES
    ],
)
def test_every_shipped_recipe_starts(config, images, tmp_path):
    # everything but data, size and schedule is as in the file; 40 images in batches of 20 make two steps
    size = ['--img-size', '32', '--batch-size', '20', '--epochs', '1', '--workers', '0']
    scores = train(['--config', str(config), '--data-dir', images, '--output', str(tmp_path / 'run'), *size])
    assert scores['n'] == 11 and math.isfinite(scores['loss'])
    assert [row['step'] for row in read_metrics(tmp_path / 'run')] == ['2']
