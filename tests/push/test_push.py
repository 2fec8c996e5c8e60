"""`vitzoo push`: folders of weights, model cards, and uploads to a stand-in for the hub."""

import json
import shutil
import sys
from itertools import chain, repeat
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import timm
import torch
import yaml
from safetensors.torch import load_file, save_file
from timm.models import _hub as timm_hub
from timm.models._registry import _clear_model_entries, _model_entrypoints
from tiny import DEIT, make_data, make_model

from vitzoo.about import read_about
from vitzoo.data import open_dataset
from vitzoo.data.held_out import Subset, write_held_out
from vitzoo.errors import UserError
from vitzoo.export.command import describe_export
from vitzoo.load import fit_data_config, load_model
from vitzoo.models import _shipped
from vitzoo.models._register import cfg, register_variants
from vitzoo.models.deit import DeiT, checkpoint_filter_fn
from vitzoo.predict import predict
from vitzoo.push import command
from vitzoo.push.card import RunFacts, make_card, read_facts
from vitzoo.push.command import push
from vitzoo.push.folder import halve, read_recipe, without_paths
from vitzoo.transfer.options import parse_args
from vitzoo.validate import evaluation
from vitzoo.validate.evaluation import validate_model
from vitzoo.validate.options import EvalOptions

LICENSE = 'ImageNet terms, non-commercial research'


@pytest.fixture(scope='module')
def run(tmp_path_factory) -> Path:
    """A run folder, with the data that it was trained on next to it."""
    root = tmp_path_factory.mktemp('push')
    data = make_data('folder', root)
    folder = make_model('deit_performer', ('blue', 'green', 'red'), 3, False, root / 'run')
    config = json.loads((folder / 'config.json').read_text())
    config['vitzoo']['data_dir'] = data
    (folder / 'config.json').write_text(json.dumps(config))
    recipe = dict(model='deit_performer_tiny', data_dir=data, epochs=2, batch_size=14, kd_model_name='~/teachers/a')
    (folder / 'recipe.yaml').write_text(f'# model  {data}\n{yaml.safe_dump(recipe)}')
    (folder / 'metrics.csv').write_text('epoch,step,images_per_second\n1,2,14.0\n2,4,28.0\n')
    return folder


@pytest.fixture(autouse=True)
def no_speeds(monkeypatch):
    """Cards have no speeds, and measuring them takes a second."""
    monkeypatch.setattr(evaluation, 'measure_throughput', lambda model, images: None)


@pytest.fixture
def hub(tmp_path, monkeypatch) -> SimpleNamespace:
    """A stand-in for the hub, whose repositories are folders."""
    state = SimpleNamespace(folder=tmp_path / 'hub', created=[], fail=None)

    class Api:
        def __init__(self, **kwargs):
            pass

        def create_repo(self, repo_id, **kwargs):
            if state.fail:
                raise state.fail
            state.created.append((repo_id, kwargs['private']))
            return SimpleNamespace(repo_id=repo_id)

        def file_exists(self, repo_id, filename, **kwargs):
            return (state.folder / filename).exists()

        def upload_folder(self, folder_path, **kwargs):
            shutil.copytree(folder_path, state.folder, dirs_exist_ok=True)

        def upload_file(self, path_or_fileobj, path_in_repo, repo_id):
            (state.folder / path_in_repo).write_bytes(path_or_fileobj)

    monkeypatch.setattr(timm_hub, 'HfApi', Api)
    monkeypatch.setattr(command, 'HfApi', Api)
    monkeypatch.setattr(timm_hub, 'hf_hub_download', lambda repo_id, filename, **kwargs: str(state.folder / filename))
    return state


def arguments(run: Path, target: str, *others: str) -> list[str]:
    return [str(run), '--to', target, '--license', LICENSE, '--workers', '0', *others]


@pytest.mark.parametrize('half', [(), ('--half',)], ids=['single', 'half'])
def test_a_pushed_run_loads_from_the_hub_with_its_card(run, hub, half):
    hub.folder.mkdir()
    (hub.folder / 'README.md').write_text('an older card')
    push(arguments(run, 'hf-hub:me/photos', '--private', *half))
    assert hub.created == [('me/photos', True)]
    for tensor in load_file(hub.folder / 'model.safetensors').values():
        assert tensor.dtype == (torch.float16 if half and tensor.ndim > 1 else torch.float32)
    model = timm.create_model('hf-hub:me/photos', pretrained=True).eval()
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    expected = load_model(str(run)).model(images)
    torch.testing.assert_close(model(images), expected, rtol=0, atol=2e-2 if half else 0)
    assert model.pretrained_cfg['label_names'] == ['blue', 'green', 'red']
    card = (hub.folder / 'README.md').read_text()
    header = yaml.safe_load(card.split('---')[1])
    assert (header['license'], header['license_name']) == ('other', 'imagenet-terms-non-commercial-research')
    assert "timm.create_model('hf-hub:me/photos', pretrained=True)" in card
    assert 'over 9 validation images' in card and f'{LICENSE}\n' in card
    assert ('half precision' if half else 'single precision') in card
    # no path of this machine
    assert str(run.parent) not in card + (hub.folder / 'config.json').read_text()


def test_the_numbers_of_a_card_have_intervals(run, tmp_path):
    record = dict(top1=50.0, top5=100.0, map=None, n=100, params=2_000_000, gmacs=0.5, img_size=32)
    facts = RunFacts('train', 1.5, {('clean', 'top1'): [50.0, 52.0, 54.0], ('corrupt', 'corrupt_top1'): [30.0, 31.0]})
    config = json.loads((run / 'config.json').read_text())
    config['pretrained_cfg']['license'] = 'cc-by-4.0'
    folder = tmp_path / 'deit.tag'
    shutil.copytree(run, folder)
    (folder / 'config.json').write_text(json.dumps(config))
    card = make_card(folder.name, folder, record, facts)
    assert card['license'] == 'cc-by-4.0' and 'license_name' not in card
    # Wilson's interval of 50 of 100
    assert card['details']['Accuracy'][0].startswith('Top-1 50.00 %, 95 % interval 40.38 to 59.62')
    assert card['details']['Several seeds'] == [
        'Top-1, clean: 52.00 ± 4.97 % over 3 seeds (95 % interval, Student t)',
        'Corrupted top-1, corrupt: 30.50 ± 6.35 % over 2 seeds (95 % interval, Student t)',
    ]
    assert card['details']['Training'].startswith('1.50 hours, `vitzoo train --config recipe.yaml')
    assert any('2009.14794' in bibtex for bibtex in card['citation'])


def test_the_intervals_of_data_with_several_labels_are_of_the_images_with_a_label(run, tmp_path):
    folder = shutil.copytree(run, tmp_path / 'deit.tag')
    config = json.loads((folder / 'config.json').read_text())
    config['pretrained_cfg']['license'] = 'cc-by-4.0'
    (folder / 'config.json').write_text(json.dumps(config))
    record = dict(top1=50.0, map=40.0, n=900, labelled=100, params=2_000_000, gmacs=0.5, img_size=32)
    top1, average = make_card(folder.name, folder, record, RunFacts('train', 1.5))['details']['Accuracy']
    assert top1.endswith('95 % interval 40.38 to 59.62 (Wilson) over 100 validation images with a label')
    assert average == 'mAP 40.00 % on 900 validation images'


def test_half_says_that_it_keeps_weights_that_are_as_small(run, tmp_path, capsys, hub):
    folder = shutil.copytree(run, tmp_path / 'run')
    weights = {name: x.bfloat16() for name, x in load_file(run / 'model.safetensors').items()}
    save_file(weights, folder / 'model.safetensors')
    push(arguments(folder, 'hf-hub:me/photos', '--half'))
    assert 'kept bfloat16, which is as small' in capsys.readouterr().out
    assert '**Weights:** bfloat16' in (hub.folder / 'README.md').read_text()


def test_the_facts_of_a_run_come_from_its_files(run, tmp_path, monkeypatch):
    # 28 images at 14 and 28 images at 28 per second
    assert read_facts(run).hours == pytest.approx(3 / 3600)
    cells = tmp_path / 'scratch' / 'deit'
    for seed, top1 in enumerate([50.0, 51.0]):
        evaluations = cells / f'seed-{seed}' / 'evaluations'
        evaluations.mkdir(parents=True)
        (evaluations / 'clean.json').write_text(json.dumps([dict(model='deit', top1=top1, top5=99.0, map=None)]))
        cell = dict(started={}, finished=dict(train=dict(settings={}, seconds=1800)), failure=None)
        (cells / f'seed-{seed}' / 'cell.json').write_text(json.dumps(cell))
        shutil.copyfile(run / 'recipe.yaml', cells / f'seed-{seed}' / 'recipe.yaml')
    facts = read_facts(cells / 'seed-0')
    assert (facts.command, facts.hours) == ('train', 0.5)
    assert facts.seeds == {('clean', 'top1'): [50.0, 51.0], ('clean', 'top5'): [99.0, 99.0]}
    monkeypatch.chdir(cells / 'seed-0')
    assert read_facts(Path('.')) == facts
    # the evaluations are those of the last epoch
    Path('best').mkdir()
    assert read_facts(Path('best')) == RunFacts('train', 0.5)


def test_the_training_time_is_that_of_the_images_of_a_reduced_batch(run, tmp_path):
    folder = shutil.copytree(run, tmp_path / 'run')
    shutil.copytree(run, folder / 'best')
    (folder / 'best' / 'metrics.csv').unlink()
    # one step per epoch, with fewer images than the 14 of the recipe
    (folder / 'metrics.csv').write_text('epoch,step,images_per_second\n1,1,6.0\n2,2,12.0\n')
    assert read_facts(folder).hours is None
    state = folder / 'checkpoints' / 'step-00000002' / 'state.json'
    state.parent.mkdir(parents=True)
    state.write_text(json.dumps(dict(data=dict(images_per_step=12))))
    for part in (folder, folder / 'best'):
        assert read_facts(part).hours == pytest.approx(3 / 3600)


def test_the_options_of_a_transfer_are_those_that_it_had(tmp_path):
    words = ['teacher', '--mixer', 'ls', '--data-dir', 'photos', '--output', 'out', '--img-size', '64x96']
    words += ['--mixer-kwargs', 'rank=2', '--steps', '3', '--no-random-control', '--val-split', 'test']
    options = parse_args(words)
    settings = options.settings | dict(mixer='ls', mixer_kwargs=dict(rank=2), training_images=9, validation_images=3)
    results = dict(settings=settings, seconds=dict(matching=1800, network=5400))
    (tmp_path / 'transfer.json').write_text(json.dumps(results))
    recipe = tmp_path / 'recipe.yaml'
    recipe.write_text(yaml.safe_dump(read_recipe(tmp_path)))
    assert parse_args(['teacher', '--output', 'out', '--config', str(recipe)]) == options
    recipe.unlink()
    assert read_facts(tmp_path) == RunFacts('transfer', 2.0)


def test_a_pushed_transfer_is_not_taken_for_a_training_when_it_is_pushed_again(run, tmp_path, hub):
    folder = tmp_path / 'to_linformer'
    shutil.copytree(run, folder)
    (folder / 'recipe.yaml').write_text('data_dir: photos\nsteps: 3\nbatch_size: 64\nmixer: linformer\n')
    (folder / 'metrics.csv').write_text('stage,step,output_error,best\nmatching,0,0.5,True\n')
    assert read_facts(folder) == RunFacts('transfer', None)
    push(arguments(folder, 'hf-hub:me/photos'))
    card = (hub.folder / 'README.md').read_text()
    assert '`vitzoo transfer TEACHER --config recipe.yaml' in card and 'steps: 3' in card
    assert 'vitzoo train' not in card


def test_a_pushed_conversion_is_not_taken_for_a_training_when_it_is_pushed_again(run, tmp_path, monkeypatch, capsys):
    folder = swapped_run(run, tmp_path)
    for tag in ('first', 'second'):
        target = tmp_path / 'weights' / f'test_vit_to_aft_full.{tag}'
        push(arguments(folder, str(target), '--data-dir', str(run.parent / 'source')))
        # elsewhere than in this checkout, no name stands for it
        assert f"timm.create_model('local-dir:{target}', pretrained=True) loads it" in capsys.readouterr().out
        card = (target / 'README.md').read_text()
        assert 'vitzoo train' not in card and 'Recipe' not in card
        # nor does the card have a path of this machine
        usage = card.split('```python\n')[1].split('```')[0]
        assert usage.endswith(f"model = timm.create_model('local-dir:{target.name}', pretrained=True)\n")
        with monkeypatch.context() as patch:
            patch.chdir(target.parent)
            exec(usage, {})
        assert not (target / 'recipe.yaml').exists()
        # as earlier versions wrote it
        (target / 'recipe.yaml').write_text('{}\n')
        folder = target


def test_a_run_without_speeds_has_no_training_time(run, tmp_path):
    # a speed of zero has been rounded
    speeds = ('', '0.0')
    texts = ['epoch,step,top1\n1,2,50.0\n', *(f'epoch,step,images_per_second\n1,2,{speed}\n' for speed in speeds)]
    for number, text in enumerate(texts):
        folder = tmp_path / str(number)
        shutil.copytree(run, folder)
        (folder / 'metrics.csv').write_text(text)
        assert read_facts(folder) == RunFacts('train', None)


def held_out_of(run: Path, folder: Path) -> tuple[Path, str]:
    """A copy of a run that held 2 images out of data that is not divided, and the data."""
    shutil.copytree(run, folder)
    data = str(run.parent / 'source' / 'val')
    reader = open_dataset(data, 'val').reader
    write_held_out(folder / 'held_out.csv', Subset(reader, [0, 1]))
    config = json.loads((folder / 'config.json').read_text())
    config['vitzoo'] |= dict(data_dir=data, multi_label=False)
    (folder / 'config.json').write_text(json.dumps(config))
    return folder, data


@pytest.mark.parametrize('part', ['.', 'best'])
def test_half_is_compared_on_the_images_that_the_run_held_out(part, run, hub, tmp_path):
    folder, _ = held_out_of(run, tmp_path / 'run')
    shutil.copytree(run, folder / 'best')
    shutil.copyfile(folder / 'config.json', folder / 'best' / 'config.json')
    push(arguments(folder / part, 'hf-hub:me/photos', '--half'))
    card = (hub.folder / 'README.md').read_text()
    assert 'over 2 validation images' in card and 'half precision' in card


def test_accuracies_on_different_images_are_not_compared(run, monkeypatch, hub):
    records = iter(dict(top1=50.0, top5=100.0, map=None, images=images) for images in 'ab')
    monkeypatch.setattr(command, 'validate_model', lambda name, options: next(records))
    with pytest.raises(UserError, match='have changed between two evaluations; push the run again'):
        push(arguments(run, 'hf-hub:me/photos', '--half'))


def count_images(name: str, data: str, **options) -> int:
    options |= dict(data_dir=data, device=torch.device('cpu'), amp_dtype='float32', batch_size=4, workers=0)
    return validate_model(name, EvalOptions(**options))['n']


def test_a_run_on_the_hub_is_validated_on_the_images_that_it_held_out(run, hub, tmp_path, monkeypatch):
    folder, data = held_out_of(run, tmp_path / 'run')
    push(arguments(folder, 'hf-hub:me/photos'))
    assert read_about('hf-hub:me/photos')['held_out'] == hub.folder / 'held_out.csv'
    for name in (str(folder), 'hf-hub:me/photos'):
        assert count_images(name, data) == 2
    # weights in a folder of training are those of its run; the images of others are unknown
    checkpoint = folder / 'model.safetensors'
    assert count_images('hf-hub:me/photos', data, checkpoint=str(checkpoint)) == 2
    other = shutil.copyfile(checkpoint, tmp_path / 'other.safetensors')
    assert count_images('hf-hub:me/photos', data, checkpoint=str(other)) == 9
    (hub.folder / 'held_out.csv').unlink()
    assert 'held_out' not in read_about(str(hub.folder))

    def no_answer(*args, **kwargs):
        raise OSError('no answer')

    monkeypatch.setattr(timm_hub, 'hf_hub_download', no_answer)
    with pytest.raises(UserError, match='cannot fetch what hf-hub:me/photos knows of its data'):
        read_about('hf-hub:me/photos')


def test_a_multi_label_run_on_the_hub_is_predicted_and_exported_as_one(run, hub, tmp_path):
    folder = tmp_path / 'run'
    shutil.copytree(run, folder)
    data = str(run.parent / 'source')
    push(arguments(folder, 'hf-hub:me/photos'))
    config = json.loads((hub.folder / 'config.json').read_text())
    config['vitzoo']['multi_label'] = True
    (hub.folder / 'config.json').write_text(json.dumps(config))
    name, found = 'hf-hub:me/photos', {}
    for source in (name, str(hub.folder)):
        predict([f'{data}/val', '--model', source, '--out', str(tmp_path / 'found.json'), '--top-k', '3'])
        found[source] = json.loads((tmp_path / 'found.json').read_text())
    assert found[name] == found[str(hub.folder)]
    sums = [sum(best['probability'] for best in record['predictions']) for record in found[name]]
    assert any(abs(total - 1) > 0.01 for total in sums)
    loaded = load_model(name)
    assert describe_export(loaded, fit_data_config(name, loaded.model))['multi_label']
    # other weights may be of another kind
    assert not read_about(name, 'checkpoint')


@pytest.fixture
def register(monkeypatch):
    """A function that registers deit_pushed_nano again, after weights were added."""
    name, module = 'deit_pushed_nano', ModuleType('vitzoo_pushed')
    monkeypatch.setitem(sys.modules, module.__name__, module)
    size = DEIT | dict(img_size=32)

    def register() -> None:
        if _model_entrypoints.pop(name, None):
            _clear_model_entries(name)
        _shipped.shipped_folders.cache_clear()
        register_variants(
            module.__name__,
            DeiT,
            {name: size},
            lambda name: cfg(input_size=(3, 32, 32), first_conv='patch_embed.proj', fixed_input_size=True),
            filter_fn=checkpoint_filter_fn,
            out_indices=1,
        )

    register()
    yield register
    _model_entrypoints.pop(name)
    _clear_model_entries(name)
    _shipped.shipped_folders.cache_clear()


def test_shipped_weights_load_by_their_name(run, register, tmp_path, monkeypatch, capsys):
    torch.manual_seed(0)
    model = timm.create_model('deit_pushed_nano', num_classes=3).eval()
    torch.nn.init.normal_(model.head.weight)
    named = tmp_path / 'run'
    shutil.copytree(run, named)
    about = json.loads((run / 'config.json').read_text())
    timm.models.save_for_hf(
        model, named, model_config={key: about[key] for key in ('label_names', 'vitzoo')}, safe_serialization=True
    )
    target = tmp_path / 'weights' / 'deit_pushed_nano.vz_test'
    with monkeypatch.context() as patch:
        patch.setattr('vitzoo._resources._PACKAGE', tmp_path)
        push(arguments(named, f'{target}/', '--half'))
    assert "timm.create_model('deit_pushed_nano.vz_test', pretrained=True) loads it" in capsys.readouterr().out
    assert "timm.create_model('deit_pushed_nano.vz_test', pretrained=True)" in (target / 'README.md').read_text()
    names = {path.name for path in target.iterdir()}
    assert names == {'config.json', 'model.safetensors', 'recipe.yaml', 'metrics.csv', 'README.md'}
    assert len({path.stat().st_mode for path in target.iterdir()}) == 1
    recipe = yaml.safe_load((target / 'recipe.yaml').read_text())
    assert (recipe['data_dir'], recipe['kd_model_name']) == ('source', 'a')
    assert not any(str(tmp_path).encode() in path.read_bytes() for path in target.iterdir())

    # as of a run on data that is not divided
    (target / 'held_out.csv').write_text('file,sha256\n')
    monkeypatch.setattr('vitzoo._resources._PACKAGE', tmp_path)
    register()
    assert 'deit_pushed_nano.vz_test' in timm.list_pretrained('deit_pushed_nano*')
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    for name in ('deit_pushed_nano', 'deit_pushed_nano.vz_test'):
        loaded = timm.create_model(name, pretrained=True).eval()
        torch.testing.assert_close(loaded(images), model(images), rtol=0, atol=2e-2)
        facts = about['vitzoo'] | dict(data_dir='source', held_out=target / 'held_out.csv')
        assert read_about(name) == facts
        assert read_about(name, 'random weights') == {}
    assert loaded.pretrained_cfg['license'] == LICENSE and loaded.pretrained_cfg['tag'] == 'vz_test'
    assert tuple(loaded.pretrained_cfg['mean']) == model.pretrained_cfg['mean']
    other = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    save_file(other, tmp_path / 'other.safetensors')
    overlay = dict(file=str(tmp_path / 'other.safetensors'))
    assert not timm.create_model('deit_pushed_nano', pretrained=True, pretrained_cfg_overlay=overlay).head.weight.any()
    # as without weights
    plain = timm.create_model('deit_pushed_nano')
    assert plain.num_classes == 1000 and 'label_names' not in plain.pretrained_cfg
    # with the arguments of other pretrained models
    others = dict(num_classes=5, in_chans=1, img_size=48)
    resized = timm.create_model('deit_pushed_nano', pretrained=True, **others).eval()
    assert resized(torch.zeros(1, 1, 48, 48)).shape == (1, 5)
    again = timm.create_model('deit_pushed_nano', pretrained=True)
    again.set_input_size(48)
    torch.testing.assert_close(resized.pos_embed, again.pos_embed)
    assert timm.create_model('deit_pushed_nano', pretrained=True, features_only=True)(images)[0].shape[1] == 24


def test_shipped_weights_are_found_in_a_checkout_and_in_a_package_beside_other_projects(tmp_path, monkeypatch):
    package = tmp_path / 'vitzoo'
    (tmp_path / 'pyproject.toml').write_text('')
    monkeypatch.setattr('vitzoo._resources._PACKAGE', package)
    # the second hides the first, as the package installed into the folder of a project with weights of its own
    for root in (tmp_path, package):
        folder = root / 'weights' / f'deit_nano.of_{root.name}'
        folder.mkdir(parents=True)
        (folder / 'config.json').write_text('{}')
        (tmp_path / 'weights' / 'results.csv').write_text('')
        _shipped.shipped_folders.cache_clear()
        assert list(_shipped.shipped_folders()) == [f'deit_nano.of_{root.name}']
    _shipped.shipped_folders.cache_clear()


def test_weights_that_half_precision_would_change_stay_as_they_are(run, tmp_path, monkeypatch, capsys, hub):
    scores = chain([dict(top1=50.0, top5=100.0, map=None)], repeat(dict(top1=40.0, top5=100.0, map=None)))
    sizes = dict(n=10, params=1, gmacs=0.1, img_size=32, images='a')
    monkeypatch.setattr(command, 'validate_model', lambda name, options: next(scores) | sizes)
    push(arguments(run, 'hf-hub:me/photos', '--half'))
    assert 'the nearest numbers of half precision have top1 40.0000, not 50.0000' in capsys.readouterr().out
    assert {tensor.dtype for tensor in load_file(hub.folder / 'model.safetensors').values()} == {torch.float32}
    assert 'Top-1 50.00 %' in (hub.folder / 'README.md').read_text()


def test_weights_are_rounded_at_random_if_the_nearest_numbers_change_an_image(run, monkeypatch, capsys, hub):
    right, wrong = dict(top1=50.0, top5=100.0, map=None), dict(top1=40.0, top5=100.0, map=None)
    scores = iter([right, wrong, wrong, right])
    sizes = dict(n=10, params=1, gmacs=0.1, img_size=32, images='a')
    monkeypatch.setattr(command, 'validate_model', lambda name, options: next(scores) | sizes)
    push(arguments(run, 'hf-hub:me/photos', '--half'))
    assert 'rounded at random with seed 2, because the nearest numbers' in capsys.readouterr().out
    expected = halve(load_file(run / 'model.safetensors'), torch.Generator().manual_seed(2))
    stored = load_file(hub.folder / 'model.safetensors')
    assert stored.keys() == expected.keys()
    for name, tensor in stored.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0)
    assert 'half precision' in (hub.folder / 'README.md').read_text()


@pytest.mark.parametrize('value', [1.0003, -0.70001, 3e-6, -1e-8, 2.0, 0.0])
def test_random_rounding_takes_one_of_the_two_neighbours_and_keeps_the_mean(value):
    x = torch.full((200, 500), value)
    rounded = halve(dict(matrix=x), torch.Generator().manual_seed(0))['matrix']
    assert rounded.dtype == torch.float16
    below, above = neighbours(value)
    assert set(rounded.unique().tolist()) == {below, above}
    # five standard deviations of the mean of 100,000
    assert rounded.double().mean() == pytest.approx(x[0, 0].item(), abs=5 * (above - below) / 2 / 100_000**0.5)


def neighbours(value):
    """The largest number of half precision up to a value, and the smallest from it on."""
    nearest = np.float16(np.float32(value))
    if nearest == np.float32(value):
        return float(nearest), float(nearest)
    towards = np.float16(np.inf if nearest < np.float32(value) else -np.inf)
    return tuple(sorted((float(nearest), float(np.nextafter(nearest, towards)))))


def test_a_weight_beyond_the_range_of_half_precision_is_found():
    others = dict(norm=torch.tensor([1e5]), n=torch.tensor([[100_000]]))
    assert halve(others | dict(matrix=torch.tensor([[1e5]]))) is None
    dtypes = dict(norm=torch.float32, n=torch.int64, matrix=torch.float16)
    assert {name: x.dtype for name, x in halve(others | dict(matrix=torch.ones(1, 1))).items()} == dtypes


def test_paths_of_this_machine_are_shortened():
    value = dict(data_dir='/home/me/photos', model_kwargs=dict(depth=2), others=['../a/b', 'runs/a', 'hfds/x'])
    expected = dict(data_dir='photos', model_kwargs=dict(depth=2), others=['b', 'runs/a', 'hfds/x'])
    assert without_paths(value) == expected


@pytest.mark.parametrize(
    ('words', 'message'),
    [
        (['nowhere', '--to', 'hf-hub:me/photos'], "'nowhere' has no config.json"),
        (['RUN', '--to', 'hf-hub:photos'], 'must be hf-hub:ORG/NAME'),
        (['RUN', '--to', 'hf-hub:me/photos@v2'], 'must be hf-hub:ORG/NAME'),
        (['RUN', '--to', 'hf-hub:me/photos--v2'], "without '--'"),
        (['RUN', '--to', 'hf-hub:me/a..b'], "without '--'"),
        (['RUN', '--to', 'hf-hub:me/f\u00fcr'], 'cannot be a repository of the hub'),
        (['RUN', '--to', 'weights'], 'must be hf-hub:ORG/NAME, or a folder called MODEL.TAG'),
        (['RUN', '--to', 'hf-hub:me/photos', '--license', ' '], '--license is empty'),
        (['RUN', '--to', 'TMP/deit_tiny.vz', '--private'], '--private is for the hub'),
        (['RUN', '--to', 'TMP/taken.vz'], 'exists already'),
        (['RUN', '--to', 'TMP/taken.vz/'], 'exists already'),
        (['RUN', '--to', '/proc/nope/deit_performer_tiny.vz'], "cannot create a folder in '/proc/nope': "),
        (['RUN', '--to', 'RUN/config.json/deit_performer_tiny.vz'], 'cannot create a folder in .*choose another --to'),
        (['RUN', '--to', 'TMP/cvt_13.vz'], "must be called deit_performer_tiny.TAG, not 'cvt_13.vz'"),
        (['RUN', '--to', 'TMP/deit_performer_tiny.vz'], 'created by its name is another model'),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence(run, tmp_path, words, message):
    (tmp_path / 'taken.vz').mkdir()
    words = [word.replace('RUN', str(run)).replace('TMP', str(tmp_path)) for word in words]
    with pytest.raises(UserError, match=message) as caught:
        push(['--license', 'mit', '--workers', '0', *words])
    assert '\n' not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ['taken.vz']


def swapped_run(run: Path, tmp_path: Path) -> Path:
    """A run of a model whose mixers were swapped, on the data of another run."""
    folder = make_model('swapped', ('blue', 'green', 'red'), 3, False, tmp_path / 'run')
    config = json.loads((folder / 'config.json').read_text())
    config['vitzoo'] = json.loads((run / 'config.json').read_text())['vitzoo']
    (folder / 'config.json').write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize('name', ['vit_tiny', 'vitzoo_swapped', 'BASE_to_'])
def test_the_folder_of_a_swapped_model_has_the_name_of_its_base(name, run, tmp_path):
    folder = swapped_run(run, tmp_path)
    config = json.loads((folder / 'config.json').read_text())
    base, mixer = config['model_args']['base_model'], config['model_args']['swap_mixer'][0]['mixer']
    target = tmp_path / 'weights' / f'{name.replace("BASE", base)}.vz_test'
    with pytest.raises(UserError, match=f'must be called such as {base}_to_{mixer}.TAG'):
        push(arguments(folder, str(target)))
    right = tmp_path / 'weights' / f'{base}_to_{mixer}.vz_test'
    push(arguments(folder, str(right), '--half'))
    assert f"timm.create_model('local-dir:{right.name}', pretrained=True)" in (right / 'README.md').read_text()


def test_an_upload_that_fails_is_one_sentence(run, hub):
    hub.fail = PermissionError('401 Unauthorized')
    with pytest.raises(UserError, match='cannot upload to hf-hub:me/photos: 401 .* hf auth login'):
        push(arguments(run, 'hf-hub:me/photos'))


@pytest.mark.parametrize('target', ['hf-hub:me/photos', 'TMP/weights/deit_tiny.vz'])
def test_a_folder_of_another_library_is_refused(target, tmp_path):
    (tmp_path / 'config.json').write_text('{"model_type": "vit"}')
    with pytest.raises(UserError, match='config.json. is not of `vitzoo train`'):
        push(arguments(tmp_path, target.replace('TMP', str(tmp_path))))


def test_a_model_without_a_classifier_is_refused(run, tmp_path, hub):
    folder = shutil.copytree(run, tmp_path / 'run')
    config = json.loads((folder / 'config.json').read_text())
    (folder / 'config.json').write_text(json.dumps(config | dict(num_classes=0)))
    with pytest.raises(UserError, match='has no classifier, so .*; train it on classes first'):
        push(arguments(folder, 'hf-hub:me/photos'))


def test_a_model_that_does_not_name_its_data_needs_it(run, tmp_path, hub):
    folder = tmp_path / 'converted'
    shutil.copytree(run, folder)
    config = json.loads((folder / 'config.json').read_text())
    del config['vitzoo']
    (folder / 'config.json').write_text(json.dumps(config))
    (folder / 'recipe.yaml').unlink()
    assert read_facts(folder).command == ''
    with pytest.raises(UserError, match='does not name its data; give --data-dir'):
        push(arguments(folder, 'hf-hub:me/photos'))
    push(arguments(folder, 'hf-hub:me/photos', '--data-dir', str(run.parent / 'source')))
    card = (hub.folder / 'README.md').read_text()
    assert 'for the 3 classes of source.' in card and 'Data:** source, 3 classes' in card
    assert 'unknown' not in card and str(run.parent) not in card
