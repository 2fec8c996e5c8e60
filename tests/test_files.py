"""Files that are replaced as a whole."""

import errno

import pytest
import timm
from processes import limited_files

from vitzoo._files import replace_file
from vitzoo._save import save_model


def test_a_file_is_replaced_by_a_whole_one_or_stays_as_it_was(tmp_path):
    path = tmp_path / 'a.json'
    path.write_text('old')
    with pytest.raises(KeyboardInterrupt), replace_file(path) as partial:
        partial.write_text('ne')
        raise KeyboardInterrupt
    assert path.read_text() == 'old' and list(tmp_path.iterdir()) == [path]
    with replace_file(path) as partial:
        partial.write_text('new')
    assert path.read_text() == 'new' and list(tmp_path.iterdir()) == [path]


def test_the_file_that_a_link_leads_to_is_replaced(tmp_path):
    path, link = tmp_path / 'a.json', tmp_path / 'link'
    link.symlink_to(path)
    with replace_file(link) as partial:
        partial.write_text('new')
    assert link.is_symlink() and path.read_text() == 'new'


def test_a_model_that_does_not_fit_on_the_disk_is_an_error_of_the_system(tmp_path):
    with pytest.raises(OSError, match=str(tmp_path)) as error, limited_files(100_000):
        save_model(tmp_path, timm.create_model('test_vit'))
    # that of a full disk is ENOSPC, which the commands report in a sentence
    assert error.value.errno == errno.EFBIG and list(tmp_path.iterdir()) == []
