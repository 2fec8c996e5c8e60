"""The note about a head that was trained on other classes."""

from classifiers import save_classifier

from vitzoo.train.build import build_model
from vitzoo.train.recipe import Recipe


def notes(capsys, folder, names):
    build_model(Recipe(model=str(folder)), len(names), names)
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith('note')]


def test_a_head_for_other_classes_is_kept_with_a_note(tmp_path, capsys):
    folder = save_classifier(tmp_path / 'run')
    (note,) = notes(capsys, folder, ['cat', 'dog', 'cow'])
    assert 'has a head for the classes blue, green, red; it is kept for the classes cat, dog, cow' in note
    assert notes(capsys, folder, ['blue', 'green', 'red']) == []
