"""An evaluation under corruptions that was interrupted continues, unless anything that its scores depend on changed."""

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from classifiers import make_ten_images, save_classifier
from PIL import Image
from processes import start_processes
from safetensors.torch import load_file, save_file

from vitzoo.data import eval_transform, open_dataset
from vitzoo.errors import UserError
from vitzoo.load import fit_data_config, load_model
from vitzoo.report.command import make_report
from vitzoo.validate import robustness
from vitzoo.validate.command import validate
from vitzoo.validate.options import EvalOptions
from vitzoo.validate.scoring import Evaluation
from vitzoo.validate.unfinished import UnfinishedScores

CONDITIONS = [(name, severity) for name in ('gaussian_noise', 'pixelate') for severity in range(1, 6)]

pytestmark = pytest.mark.usefixtures('quick_timing')


@pytest.fixture(scope='module')
def data(tmp_path_factory) -> Path:
    """Five blue, three green and two red images, which are noise."""
    root, random = make_ten_images(tmp_path_factory.mktemp('data')), np.random.default_rng(0)
    for file in sorted(root.rglob('*.png')):
        Image.fromarray(random.integers(256, size=(40, 40, 3), dtype=np.uint8)).save(file)
    return root


@pytest.fixture(scope='module')
def trained(data, tmp_path_factory) -> Path:
    """A classifier by the mean features of each class, which corruptions confuse."""
    folder = save_classifier(tmp_path_factory.mktemp('runs') / 'deit')
    model = load_model(str(folder)).model
    images = open_dataset(str(data), 'val', eval_transform(fit_data_config(str(folder), model)))
    with torch.no_grad():
        features = model.forward_head(model.forward_features(torch.stack([image for image, _ in images])), True)
    labels = torch.tensor(images.targets)
    means = torch.stack([features[labels == label].mean(dim=0) for label in range(3)])
    state = load_file(folder / 'model.safetensors')
    state |= {'head.weight': means, 'head.bias': -means.square().sum(dim=1) / 2}
    save_file(state, folder / 'model.safetensors')
    return folder


@pytest.fixture
def computed(monkeypatch) -> Counter:
    """Two corruptions instead of fifteen, and how often an image was corrupted by each of them."""
    from vitzoo.data import corruptions

    monkeypatch.setattr('vitzoo.validate.robustness.CONDITIONS', CONDITIONS)
    corrupt, counter = corruptions.corrupt, Counter()

    def corrupt_and_count(image, corruption, severity, name):
        counter[corruption, severity] += 1
        return corrupt(image, corruption, severity, name)

    monkeypatch.setattr(corruptions, 'corrupt', corrupt_and_count)
    return counter


def interrupt_after(number: int, run, *args) -> None:
    """Run a function until the scores of some conditions are in the file."""
    add = UnfinishedScores.add

    def add_and_stop(scores, *args) -> None:
        add(scores, *args)
        if len(scores.counts) == number:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(UnfinishedScores, 'add', add_and_stop)
        run(*args)


def scores_in(path: Path) -> dict:
    (record,) = json.loads(path.read_text())
    measured = ('images_per_second', 'speed_doubt', 'peak_memory_mb')
    return {key: value for key, value in record.items() if key not in measured}


def test_an_interrupted_evaluation_continues_to_the_same_results(data, trained, tmp_path, computed, capsys):
    argv = [str(trained), '--data-dir', str(data), '--corrupt', '--workers', '0', '--results-file']
    validate([*argv, str(tmp_path / 'whole.json')])
    assert list(tmp_path.iterdir()) == [tmp_path / 'whole.json']
    computed.clear()
    interrupt_after(7, validate, [*argv, str(tmp_path / 'halves.json')])
    capsys.readouterr()
    # neither the batch size nor the workers change the scores
    validate([*argv, str(tmp_path / 'halves.json'), '--batch-size', '3'])
    assert f'{trained}: 7 corruptions are in {tmp_path / "halves.json.unfinished"}' in capsys.readouterr().err
    assert computed == dict.fromkeys(CONDITIONS, 10)
    assert sorted(path.name for path in tmp_path.iterdir()) == ['halves.json', 'whole.json']
    whole, halves = scores_in(tmp_path / 'whole.json'), scores_in(tmp_path / 'halves.json')
    assert halves.pop('loss') == pytest.approx(whole.pop('loss'))
    for key in ('oversmoothing', 'token_statistics'):
        whole.pop(key), halves.pop(key)
    assert json.dumps(halves) == json.dumps(whole)
    assert len({value for values in whole['corrupt'].values() for value in values}) > 1


def test_a_report_continues_as_well(data, trained, tmp_path, computed, monkeypatch):
    # all but the evaluation
    monkeypatch.setattr('vitzoo.report.gather.describe_model', lambda *args: {})
    argv = [str(trained), '--data-dir', str(data), '--corrupt', '--workers', '0', '--out', str(tmp_path)]
    interrupt_after(9, make_report, argv)
    assert (tmp_path / 'report.json.unfinished').is_file()
    make_report(argv)
    assert computed == dict.fromkeys(CONDITIONS, 10)
    assert sorted(path.name for path in tmp_path.iterdir()) == ['index.html', 'report.json']


def change_weights(run: Path, data: Path) -> None:
    state = load_file(run / 'model.safetensors')
    state['head.bias'][0] += 1
    save_file(state, run / 'model.safetensors')


def change_config(run: Path, data: Path) -> None:
    config = json.loads((run / 'config.json').read_text())
    (run / 'config.json').write_text(json.dumps(config | dict(vitzoo=dict(epochs=3))))


CHANGES = {
    'weights': change_weights,
    'config': change_config,
    'an image': lambda run, data: shutil.copy(data / 'val' / 'blue' / '0.png', data / 'val' / 'blue' / '1.png'),
    'a label': lambda run, data: (data / 'val' / 'blue' / '0.png').rename(data / 'val' / 'red' / '9.png'),
    'an image more': lambda run, data: shutil.copy(data / 'val' / 'red' / '0.png', data / 'val' / 'red' / '9.png'),
}
OTHER_OPTIONS = {
    'size': dict(img_size=(48, 48)),
    'crop': dict(crop_pct=0.5),
    'precision': dict(amp_dtype='bfloat16'),
    'arguments': dict(model_kwargs=dict(drop_rate=0.1)),
}


@pytest.mark.parametrize('change', ['nothing', *CHANGES, *OTHER_OPTIONS])
def test_scores_of_anything_else_are_computed_again(data, trained, tmp_path, change, capsys):
    run, images = shutil.copytree(trained, tmp_path / 'run'), shutil.copytree(data, tmp_path / 'data')
    options = EvalOptions(
        device=torch.device('cpu'),
        amp_dtype='float32',
        batch_size=4,
        workers=0,
        results_file=str(tmp_path / 'results.csv'),
    )

    def open_scores(options: EvalOptions) -> UnfinishedScores:
        loaded = load_model(str(run), img_size=options.img_size)
        config = fit_data_config(str(run), loaded.model, options.img_size, options.crop_pct)
        return UnfinishedScores(Evaluation(loaded, config, options), open_dataset(str(images), 'val'))

    open_scores(options).add(('fog', 3), 4, 10)
    CHANGES.get(change, lambda run, data: None)(run, images)
    scores = open_scores(replace(options, **OTHER_OPTIONS.get(change, {}), batch_size=8))
    assert scores.counts == ({('fog', 3): (4, 10)} if change == 'nothing' else {})
    assert ('computing all again' in capsys.readouterr().err) == (change != 'nothing')


def test_scores_of_several_models_are_kept(data, trained, tmp_path, computed):
    other = save_classifier(tmp_path / 'other', answer='blue')
    argv = ['--data-dir', str(data), '--corrupt', '--workers', '0', '--results-file', str(tmp_path / 'results.csv')]
    interrupt_after(2, validate, [str(trained), *argv])
    interrupt_after(3, validate, [str(other), *argv])
    computed.clear()
    records = validate([str(trained), str(other), *argv])
    assert sum(computed.values()) == 10 * (2 * len(CONDITIONS) - 5)
    assert records[1]['corrupt_top1'] == 50 and not (tmp_path / 'results.csv.unfinished').exists()


def test_an_evaluation_without_corruptions_keeps_what_another_has_begun(data, trained, tmp_path, computed):
    argv = [str(trained), '--data-dir', str(data), '--workers', '0', '--results-file', str(tmp_path / 'results.csv')]
    interrupt_after(4, validate, [*argv, '--corrupt'])
    validate(argv)
    assert (tmp_path / 'results.csv.unfinished').is_file()
    validate([*argv, '--corrupt'])
    assert computed == dict.fromkeys(CONDITIONS, 10)


def test_scores_of_a_model_that_is_not_evaluated_are_kept(data, trained, tmp_path, computed):
    other = save_classifier(tmp_path / 'other', answer='blue')
    argv = ['--data-dir', str(data), '--corrupt', '--workers', '0', '--results-file', str(tmp_path / 'results.csv')]
    interrupt_after(2, validate, [str(other), *argv])
    validate([str(trained), *argv])
    assert list(json.loads((tmp_path / 'results.csv.unfinished').read_text())) == [str(other)]


def test_a_file_that_cannot_be_read_gets_one_sentence(data, trained, tmp_path):
    (tmp_path / 'results.csv.unfinished').write_text('{')
    argv = [str(trained), '--data-dir', str(data), '--corrupt', '--workers', '0']
    with pytest.raises(UserError, match='cannot read .*unfinished.*; remove it to compute the corruptions again'):
        validate([*argv, '--results-file', str(tmp_path / 'results.csv')])


def validate_in_process(argv: list[str]) -> None:
    robustness.CONDITIONS = CONDITIONS
    validate(argv)
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_continue_what_one_has_begun(data, trained, tmp_path, computed):
    argv = [str(trained), '--data-dir', str(data), '--corrupt', '--workers', '0', '--batch-size', '3']
    validate([*argv, '--results-file', str(tmp_path / 'whole.json')])
    interrupt_after(9, validate, [*argv, '--results-file', str(tmp_path / 'halves.json')])
    outcome = start_processes(2, validate_in_process, [*argv, '--results-file', str(tmp_path / 'halves.json')])
    assert outcome.codes == [0, 0], outcome.err
    assert outcome.err.count('9 corruptions are in') == 1
    assert scores_in(tmp_path / 'halves.json') == scores_in(tmp_path / 'whole.json')
