"""Fixtures of the tests that train."""

import pytest


@pytest.fixture(scope='module', autouse=True)
def quick_curves():
    """Do not plot curves.png, which would take longer than the epochs that it shows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('vitzoo.figures.draw_history', lambda folder, history: (folder / 'curves.png').touch())
        yield
