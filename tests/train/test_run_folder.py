"""Training never replaces, mixes or deletes what is in a folder unless it wrote it and was told to."""

import csv
import json
import shutil
from pathlib import Path
from shlex import split

import pytest
from accelerate import Accelerator
from timm.models import save_for_hf

from vitzoo.errors import UserError
from vitzoo.train import loop as train_module
from vitzoo.train.checkpoint import _explain_failure, list_checkpoints
from vitzoo.train.loop import train
from vitzoo.train.recipe import Recipe
from vitzoo.train.run_folder import claim_folder, new_folder

pytestmark = pytest.mark.usefixtures('fresh_accelerate')
TINY = split('--model test_vit --img-size 32 --workers 0 --batch-size 8 --lr 1e-3 --warmup-epochs 0 --crop-pct 1')


def snapshot(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob('*')) if path.is_file()}


def steps(folder: Path) -> list[int]:
    return [int(path.name[5:]) for path in list_checkpoints(folder / 'checkpoints')]


def epochs_of(folder: Path) -> int:
    return json.loads((folder / 'config.json').read_text())['vitzoo']['epochs']


@pytest.fixture(scope='module')
def finished(images, tmp_path_factory) -> Path:
    """A finished run of three epochs of 5 steps, with all checkpoints, and its best model in epoch 3."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    folder = tmp_path_factory.mktemp('finished') / 'run'
    train([*TINY, '--data-dir', images, '--output', str(folder), '--epochs', '3', '--checkpoint-hist', '9'])
    config = json.loads((folder / 'best' / 'config.json').read_text())
    config['vitzoo']['epochs'] = 3
    (folder / 'best' / 'config.json').write_text(json.dumps(config))
    return folder


@pytest.fixture
def run(finished, tmp_path) -> Path:
    return shutil.copytree(finished, tmp_path / 'run')


def test_models_are_written_within_the_run_folder_which_may_be_a_disk_of_its_own(images, tmp_path, monkeypatch):
    folders = []

    def save(model, folder, **options):
        folders.append(Path(folder))
        return save_for_hf(model, folder, **options)

    monkeypatch.setattr('vitzoo._save.save_for_hf', save)
    run = tmp_path / 'run'
    train([*TINY, '--data-dir', images, '--output', str(run), '--epochs', '1'])
    assert [folder.parent for folder in folders] == [run / 'best', run]
    assert not any(folder.exists() for folder in folders)
    # safetensors alone would let only the owner read it
    assert (run / 'model.safetensors').stat().st_mode == (run / 'config.json').stat().st_mode


@pytest.mark.parametrize(
    'source', ['--model {}', '--initial-checkpoint {}/best/model.safetensors', '--kd-model-name {}']
)
def test_a_run_does_not_replace_the_models_that_it_begins_with(images, run, source):
    before = snapshot(run)
    arguments = [*TINY, '--data-dir', images, '--output', str(run), '--epochs', '1', '--overwrite']
    with pytest.raises(UserError, match='which this run would replace; choose another --output'):
        train([*arguments, *source.format(run).split()])
    assert snapshot(run) == before


def test_a_folder_with_the_name_of_a_model_can_be_its_output(images, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'test_vit').mkdir()
    train([*TINY, '--data-dir', images, '--output', 'test_vit', '--epochs', '1'])
    assert (tmp_path / 'test_vit' / 'model.safetensors').is_file()


def test_a_checkpoint_whose_recipe_lacks_later_keys_is_resumed(images, run):
    for state in run.glob('checkpoints/*/state.json'):
        found = json.loads(state.read_text())
        for name in ('val_interval', 'cooldown_epochs', 'mixer'):
            del found['recipe'][name]
        del found['data']['labels_of_the_class_map']
        state.write_text(json.dumps(found))
    train([*TINY, '--data-dir', images, '--output', str(run), '--epochs', '4', '--resume', 'auto'])
    assert steps(run)[-1] == 20


def test_a_run_resumes_without_the_checkpoint_that_it_began_with(images, run, tmp_path):
    start = shutil.copy(run / 'model.safetensors', tmp_path / 'start.safetensors')
    arguments = [*TINY, '--data-dir', images, '--initial-checkpoint', str(start), '--output', str(tmp_path / 'new')]
    train([*arguments, '--epochs', '1'])
    start.unlink()
    assert train([*arguments, '--epochs', '2', '--resume', 'auto'])['n'] == 11
    assert steps(tmp_path / 'new')[-1] == 10


def test_resuming_without_checkpoints_does_not_delete_a_finished_model(images, run):
    shutil.rmtree(run / 'checkpoints')
    before = snapshot(run)
    arguments = [*TINY, '--data-dir', images, '--output', str(run), '--epochs', '1', '--resume', 'auto']
    with pytest.raises(UserError, match='has metrics.csv but no checkpoint to resume from'):
        train(arguments)
    assert snapshot(run) == before
    assert train([*arguments, '--overwrite'])['n'] == 11


def test_resuming_into_another_run_needs_overwrite(run, tmp_path):
    other = shutil.copytree(run, tmp_path / 'other')
    before = snapshot(tmp_path)
    arguments = ['--resume', str(run / 'checkpoints' / 'step-00000005'), '--output', str(other), '--epochs', '2']
    with pytest.raises(UserError, match="there is a run in '.*other' already"):
        train(arguments)
    assert snapshot(tmp_path) == before
    train([*arguments, '--overwrite'])
    assert steps(other) == [5, 10]
    assert steps(run) == [5, 10, 15]


def test_a_run_resumed_into_a_new_folder_has_its_own_checkpoints_and_best_model(run, tmp_path):
    before = snapshot(run)
    train(['--resume', str(run / 'checkpoints' / 'step-00000010'), '--output', str(tmp_path / 'new'), '--epochs', '2'])
    assert steps(tmp_path / 'new') == [10]
    assert epochs_of(tmp_path / 'new' / 'best') == epochs_of(tmp_path / 'new') == 2
    assert snapshot(run) == before


def test_a_run_that_is_killed_before_it_has_the_checkpoint_of_another_does_not_start_without_it(
    run, tmp_path, monkeypatch
):
    def kill(run):
        raise KeyboardInterrupt

    checkpoint, new = str(run / 'checkpoints' / 'step-00000005'), str(tmp_path / 'new')
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(train_module, 'save_run', kill)
        train(['--resume', checkpoint, '--output', new])
    with pytest.raises(UserError, match=f'would start again without .* use --resume {checkpoint} --overwrite'):
        train(['--resume', 'auto', '--output', new])
    train(['--resume', checkpoint, '--output', new, '--overwrite', '--epochs', '2'])
    assert steps(tmp_path / 'new') == [5, 10]


def test_going_back_starts_a_branch_and_keeps_the_other(run):
    before = {path.relative_to(run): content for path, content in snapshot(run).items()}
    options = ['--epochs', '4', '--checkpoint-hist', '1', '--lr', '1e-4']
    train(['--resume', str(run / 'checkpoints' / 'step-00000005'), *options])
    assert steps(run) == [20]
    assert epochs_of(run) == 4
    aside = run / 'abandoned' / 'step-00000015'
    assert steps(aside) == [10, 15]
    kept = {path.relative_to(aside): content for path, content in snapshot(aside).items()}
    assert kept.items() <= before.items() and {Path('model.safetensors'), Path('best/model.safetensors')} <= kept.keys()
    assert (run / 'best' / 'model.safetensors').is_file()
    # the folder set aside is a run that resumes
    assert train(['--resume', str(aside)])['folder'] == str(aside)


def test_a_branch_that_is_interrupted_at_once_has_a_best_epoch_of_its_own(run, monkeypatch):
    found = []

    def interrupt(run, *args, **kwargs):
        found.append(run.best_from)
        raise KeyboardInterrupt

    monkeypatch.setattr(train_module, 'train_step', interrupt)
    for source in (run / 'checkpoints' / 'step-00000010', run):
        with pytest.raises(KeyboardInterrupt):
            train(['--resume', str(source)])
    assert found == [1, 1]
    assert epochs_of(run / 'best') == 2


@pytest.mark.parametrize('last', ['metrics.csv', 'best'])
def test_a_branch_that_is_interrupted_while_the_other_is_set_aside_resumes(run, last, monkeypatch):
    found, rename = [], Path.rename

    def interrupt(path, target):
        if path.name == last:
            raise KeyboardInterrupt
        return rename(path, target)

    def stop(run, *args, **kwargs):
        found.append(run.best_from)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, 'rename', interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(['--resume', str(run / 'checkpoints' / 'step-00000010')])
    monkeypatch.setattr(Path, 'rename', rename)
    monkeypatch.setattr(train_module, 'train_step', stop)
    # evaluates epoch 2, and does not keep the model of epoch 3 of the other branch
    with pytest.raises(KeyboardInterrupt):
        train(['--resume', str(run)])
    assert found == [1]
    assert epochs_of(run / 'best') == 2


def test_a_kill_leaves_no_part_of_a_checkpoint_that_is_replaced_or_deleted(run, monkeypatch):
    rmtree = shutil.rmtree

    def interrupt(folder, **options):
        if (folder / 'state.json').is_file():
            (folder / 'state.json').unlink()
            raise KeyboardInterrupt
        rmtree(folder, **options)

    monkeypatch.setattr(shutil, 'rmtree', interrupt)
    # a branch begins by writing its checkpoint again
    with pytest.raises(KeyboardInterrupt):
        train(['--resume', str(run / 'checkpoints' / 'step-00000005')])
    monkeypatch.undo()
    assert steps(run) == [5]
    # left by a kill while writing
    for name in ('checkpoints/.partial-step-00000007', 'best/.export', '.export'):
        (run / name).mkdir(parents=True)
        (run / name / 'model.safetensors').touch()
    train(['--resume', str(run), '--epochs', '2'])
    assert steps(run) == [5, 10]
    assert list(run.rglob('.*')) == []


def test_a_run_whose_best_model_is_gone_exports_that_of_a_later_epoch(run):
    # as of a branch that was interrupted before it could write anything
    shutil.rmtree(run / 'best')
    train(['--resume', str(run)])
    assert epochs_of(run / 'best') == 3


def test_overwriting_a_run_keeps_the_files_of_others(images, run):
    photo, events = run / 'best' / 'photo.jpg', run / 'vitzoo' / 'events.out.tfevents.1'
    photo.write_text('photo')
    events.parent.mkdir()
    events.write_text('curve')
    train([*TINY, '--data-dir', images, '--output', str(run), '--epochs', '1', '--overwrite'])
    assert photo.read_text() == 'photo'
    assert not events.exists()
    assert steps(run) == [5]


def test_a_checkpoint_outside_a_run_needs_an_output(run, tmp_path):
    lone = shutil.move(run / 'checkpoints' / 'step-00000005', tmp_path / 'step-00000005')
    with pytest.raises(UserError, match='is not in the folder checkpoints/ of a run; add --output FOLDER'):
        train(['--resume', str(lone)])


def test_an_epoch_whose_evaluation_is_repeated_keeps_its_speed(images, tmp_path):
    arguments = [*TINY, '--data-dir', images, '--output', str(tmp_path), '--epochs', '1']
    train(arguments)
    (written,) = csv.DictReader((tmp_path / 'metrics.csv').open())
    train([*arguments, '--resume', 'auto'])
    (again,) = csv.DictReader((tmp_path / 'metrics.csv').open())
    assert float(again['images_per_second']) == float(written['images_per_second']) > 0


def test_a_full_disk_before_the_first_checkpoint_leaves_nothing_to_resume(tmp_path):
    assert _explain_failure(tmp_path, OSError('No space left')).endswith('another --output, and start again')
    (tmp_path / 'step-00000005').mkdir()
    (tmp_path / 'step-00000005' / 'state.json').touch()
    assert _explain_failure(tmp_path, OSError('No space left')).endswith('and continue with --resume')


def test_two_starts_that_choose_the_same_folder_get_two(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    accelerator = Accelerator(cpu=True)
    first, second = (new_folder(Recipe(model='test_vit')) for _ in range(2))
    assert first == second
    with (
        claim_folder(accelerator, first, is_named=False) as lock,
        claim_folder(accelerator, second, is_named=False) as other,
    ):
        assert [lock.folder.name, other.folder.name] == ['test_vit', 'test_vit-2']
        (lock.folder / 'recipe.yaml').write_text('# model  test_vit')
    # the second wrote nothing, and the locks are gone
    assert [path.name for path in tmp_path.rglob('*')] == ['runs', 'test_vit', 'recipe.yaml']


def test_the_default_folder_is_named_after_the_model_and_its_mixers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for mixer, name in ((None, 'test_vit'), ('ls', 'test_vit_ls'), ('ls:0-9,pool:10,11,ls:12', 'test_vit_ls_pool')):
        assert new_folder(Recipe(model='runs/test_vit', mixer=mixer)).name == name


def test_a_folder_may_have_a_name_that_looks_like_markup(images, tmp_path, capsys):
    folder = tmp_path / 'run [old] [/x]'
    train([*TINY, '--data-dir', images, '--output', str(folder), '--epochs', '1'])
    printed = capsys.readouterr().out
    assert f'output {folder}' in printed and f'{folder} has the raw weights' in printed


def test_a_run_that_ended_while_another_start_waited_for_its_folder_is_kept(images, tmp_path, monkeypatch):
    arguments = [*TINY, '--data-dir', images, '--output', str(tmp_path), '--epochs', '1']

    def end_another_run(recipe):
        (tmp_path / 'recipe.yaml').write_text('# model  test_vit')
        return create_accelerator(recipe)

    create_accelerator = train_module.create_accelerator
    monkeypatch.setattr(train_module, 'create_accelerator', end_another_run)
    with pytest.raises(UserError, match='there is a run in'):
        train(arguments)
    assert (tmp_path / 'recipe.yaml').read_text() == '# model  test_vit'
