"""The tables of docs/study.md."""

import csv
import json
import re

import docs_models
import docs_study
import pytest
import yaml
from docs_models import read_rows
from studies import write_study

from vitzoo.data.corruptions import CORRUPTIONS
from vitzoo.errors import UserError
from vitzoo.options import find_config


def test_the_tables_of_the_study_are_current():
    page = docs_study.PAGE.read_text()
    tables = {'imagenette': docs_study.study_tables(), 'robustness': docs_study.robustness_table()}
    assert docs_study.fill(page, tables) == page, 'run `make docs`'
    assert docs_study.study_page() == docs_study.REPORT.read_text(), 'run `make docs`'


def test_every_accuracy_of_a_cell_is_in_the_results_of_all_models():
    cells = [(re.search(r', cell ([^,]+)', row['reference']), row['top1']) for row in read_rows()]
    shown = {found[1]: top1 for found, top1 in cells if found}
    for (way, model, seed, evaluation), record in docs_study.read_cells().items():
        if evaluation == docs_study.MAIN:
            assert float(shown.pop(f'{way}/{model}/seed-{seed}')) == round(float(record['top1']), 2)
    assert shown == {}


def test_the_groups_of_corruptions_are_those_of_imagenet_c(tmp_path, monkeypatch):
    scores = {name: [number] * 5 for number, name in enumerate(CORRUPTIONS)}
    monkeypatch.setattr(docs_study, 'ROBUSTNESS', tmp_path / 'robustness.csv')
    with docs_study.ROBUSTNESS.open('w', newline='') as file:
        writer = csv.writer(file)
        writer.writerow(['model', 'top1', 'corrupt_top1', 'corrupt_relative', 'corrupt'])
        writer.writerow(['cvt_nano.vz_imagenette', 80, 40, 50, json.dumps(scores)])
    # noise 0 to 2, blur 3 to 6, weather 7 to 10, digital 11 to 14
    assert '| cvt_nano | 80.0 | 40.0 | 50 % | 1.0 | 4.5 | 8.5 | 12.5 |' in docs_study.robustness_table()
    assert list(CORRUPTIONS)[::4] == ['gaussian_noise', 'glass_blur', 'frost', 'elastic_transform']


@pytest.mark.parametrize('top1', ['61.25', '99.5'])
def test_a_cell_is_compared_with_its_baseline(tmp_path, monkeypatch, top1):
    lines = [('cvt', 'cvt_softmax_nano', '60.0'), ('cvt', 'cvt_ls_nano', top1)]
    monkeypatch.setattr(docs_study, 'CELLS', tmp_path / 'cells.csv')
    with docs_study.CELLS.open('w', newline='') as file:
        writer = csv.DictWriter(file, ['way', 'model', 'seed', 'evaluation', *docs_study.METRICS])
        writer.writeheader()
        for way, model, accuracy in lines:
            writer.writerow(dict(way=way, model=model, seed=0, evaluation='clean', top1=accuracy))
    text = docs_study.study_tables()
    assert f'| cvt_ls_nano | 1 | {float(top1):.2f} | +{float(top1) - 60:.2f} |' in text
    cells = docs_study.read_study(docs_study.STUDY).cells
    assert f'0 of {len(cells)} cells are finished.' in text


@pytest.fixture
def copies(tmp_path, monkeypatch):
    """Copies of the results in weights/."""
    for module, name in ((docs_study, 'CELLS'), (docs_models, 'RESULTS')):
        source = getattr(module, name)
        monkeypatch.setattr(module, name, tmp_path / source.name)
        (tmp_path / source.name).write_bytes(source.read_bytes())
    for name in ('PAGE', 'PICTURE', 'REPORT'):
        monkeypatch.setattr(docs_study, name, tmp_path / name)


def test_results_of_models_that_were_removed_from_the_study_are_kept(tmp_path, copies):
    values = yaml.safe_load(find_config(docs_study.STUDY).read_text()) | dict(output=str(tmp_path / 'nothing'))
    cells, results = docs_study.read_cells(), read_rows()
    for way in (None, 'cvt_converted'):
        values['ways'].pop(way, None)
        (tmp_path / 'study.yaml').write_text(yaml.safe_dump(values, sort_keys=False))
        study = docs_study.read_study(str(tmp_path / 'study.yaml'))
        docs_study.merge_cells(study)
        docs_study.write_results(study)
        # the records are the same, those of the removed way last
        assert docs_study.read_cells() == cells
        assert [*docs_study.read_cells()] == sorted(cells, key=lambda key: key[0] == way)
        assert read_rows() == sorted(results, key=lambda row: f', cell {way}/' in row['reference'])


def test_another_study_is_refused(tmp_path, copies):
    before = docs_study.CELLS.read_bytes()
    with pytest.raises(UserError, match="is the study 'study', but weights/ has only 'Mixers on Imagenette"):
        docs_study.main([write_study(tmp_path)])
    assert docs_study.CELLS.read_bytes() == before
