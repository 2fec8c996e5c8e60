"""The table of docs/transfer.md."""

import docs_transfer
import pytest


def test_the_table_of_transfers_is_current():
    page = docs_transfer.PAGE.read_text()
    results = docs_transfer.results_table(docs_transfer.read_results())
    assert docs_transfer.fill(page, {'results': results}) == page, 'run `make docs`'


@pytest.mark.parametrize(('kept', 'name'), [(0, '`ls`'), (2, '`ls` and 2 softmax')])
def test_a_result_has_its_scores_in_the_table(kept, name):
    score = {'score': 50.125}
    settings = dict(teacher='runs/teacher', mixer='ls', keep_softmax=kept, steps=74, network_steps=148)
    settings['validation_images'] = 3925
    result = dict(settings=settings, kind='top1', seconds=dict(matching=90.0, network=60.0), teacher=dict(score=60.0))
    result |= dict.fromkeys(docs_transfer.STAGES, score) | dict(controls=dict(zero=dict(score=10.0)))
    result |= dict(network_rates=dict(lr=1.13e-5, new_lr=1.13e-4))
    caption, *_, line = docs_transfer.results_table([result]).splitlines()
    assert caption == '**74 + 148 steps**; teacher, top-1 of 3,925 images'
    assert line.startswith(f'| {name} | 1.1e-05 | 60.00 | 50.12 |')
    assert line.endswith('| 10.00 |  |  |  | 2.5 |')


def test_the_picture_has_the_mixers_of_the_budget_with_most_steps(tmp_path):
    def result(mixer, steps, score, kept=0):
        settings = dict(teacher='runs/teacher', mixer=mixer, keep_softmax=kept, steps=steps, network_steps=9)
        scores = {key: dict(score=score) for key in ('teacher', *docs_transfer.STAGES)}
        return scores | dict(settings=dict(settings, validation_images=100), kind='top1')

    results = [
        result('ls', 8, 85.0),
        result('xca', 8, 50.0),
        *(result(name, 1, 90.0) for name in ('pool', 'ls', 'xca')),
        result('ls', 8, 80.0),
    ]
    drawn = docs_transfer.largest_group([*results, result('xca', 8, 95.0, kept=2)])
    # of two students with the same mixer the later one
    assert {found['settings']['mixer']: found['student']['score'] for found in drawn} == {'ls': 80.0, 'xca': 50.0}
    docs_transfer.draw_stages(tmp_path / 'transfer.png', drawn)
    assert (tmp_path / 'transfer.png').read_bytes().startswith(b'\x89PNG')
