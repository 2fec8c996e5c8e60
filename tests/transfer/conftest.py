"""Fixtures of the tests of transfers."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope='module')
def no_drawing() -> Iterator[None]:
    """Drawing takes longer than training."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('vitzoo.figures.draw_history', lambda folder, history: (folder / 'curves.png').touch())
        yield
