"""Fine-tuning data: folders without a validation split, imbalanced classes, and multi-label images."""

import csv
import json
import re
import shutil
from pathlib import Path
from shlex import split

import numpy as np
import pytest
from accelerate.state import AcceleratorState
from PIL import Image
from toys import make_images

from vitzoo.about import read_about
from vitzoo.data import open_dataset
from vitzoo.data.held_out import write_held_out
from vitzoo.errors import UserError
from vitzoo.train import loop as train_module
from vitzoo.train.loop import train
from vitzoo.train.opening import open_data
from vitzoo.train.recipe import make_recipe
from vitzoo.validate.command import validate

ROOT = Path(__file__).parents[2]
FINETUNE = ['--config', 'finetune.yaml']
TINY = split('--model test_vit --img-size 32 --workers 0 --epochs 2 --lr 1e-3 --crop-pct 1')
COLOURS = dict(red=(200, 60, 60), green=(60, 200, 60), blue=(60, 60, 200))


@pytest.fixture(autouse=True)
def fresh_and_quick(fresh_accelerate, quick_timing):
    """Reset Accelerate, and shorten the measurement of speed."""


def validate_run(run: Path, data_dir: Path, *options: str) -> dict:
    (record,) = validate([str(run), '--data-dir', str(data_dir), '--workers', '0', *options])
    return record


def held_out(run: Path) -> set[str]:
    with (run / 'held_out.csv').open() as file:
        return {row['file'] for row in csv.DictReader(file)}


def test_seven_images_of_two_classes_without_a_split_are_enough(tmp_path, capsys):
    photos, run = make_images(tmp_path, photos_red=4, photos_blue=3) / 'photos', tmp_path / 'run'
    scores = train([*FINETUNE, *TINY, '--data-dir', str(photos), '--output', str(run)])
    printed = capsys.readouterr().out
    assert '5 training and 2 validation images of 2 classes' in printed
    assert 'no validation split: 20 % of each class is held out (seed 42' in printed
    assert scores['n'] == 2
    assert sorted(name.split('/')[0] for name in held_out(run)) == ['blue', 'red']
    record = validate_run(run, photos)
    assert (record['n'], record['top1']) == (2, scores['top1'])
    assert record['loss'] == pytest.approx(scores['loss'], rel=1e-5)
    assert f'that {run} held out for validation' in capsys.readouterr().err


def test_held_out_images_that_are_gone_are_counted(undivided_run, tmp_path, capsys):
    run, photos = undivided_run
    photos = shutil.copytree(photos, tmp_path / 'photos')
    first, *others = sorted(held_out(run))
    (photos / first).unlink()
    assert validate_run(run, photos)['n'] == len(others)
    assert 'held out for validation, without 1 that have gone or changed' in capsys.readouterr().err


@pytest.fixture(scope='module')
def undivided_run(tmp_path_factory) -> tuple[Path, Path]:
    """A run on a folder without a validation split, and that folder."""
    AcceleratorState._reset_state(reset_partial_state=True)
    root = tmp_path_factory.mktemp('undivided')
    photos, run = make_images(root, photos_red=6, photos_blue=5, photos_green=5) / 'photos', root / 'run'
    train([*TINY, '--data-dir', str(photos), '--output', str(run), '--val-fraction', '0.4', '--seed', '3'])
    return run, photos


def test_held_out_images_are_validated_after_a_move_and_among_new_images(undivided_run, tmp_path):
    run, photos = undivided_run
    expected = validate_run(run, photos)
    assert expected['n'] == 6
    moved = shutil.copytree(photos, tmp_path / 'moved')
    shutil.copy(make_images(tmp_path, new_red=9) / 'new' / 'red' / '8.jpg', moved / 'red')
    shutil.copytree(moved, tmp_path / 'parts' / 'train')
    # the batch size must not matter
    for folder, options in ((moved, ()), (tmp_path / 'parts', ('--batch-size', '1'))):
        record = validate_run(run, folder, *options)
        assert (record['n'], record['top1']) == (6, expected['top1'])
        assert record['loss'] == pytest.approx(expected['loss'], rel=1e-5)
    assert validate_run(run / 'best', moved)['n'] == 6


def test_a_copy_of_the_best_epoch_is_validated_on_the_held_out_images(undivided_run, tmp_path):
    run, photos = undivided_run
    copied = shutil.copytree(run / 'best', tmp_path / 'copied')
    assert validate_run(copied, photos)['n'] == 6


def test_an_unfinished_run_tells_what_it_held_out(undivided_run, tmp_path):
    run, photos = undivided_run
    unfinished = shutil.copytree(run, tmp_path / 'unfinished')
    for file in (unfinished / 'config.json', unfinished / 'best' / 'config.json'):
        file.unlink()
    weights = next(unfinished.glob('checkpoints/*/model.safetensors'))
    about = read_about('test_vit', 'checkpoint', str(weights))
    assert (about['held_out'], about['data_dir']) == (unfinished / 'held_out.csv', str(photos))
    options = ['--initial-checkpoint', str(weights), '--epochs', '1', '--seed', '9', '--output', str(tmp_path / 'next')]
    train([*TINY, '--data-dir', str(photos), *options])
    assert held_out(tmp_path / 'next') == held_out(run)


def test_a_student_holds_out_the_images_that_its_teacher_held_out(undivided_run, tmp_path):
    run, photos = undivided_run
    options = ['--kd-model-name', str(run), '--epochs', '1', '--val-fraction', '0.4', '--seed', '9']
    train([*TINY, '--data-dir', str(photos), *options, '--output', str(tmp_path / 'student')])
    assert held_out(tmp_path / 'student') == held_out(run)


@pytest.mark.parametrize(('seed', 'known'), [(3, 0), (9, 4)])
def test_validation_images_that_a_teacher_was_trained_on_are_counted(undivided_run, tmp_path, capsys, seed, known):
    run, photos = undivided_run
    first = shutil.copytree(run / 'best', tmp_path / 'first')
    write_held_out(first / 'held_out.csv', open_dataset(str(photos), 'val', val_fraction=0.4, seed=seed).reader)
    _, val_set = open_data(make_recipe(dict(model=str(first), kd_model_name=str(run), data_dir=str(photos))))
    assert len({*val_set.reader.filenames()} - held_out(run)) == known
    assert (f'trained on {known} validation images of 6' in capsys.readouterr().out) == bool(known)


def test_a_run_in_the_folder_of_another_has_not_held_out_the_same_images(undivided_run, tmp_path):
    run, _ = undivided_run
    outer = shutil.copytree(run, tmp_path / 'outer')
    # as runs of earlier versions
    (outer / 'best' / 'held_out.csv').unlink()
    inner = shutil.copytree(run / 'best', outer / 'inner', ignore=shutil.ignore_patterns('held_out.csv'))
    assert read_about(str(outer / 'best'))['held_out'] == outer / 'held_out.csv'
    assert 'held_out' not in read_about(str(inner))


def test_runs_that_held_out_different_images_are_not_compared_silently(undivided_run, tmp_path, capsys):
    run, photos = undivided_run
    other = tmp_path / 'other'
    options = ['--epochs', '1', '--val-fraction', '0.2', '--seed', '4', '--output', str(other)]
    train([*TINY, *options, '--data-dir', str(photos)])
    capsys.readouterr()
    records = validate([str(run), str(other), '--data-dir', str(photos), '--workers', '0'])
    assert [record['n'] for record in records] == [6, 3] and records[0]['images'] != records[1]['images']
    printed = capsys.readouterr().out
    assert printed.startswith('3 or 6 images of') and 'evaluated on different images' in printed
    records = validate([str(run), str(run / 'best'), '--data-dir', str(photos), '--workers', '0'])
    assert records[0]['images'] == records[1]['images']
    assert 'different images' not in capsys.readouterr().out


@pytest.mark.parametrize('start', ['--model RUN', '--model RUN/best', '--model test_vit --initial-checkpoint RUN/FILE'])
def test_training_goes_on_with_the_same_held_out_images(undivided_run, start, tmp_path, capsys):
    run, photos = undivided_run
    moved = shutil.copytree(photos, tmp_path / 'moved')
    shutil.copy(make_images(tmp_path, new_red=9) / 'new' / 'red' / '8.jpg', moved / 'red')
    start = split(start.replace('RUN', str(run)).replace('FILE', 'model.safetensors'))
    options = [*TINY, '--data-dir', str(moved), '--epochs', '1', '--seed', '7', '--output', str(tmp_path / 'next')]
    train([*options, *start])
    assert held_out(tmp_path / 'next') == held_out(run)
    printed = capsys.readouterr().out
    folder = run / 'best' if 'best' in start[1] else run
    assert '11 training and 6 validation images' in printed
    assert f'the images in {folder / "held_out.csv"} are held' in printed
    # after which other weights are resumed with the same images
    train(['--resume', str(tmp_path / 'next'), '--epochs', '2'])
    assert held_out(tmp_path / 'next') == held_out(run)


@pytest.mark.parametrize('start', ['', 'checkpoints/step-00000001'])
def test_a_resumed_run_keeps_its_list_of_held_out_images(undivided_run, start, tmp_path):
    run, photos = (shutil.copytree(folder, tmp_path / folder.name) for folder in undivided_run)
    (photos / sorted(held_out(run))[0]).unlink()
    written = (run / 'held_out.csv').read_text()
    train(['--resume', str(run / start), '--data-dir', str(photos), '--epochs', '3'])
    assert (run / 'held_out.csv').read_text() == written
    assert [path.read_text() for path in run.glob('abandoned/*/held_out.csv')] == [written] * bool(start)


def test_a_run_that_ended_before_its_first_checkpoint_begins_again_with_the_images_of_its_recipe(
    undivided_run, tmp_path
):
    run, photos = undivided_run
    shutil.copy(run / 'held_out.csv', tmp_path)
    options = dict(data_dir=str(photos), output=str(tmp_path), resume='auto', seed=3)
    assert [len(images) for images in open_data(make_recipe(options | dict(val_fraction=0.2)))] == [13, 3]


def test_data_that_was_held_out_completely_is_refused(undivided_run, tmp_path):
    run, photos = undivided_run
    for name in held_out(run):
        (tmp_path / 'held' / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(photos / name, tmp_path / 'held' / name)
    with pytest.raises(UserError, match='all images of .* are in .*held_out.csv'):
        train([*TINY, '--model', str(run), '--data-dir', str(tmp_path / 'held'), '--output', str(tmp_path / 'next')])


@pytest.mark.parametrize('is_other', ['data', 'weights', 'split'])
def test_held_out_images_of_other_data_are_only_listed_and_those_of_other_weights_are_not(
    undivided_run, is_other, tmp_path
):
    run, photos = undivided_run
    first_photos = photos
    options, model = [*TINY, '--epochs', '1', '--output', str(tmp_path / 'next')], run
    if is_other == 'data':
        photos = make_images(tmp_path, others_red=5, others_green=5, others_blue=5) / 'others'
    elif is_other == 'weights':
        model = 'test_vit'
    else:
        photos = shutil.copytree(photos, tmp_path / 'parts' / 'train').parent
        shutil.copytree(photos / 'train', photos / 'val')
    train([*options, '--model', str(model), '--data-dir', str(photos)])
    found = tmp_path / 'next' / 'held_out.csv'
    assert found.is_file() == (is_other != 'split')
    assert is_other == 'split' or held_out(tmp_path / 'next') != held_out(run)
    # images that the first weights were not trained on, unless the second ones were
    expected = dict(data=(3, 6), weights=(3, 3), split=(16, 16))[is_other]
    assert tuple(validate_run(tmp_path / 'next', folder)['n'] for folder in (photos, first_photos)) == expected


def test_other_datasets_are_validated_completely(undivided_run, tmp_path, capsys):
    run, _ = undivided_run
    # the same names with other pixels
    others = make_images(tmp_path, others_green=3, others_red=2) / 'others'
    capsys.readouterr()
    assert validate_run(run, others)['n'] == 5
    assert 'held out' not in capsys.readouterr().err


def test_overwriting_a_run_removes_its_held_out_images(tmp_path):
    photos, run = make_images(tmp_path, photos_red=4, photos_blue=4) / 'photos', tmp_path / 'run'
    options = [*TINY, '--output', str(run), '--epochs', '1', '--overwrite']
    train([*options, '--data-dir', str(photos)])
    assert len(held_out(run)) == 2
    shutil.copytree(photos, tmp_path / 'parts' / 'train')
    shutil.copytree(photos, tmp_path / 'parts' / 'val')
    train([*options, '--data-dir', str(tmp_path / 'parts')])
    assert not (run / 'held_out.csv').exists()
    assert validate_run(run, tmp_path / 'parts')['n'] == 8


def test_validation_matches_classes_by_name_if_some_are_missing(undivided_run, tmp_path):
    run, _ = undivided_run
    make_images(tmp_path, val_red=4, val_green=4, val_blue=4)
    whole = validate_run(run, tmp_path)
    one_by_one = []
    for name in COLOURS:
        shutil.copytree(tmp_path / 'val' / name, tmp_path / name / 'val' / name)
        one_by_one.append(validate_run(run, tmp_path / name))
    assert whole['n'] == 12
    assert whole['top1'] == pytest.approx(sum(record['top1'] for record in one_by_one) / 3)
    assert whole['loss'] == pytest.approx(sum(record['loss'] for record in one_by_one) / 3, rel=1e-5)


def test_an_unknown_class_is_refused_with_the_fix(undivided_run, tmp_path):
    run, _ = undivided_run
    make_images(tmp_path, val_red=1, val_bleu=1)
    with pytest.raises(UserError, match="class 'bleu' .* did you mean blue\\? Rename or remove it, or add"):
        validate_run(run, tmp_path)


def test_the_training_command_of_the_readme_works(tmp_path, monkeypatch):
    lines = re.findall('^vitzoo train (.*--data-dir photos .*)$', (ROOT / 'README.md').read_text(), re.MULTILINE)
    make_images(tmp_path, photos_red=9, photos_blue=9)
    monkeypatch.chdir(tmp_path)
    # a small model without a download, for fewer epochs
    line = re.sub(r'--model \S+ --pretrained|--epochs \d+', '', lines[0])
    assert line != lines[0]
    assert train([*split(line), *TINY])['n'] == 4
    assert validate_run(Path('runs/photos'), Path('photos'))['n'] == 4


@pytest.mark.parametrize(
    'options',
    [
        '--balance loss --mixup 0.4 --cutmix 1',
        '--balance loss --bce-loss --smoothing 0',
        '--balance sampler --aug-repeats 2 --grad-accum-steps 2',
    ],
)
def test_imbalanced_classes_can_be_balanced(tmp_path, options):
    photos = make_images(tmp_path, photos_red=16, photos_blue=4) / 'photos'
    output = ['--data-dir', str(photos), '--output', str(tmp_path / 'run')]
    scores = train([*TINY, '--batch-size', '8', *output, *split(options)])
    assert scores['n'] == 4 and np.isfinite(scores['loss'])


class Interrupted(Exception):
    pass


def test_balanced_sampling_resumes(tmp_path, monkeypatch):
    photos = make_images(tmp_path, photos_red=16, photos_blue=4) / 'photos'
    options = [*TINY, '--balance', 'sampler', '--data-dir', str(photos), '--batch-size', '4', '--checkpoint-every', '1']
    train([*options, '--output', str(tmp_path / 'whole')])

    def step_or_stop(run, *args, **kwargs):
        if run.step == 6:
            raise Interrupted
        return train_step(run, *args, **kwargs)

    train_step = train_module.train_step
    monkeypatch.setattr(train_module, 'train_step', step_or_stop)
    with pytest.raises(Interrupted):
        train([*options, '--output', str(tmp_path / 'part')])
    monkeypatch.setattr(train_module, 'train_step', train_step)
    train(['--resume', 'auto', '--output', str(tmp_path / 'part')])
    weights = [(tmp_path / run / 'model.safetensors').read_bytes() for run in ('whole', 'part')]
    assert weights[0] == weights[1]
    with pytest.raises(UserError, match='its balance is sampler, not none'):
        train([*options, '--output', str(tmp_path / 'part'), '--resume', 'auto', '--balance', 'none'])


@pytest.fixture(scope='module')
def multi_label(tmp_path_factory) -> Path:
    """Images with one colour or two side by side, one of them without a label, listed in labels.csv."""
    root = tmp_path_factory.mktemp('multi_label')
    for part, count in dict(train=24, val=9).items():
        (root / part).mkdir()
        rows = ['file,labels']
        for number in range(count):
            generator = np.random.default_rng([number, count])
            names = list(generator.permutation(list(COLOURS))[: 1 + number % 2]) if number else []
            pixels = generator.normal(128, 20, (40, 40, 3))
            for half, name in enumerate(names):
                pixels[:, 20 * half : 20 * half + 20] += np.subtract(COLOURS[name], 128)
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(root / part / f'{number}.jpg')
            rows.append(f'{number}.jpg,{";".join(names)}')
        (root / part / 'labels.csv').write_text('\n'.join(rows))
    return root


@pytest.mark.parametrize('options', ['', '--mixup 0.4 --cutmix 1 --batch-size 5 --model-ema', '--balance loss'])
def test_multi_label_runs_report_map(multi_label, tmp_path, capsys, options):
    run = tmp_path / 'run'
    arguments = [*TINY, '--multi-label', '--data-dir', str(multi_label), '--output', str(run), *split(options)]
    scores = train(arguments)
    printed = capsys.readouterr().out.splitlines()[-1]
    assert f'mAP {scores["map"]:.2f} %' in printed
    with (run / 'metrics.csv').open() as file:
        rows = list(csv.DictReader(file))
    assert float(rows[-1]['map']) > 0 and ('ema_map' in rows[-1]) == ('ema' in options)
    config = json.loads((run / 'config.json').read_text())
    assert config['vitzoo']['multi_label'] and config['label_names'] == ['blue', 'green', 'red']
    record = validate_run(run, multi_label, '--results-file', str(tmp_path / 'results.csv'), '--batch-size', '2')
    assert (record['n'], record['top1']) == (9, scores['top1'])
    assert record['map'] == pytest.approx(scores['map']) and record['loss'] == pytest.approx(scores['loss'], rel=1e-5)
    assert 'mAP' in capsys.readouterr().out
    with (tmp_path / 'results.csv').open() as file:
        assert float(next(csv.DictReader(file))['map']) == record['map']


def test_multi_label_runs_learn(multi_label, tmp_path):
    arguments = [*TINY, '--multi-label', '--data-dir', str(multi_label), '--output', str(tmp_path)]
    augment = split('--scale 0.9 1 --hflip 0 --color-jitter 0 --smoothing 0 --warmup-epochs 0 --batch-size 8')
    scores = train([*arguments, *augment, '--epochs', '15', '--lr', '3e-3'])
    # eight of nine images have a label, and a constant prediction is right for fewer than five of them
    assert scores['map'] > 85 and scores['top1'] >= 75


def test_multi_label_images_can_be_held_out(multi_label, tmp_path):
    photos = shutil.copytree(multi_label / 'train', tmp_path / 'photos')
    run = tmp_path / 'run'
    scores = train([*TINY, '--multi-label', '--data-dir', str(photos), '--output', str(run)])
    assert scores['n'] == validate_run(run, photos)['n'] == len(held_out(run)) < 10


@pytest.mark.parametrize(
    ('options', 'sentence'),
    [
        ('--balance sampler', 'balance: sampler needs one class per image'),
        ('--num-classes 4', 'num_classes is 4, but .* has 3 classes'),
        ('--data-dir sample', "--multi-label, .* needs '.*labels.csv'"),
        ('--kd-model-name resnet18', 'does not work with multi_label'),
    ],
)
def test_options_that_do_not_work_with_multi_label_are_refused(multi_label, tmp_path, options, sentence):
    arguments = ['--multi-label', '--data-dir', str(multi_label), '--output', str(tmp_path / 'run')]
    with pytest.raises(UserError, match=sentence):
        train([*TINY, *arguments, *split(options)])


def test_the_bundled_sample_has_a_validation_split():
    assert not open_dataset('sample', 'val', val_fraction=0.2).is_held_out
