import errno
import io
import os
import re
import runpy
import subprocess
import sys
import warnings
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest
import timm

import vitzoo
from vitzoo import errors
from vitzoo.cli import COMMANDS, main
from vitzoo.errors import RankError, UserError, run_command
from vitzoo.options import check_output, keyword

ROOT = Path(__file__).parents[1]


def fail(error: BaseException):
    def command(argv):
        raise error

    return command


def test_a_mistake_is_one_sentence_and_exit_code_2(capsys):
    with pytest.raises(SystemExit) as end:
        run_command(fail(UserError('the folder is\nempty')))
    assert end.value.code == 2
    assert capsys.readouterr() == ('', 'vitzoo: error: the folder is empty\n')


def test_an_output_file_is_opened_before_the_work(tmp_path):
    path = tmp_path / 'a' / 'results.csv'
    check_output(str(path), ('.csv',))
    assert path.parent.is_dir() and not path.exists()
    path.write_text('1,2')
    check_output(str(path), ('.csv',))
    assert path.read_text() == '1,2'
    (tmp_path / 'link.csv').symlink_to(tmp_path / 'nowhere' / 'results.csv')
    (tmp_path / 'folder.csv').mkdir()
    for name, reason in (('link.csv', 'No such file'), ('folder.csv', 'Is a directory')):
        with pytest.raises(UserError, match=f"cannot write '.*{name}': {reason}"):
            check_output(str(tmp_path / name), ('.csv',))


def test_a_warning_of_vitzoo_is_one_line_and_others_keep_their_form():
    lines = []

    def command(argv):
        for file in (vitzoo.__file__, 'elsewhere.py'):
            lines.append(warnings.formatwarning('many landmarks', UserWarning, file, 1))

    default = warnings.formatwarning
    run_command(command)
    assert lines == ['vitzoo: warning: many landmarks\n', default('many landmarks', UserWarning, 'elsewhere.py', 1)]
    assert warnings.formatwarning is default


@pytest.mark.parametrize(
    ('error', 'message'), [(UserError('empty'), ''), (RankError('empty'), 'vitzoo: error: empty\n')], ids=repr
)
def test_other_ranks_print_only_errors_of_their_own(error, message, capsys, monkeypatch):
    monkeypatch.setenv('RANK', '1')
    monkeypatch.setattr(errors, '_have_joined', lambda: True)
    with pytest.raises(SystemExit) as end:
        run_command(fail(error))
    assert end.value.code == 2
    assert capsys.readouterr() == ('', message)


@pytest.mark.parametrize(('rank', 'waits'), [('0', []), ('1', [errors.WAIT_SECONDS])])
def test_another_rank_waits_for_the_first_before_it_prints_an_error_that_it_may_share(rank, waits, capsys, monkeypatch):
    slept = []
    monkeypatch.setenv('RANK', rank)
    monkeypatch.setattr(errors.time, 'sleep', slept.append)
    with pytest.raises(SystemExit) as end:
        run_command(fail(UserError('empty')))
    assert (end.value.code, slept) == (2, waits)
    assert capsys.readouterr() == ('', 'vitzoo: error: empty\n')


def test_a_process_that_loses_another_one_says_so_in_one_sentence(capsys, monkeypatch):
    error = RuntimeError('[/pytorch/gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:29057.')
    monkeypatch.setenv('RANK', '1')
    with pytest.raises(RuntimeError):
        run_command(fail(error))
    monkeypatch.setattr(errors, '_have_joined', lambda: True)
    with pytest.raises(RuntimeError, match='shapes'):
        run_command(fail(RuntimeError('shapes cannot be multiplied')))
    with pytest.raises(SystemExit) as end:
        run_command(fail(error))
    assert end.value.code == 2
    message = 'vitzoo: error: process 1 ends, because another process has ended; see its error\n'
    assert capsys.readouterr() == ('', message)


def test_an_interrupt_is_exit_code_130(capsys):
    with pytest.raises(SystemExit) as end:
        run_command(fail(KeyboardInterrupt()))
    assert end.value.code == 130
    assert 'Traceback' not in capsys.readouterr().err


def test_a_reader_that_goes_away_ends_the_command_quietly():
    command = [sys.executable, '-m', 'vitzoo', 'list', '--all']
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        child.stdout.close()
        assert child.stderr.read() == b''
        assert child.wait(timeout=120) == 141


@pytest.mark.skipif(not Path('/dev/full').exists(), reason='only Linux has a device that is always full')
def test_a_full_disk_is_one_sentence(monkeypatch):
    command = [sys.executable, '-m', 'vitzoo', 'list']
    with open('/dev/full', 'w') as full:
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr == 'vitzoo: error: the disk is full, so the output cannot be written\n'
    # the output of the tests is still needed
    monkeypatch.setattr(errors, '_discard_output', lambda: None)
    with pytest.raises(SystemExit) as end:
        run_command(fail(OSError(errno.ENOSPC, 'No space left on device', 'metrics.csv')))
    assert end.value.code == 2


@pytest.mark.parametrize(
    ('number', 'sentence'),
    [
        (errno.EACCES, "no permission to read or write 'runs/a'; change its permissions, or name another place"),
        (errno.EPERM, "no permission to read or write 'runs/a'; change its permissions, or name another place"),
        (errno.EROFS, "'runs/a' is on a read-only disk; name another place"),
        (errno.EDQUOT, "the quota of the disk is used up, so 'runs/a' cannot be written"),
    ],
)
def test_a_path_that_may_not_be_used_is_one_sentence(number, sentence, capsys, monkeypatch):
    monkeypatch.setattr(errors, '_discard_output', lambda: None)
    with pytest.raises(SystemExit) as end:
        run_command(fail(OSError(number, os.strerror(number), 'runs/a')))
    assert end.value.code == 2
    assert capsys.readouterr().err == f'vitzoo: error: {sentence}\n'


@pytest.mark.parametrize('words', [['validate'], ['doctor'], ['train', '--config']])
def test_a_name_that_is_too_long_for_a_file_is_one_sentence(words, capsys):
    name = 300 * 'a'
    with pytest.raises(SystemExit) as end:
        main([*words, name])
    assert end.value.code == 2
    assert re.fullmatch(rf"vitzoo: error: '{name}\S*' is too long .* shorten it\n", capsys.readouterr().err)


def test_characters_that_the_terminal_lacks_are_printed_as_escapes(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, 'stdout', io.TextIOWrapper(written, encoding='ascii'))
    run_command(lambda argv: print('Haus\u00e4'))
    assert written.getvalue() == rb'Haus\xe4' + os.linesep.encode()


def test_a_bug_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        run_command(fail(ZeroDivisionError()))


def test_a_command_gets_its_arguments():
    seen = []
    run_command(seen.append, ['a', 'b'])
    assert seen == [['a', 'b']]


@pytest.mark.parametrize('argv', ([], ['--help'], ['-h'], ['help']))
def test_help_names_every_command_in_a_line(argv, capsys):
    main(argv)
    lines = capsys.readouterr().out.splitlines()
    for command, summary in COMMANDS.items():
        assert any(re.fullmatch(rf'  {command} +{re.escape(summary)}', line) for line in lines)


def test_the_version_is_printed_with_those_of_torch_and_timm(capsys):
    main(['--version'])
    words = capsys.readouterr().out
    assert words.startswith(f'vitzoo {vitzoo.__version__}, torch {version("torch")}, timm {timm.__version__}, ')


@pytest.mark.parametrize(('command', 'hint'), [('validat', 'validate'), ('trian', 'train'), ('xyz', 'validate')])
def test_an_unknown_command_gets_close_ones(command, hint, capsys):
    with pytest.raises(SystemExit) as end:
        main([command])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert f"unknown command '{command}'" in error and hint in error


@pytest.mark.parametrize(
    ('words', 'sentence'),
    [
        (
            'list --mixer=x',
            "argument --mixers: ignored explicit argument 'x'; `vitzoo list --help` describes the arguments",
        ),
        ('cite', 'the following arguments are required: MODEL; `vitzoo cite --help` describes the arguments'),
        ('validate deit_ls_nano --imgsize 32', 'unrecognized arguments: --imgsize 32, did you mean --img-size'),
        (
            'predict x --model y --top-k 0',
            "argument --top-k: '0' is not a whole number of 1 or more; `vitzoo predict --h",
        ),
        ('bench mixers --device meta', "argument --device: cannot use the device 'meta'; `vitzoo bench mixers --h"),
        ('predict x --model y --device hpu', "argument --device: cannot use the device 'hpu'; `vitzoo predict --h"),
    ],
)
def test_a_wrong_argument_is_one_sentence_without_the_usage(words, sentence, capsys):
    with pytest.raises(SystemExit) as end:
        main(words.split())
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f'vitzoo: error: {sentence}') and error.count('\n') == 1


@pytest.mark.parametrize(
    ('word', 'value'),
    [
        ('k=None', None),
        ('k=null', None),
        ('k=3', 3),
        ('k=[1, 2]', [1, 2]),
        ('k=no', False),
        ('k=True', True),
        ('k=a=b', 'a=b'),
    ],
)
def test_a_keyword_has_a_value_in_yaml_or_none(word, value):
    assert keyword(word) == ('k', value)


def test_a_wrong_argument_is_printed_by_the_first_process_only(capsys, monkeypatch):
    monkeypatch.setenv('RANK', '1')
    monkeypatch.setattr(errors, '_have_joined', lambda: True)
    with pytest.raises(SystemExit) as end:
        main(['cite'])
    assert end.value.code == 2
    assert capsys.readouterr() == ('', '')


@pytest.mark.parametrize('command', COMMANDS)
def test_every_command_has_help_of_its_own(command, capsys):
    assert callable(import_module(f'vitzoo.{command}').main)
    with pytest.raises(SystemExit) as end:
        main([command, '--help'])
    assert end.value.code == 0
    assert f'vitzoo {command}' in capsys.readouterr().out


def test_list_shows_vitzoo_models(capsys):
    main(['list'])
    names = capsys.readouterr().out.split()
    assert 'cvt_ls_13' in names and 'deit_performer_small' in names
    assert 'resnet50' not in names and 'deit_tiny_patch16_224' not in names
    assert set(names) <= set(timm.list_models())


def test_list_takes_a_wildcard_and_all_of_timm(capsys):
    main(['list', 'cvt_*'])
    names = capsys.readouterr().out.split()
    assert 'cvt_13' in names and all(name.startswith('cvt_') for name in names)
    main(['list', 'resnet5*', '--all'])
    assert 'resnet50' in capsys.readouterr().out.split()
    with pytest.raises(SystemExit) as end:
        main(['list', 'cvt_nothing'])
    assert end.value.code == 2
    assert 'cvt_nothing' in capsys.readouterr().err


def test_list_shows_trained_weights_with_their_tags(capsys):
    main(['list', '--pretrained', 'cvt_*'])
    names = capsys.readouterr().out.split()
    assert {'cvt_13.msft_in1k', 'cvt_softmax_nano.vz_imagenette'} <= set(names)
    assert all('.' in name for name in names) and set(names) <= set(timm.list_pretrained())
    with pytest.raises(SystemExit) as end:
        main(['list', '--pretrained', 'deit_linear_small'])
    assert end.value.code == 2
    answer = capsys.readouterr().err
    assert "no model with trained weights matches 'deit_linear_small'" in answer
    assert answer.count('deit_linear_small') == 1
    with pytest.raises(SystemExit):
        main(['list', '--pretrained', 'cvt_softmax_nan'])
    assert 'did you mean cvt_softmax_nano' in capsys.readouterr().err


def test_an_empty_pattern_matches_nothing(capsys):
    with pytest.raises(SystemExit) as end:
        main(['list', ''])
    assert end.value.code == 2 and "no model matches ''" in capsys.readouterr().err


def test_list_shows_the_mixers(capsys):
    main(['list', '--mixers'])
    assert capsys.readouterr().out.split() == vitzoo.list_mixers()
    main(['list', '--mixers', 'aft_s*'])
    assert capsys.readouterr().out.split() == ['aft_simple']


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (['nystrm'], "no mixer matches 'nystrm', did you mean nystrom?"),
        (['--pretrained'], 'leave out --pretrained and --all'),
        (['--all'], 'leave out --pretrained and --all'),
    ],
)
def test_mixers_that_cannot_be_listed_are_one_sentence(options, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(['list', '--mixers', *options])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ('start', 'argv'),
    [
        (lambda: runpy.run_module('vitzoo', run_name='__main__'), ['validate']),
        (lambda: runpy.run_module('vitzoo.validate', run_name='__main__'), []),
        (lambda: runpy.run_path(str(ROOT / 'validate.py'), run_name='__main__'), []),
    ],
    ids=['python -m vitzoo validate', 'python -m vitzoo.validate', 'python validate.py'],
)
def test_a_command_fails_in_the_same_way_however_it_is_started(start, argv, monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['vitzoo', *argv, 'resnet5000', '--no-data'])
    with pytest.raises(SystemExit) as end:
        start()
    assert end.value.code == 2
    output, error = capsys.readouterr()
    assert output == ''
    assert error.startswith("vitzoo: error: unknown model 'resnet5000', did you mean resnet50")
    assert len(error.splitlines()) == 1
