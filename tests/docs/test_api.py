"""The public names of the package, and docs/api.md, which describes them."""

import inspect
from pathlib import Path

import docs_api
import pytest

NAMES = Path(__file__).parents[1] / 'public_names.txt'
OBJECTS = {
    f'{package}.{name}': value
    for package, objects in docs_api.public_objects().items()
    for name, value in objects.items()
}


def test_the_public_names_are_those_decided_on():
    assert NAMES.read_text().split() == sorted(OBJECTS), (
        'edit tests/public_names.txt, run `make docs`, and mention a name that is removed in CHANGELOG.md'
    )


@pytest.mark.parametrize('name', [name for name, value in OBJECTS.items() if not inspect.ismodule(value)])
def test_a_public_name_has_a_sentence_on_the_page(name):
    sentence = docs_api.first_sentence(OBJECTS[name])
    assert sentence.endswith('.')
    assert f'### `{name.rpartition(".")[2]}`' in docs_api.PAGE.read_text(encoding='utf-8')


def test_the_page_of_the_api_is_current():
    assert docs_api.PAGE.read_text(encoding='utf-8') == docs_api.render(), 'run `make docs`'


def test_a_signature_is_that_of_the_source(monkeypatch):
    def short(x: int, *rest: str, flag=True, **others: float) -> 'list[int]': ...

    assert docs_api.signature('short', short) == (
        "short(x: int, *rest: str, flag=True, **others: float) -> 'list[int]'"
    )

    monkeypatch.setattr(docs_api, 'WIDTH', 70)

    class Long:
        def __init__(self, first: int, second: int = 1, *, third: str = 'a' * 40, fourth: str = 'b' * 40) -> None: ...

    assert docs_api.signature('Long', Long).splitlines() == [
        'Long(',
        '    first: int,',
        '    second: int = 1,',
        '    *,',
        "    third: str = 'a' * 40,",
        "    fourth: str = 'b' * 40,",
        ')',
    ]


def test_a_page_uses_a_name_that_is_in_its_code():
    assert '[swap](swap.md)' in docs_api.pages_with('swap_mixer')
    # a word of prose, and part of an option
    assert docs_api.pages_with('photographs') == docs_api.pages_with('mixer_kwargs_of') == []
