"""Every two values of two options of `vitzoo export` in one file, which gives the logits of timm and describes them."""

import shutil
from pathlib import Path
from shlex import split

import pytest
import timm
import torch
from pairs import Forbidden, assert_covered, covering_array, for_each_sentence, refused_row
from sources import save_converted
from test_export import read_facts
from tiny import CLASSES, MODELS, MakeOnce, make_model

import vitzoo
from vitzoo.export import main
from vitzoo.export.command import export_to_file
from vitzoo.export.formats import FILE_FORMATS

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings('ignore')]

SIZES = {'own': (32, 32), '48': (48, 48), '32 x 48': (32, 48)}
NAMES = {'own': tuple(CLASSES), 'several': ('blue', 'first', 'grün', 'red'), 'none': ()}
FACTORS = {
    'model': tuple(MODELS),
    'to': ('torch', 'onnx'),
    # a folder, by timm's name of it, of `vitzoo convert`, with the --checkpoint of another, or a name with that
    'given': ('folder', 'local-dir', 'converted', 'checkpoint', 'file elsewhere', 'name'),
    'size': tuple(SIZES),
    'channels': ('color', 'grey'),
    'head': tuple(NAMES),
    'weights': ('own', 'random'),
    'crop': ('own', '0.7'),
    'arguments': ('own', 'drop'),
    'tolerance': ('usual', '1e-4'),
    'out': ('new', 'new folder', 'existing'),
}
MADE_BY_ARGUMENTS = [name for name, (_, kwargs) in MODELS.items() if kwargs]
FORBIDDEN = (
    Forbidden('model', ['deit_reformer'], 'to', ['onnx'], 'onnx has no form of reformer'),
    Forbidden('given', ['name'], 'model', MADE_BY_ARGUMENTS, 'does not fit'),
    Forbidden('given', ['name'], 'channels', ['grey'], 'does not fit'),
    Forbidden('given', ['name'], 'head', ['none'], ''),
    Forbidden('given', ['converted'], 'model', ['resnet'], ''),
)
ROWS = covering_array(FACTORS, FORBIDDEN)
PREPROCESSING = ('mean', 'std', 'interpolation', 'crop_pct', 'crop_mode')


@pytest.fixture(scope='module')
def make_once(tmp_path_factory) -> MakeOnce:
    return MakeOnce(tmp_path_factory.mktemp('made'))


def make_other(model: str, names: tuple[str, ...], in_chans: int, multi_label: bool, folder: Path) -> Path:
    """The folder of a model with other weights and names of the classes."""
    make_model(model, names[::-1], in_chans, not multi_label, folder)
    other = timm.create_model(f'local-dir:{folder}', pretrained=True)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    timm.models.save_for_hf(
        other, str(folder), safe_serialization=True, model_config=dict(label_names=list(names[::-1]))
    )
    return folder


def copy_file(folder: Path, root: Path) -> Path:
    return Path(shutil.copy(folder / 'model.safetensors', root / 'weights.safetensors'))


def find_folder(row: dict[str, str], make_once: MakeOnce, make=make_model) -> Path:
    in_chans = 1 if row['channels'] == 'grey' else 3
    folder = make_once(make, row['model'], NAMES[row['head']], in_chans, row['head'] == 'several')
    return make_once(save_converted, folder) if row['given'] == 'converted' else folder


def command_line(row: dict[str, str], out: Path, make_once: MakeOnce) -> list[str]:
    """The options of `vitzoo export` that a row stands for."""
    folder, (H, W) = find_folder(row, make_once), SIZES[row['size']]
    arguments = {
        'folder': lambda: [str(folder)],
        'converted': lambda: [str(folder)],
        'local-dir': lambda: [f'local-dir:{folder}'],
        'checkpoint': lambda: [
            str(find_folder(row, make_once, make_other)), '--checkpoint', str(folder / 'model.safetensors')
        ],
        'file elsewhere': lambda: [
            str(find_folder(row, make_once, make_other)), '--checkpoint', str(make_once(copy_file, folder))
        ],
        'name': lambda: [
            MODELS[row['model']][0], '--checkpoint', str(folder / 'model.safetensors'), '--num-classes',
            str(len(NAMES[row['head']])),
        ],
    }[row['given']]()  # fmt: skip
    options = '' if row['size'] == 'own' else f'--img-size {H}x{W} '
    options += '--random-weights ' if row['weights'] == 'random' else ''
    options += '' if row['crop'] == 'own' else f'--crop-pct {row["crop"]} '
    options += '' if row['arguments'] == 'own' else '--model-kwargs drop_rate=0.1 '
    options += '' if row['tolerance'] == 'usual' else f'--tolerance {row["tolerance"]}'
    return [*arguments, '--to', row['to'], '--out', str(out), *split(options)]


@pytest.mark.parametrize('row', ROWS, ids=lambda row: f'{row["model"]}-{row["to"]}-{row["given"]}'.replace(' ', '_'))
def test_a_pair_of_options_gives_a_file_with_the_logits_of_timm(row, make_once, tmp_path, capsys):
    suffix = FILE_FORMATS[row['to']].suffix
    out = tmp_path / ('a/b' if row['out'] == 'new folder' else '') / f'model{suffix}'
    if row['out'] == 'existing':
        out.write_text('of before')
    export_to_file(command_line(row, out, make_once))
    assert [path.name for path in out.parent.iterdir()] == [out.name]
    folder, size = find_folder(row, make_once), SIZES[row['size']]
    resized = dict(img_size=size) if row['model'] != 'resnet' and row['size'] != 'own' else {}
    model = timm.create_model(f'local-dir:{folder}', pretrained=True, **resized).eval()
    run = FILE_FORMATS[row['to']].open(out)
    in_chans = 1 if row['channels'] == 'grey' else 3
    for batch_size in (1, 2, 5):
        images = torch.randn(batch_size, in_chans, *size, generator=torch.Generator().manual_seed(batch_size))
        with torch.no_grad():
            torch.testing.assert_close(run(images), model(images), rtol=1e-3, atol=1e-4)
    assert_facts(row, read_facts(row['to'], out), folder, find_folder(row, make_once, make_other))


def assert_facts(row: dict[str, str], facts: dict, folder: Path, other: Path) -> None:
    """The metadata describe the weights."""
    in_chans = 1 if row['channels'] == 'grey' else 3
    assert facts['input_size'] == [in_chans, *SIZES[row['size']]] and facts['vitzoo'] == vitzoo.__version__
    is_elsewhere, has_file = row['given'] == 'file elsewhere', row['given'] in ('checkpoint', 'file elsewhere', 'name')
    config = dict(timm.create_model(f'local-dir:{other if is_elsewhere else folder}').pretrained_cfg)
    if row['crop'] != 'own':
        config['crop_pct'] = float(row['crop'])
    assert facts['class_names'] == list(config.get('label_names') or [])
    assert facts['multi_label'] == (row['head'] == 'several' and not is_elsewhere)
    assert facts['weights'] == ('checkpoint' if has_file else 'trained')
    for key in PREPROCESSING:
        assert facts[key] == (list(config[key]) if isinstance(config[key], tuple) else config[key]), key


@for_each_sentence(FORBIDDEN)
def test_a_pair_that_is_refused_gets_one_sentence(rule, make_once, tmp_path, capsys):
    row = refused_row(FACTORS, rule)
    out = tmp_path / f'model{FILE_FORMATS[row["to"]].suffix}'
    with pytest.raises(SystemExit) as end:
        main(command_line(row, out, make_once))
    assert end.value.code == 2 and rule.sentence in capsys.readouterr().err
    assert not out.exists()


def test_the_files_cover_every_pair_that_is_not_refused(capsys):
    number = assert_covered(FACTORS, FORBIDDEN, ROWS)
    with capsys.disabled():
        print(f'\n{len(FACTORS)} options of export, {number} pairs of values, {len(ROWS)} files')
