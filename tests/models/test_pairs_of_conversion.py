"""Every two values of two options of `vitzoo convert` in one conversion, whose folder is that of the same in Python."""

import json
import shutil
from pathlib import Path

import pytest
import timm
import torch
from pairs import Forbidden, assert_covered, covering_array, for_each_sentence, refused_row
from readers import READERS, read, run_loaded
from safetensors.torch import load_file
from sources import LABELS, SOURCES, arguments_of, save_converted, save_source, write_file
from timm.models import save_for_hf
from tiny import MakeOnce, make_data

import vitzoo
from vitzoo.about import read_about
from vitzoo.classes import label_names
from vitzoo.convert import convert, main
from vitzoo.data import resolve_data_config
from vitzoo.data.held_out import HELD_OUT
from vitzoo.load import load_model

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures('quick_timing', 'fresh_accelerate')]

MIXERS = {
    'softmax': {},
    'performer': dict(num_features=8),
    'ls': dict(window_size=1, rank=2),
    'linear': dict(dwc='v', center_keys=True),
    'linformer': dict(rank=4),
    'nystrom': dict(num_landmarks=4),
    'swin': dict(window_size=2),
    'pool': dict(pool_size=5),
    'aft_full': dict(bias_dim=4),
    'aft_conv': dict(kernel_size=3),
    'synthesizer': {},
}
# they do not compare queries with keys
WITHOUT_ROPE = ('pool', 'aft_full', 'aft_conv', 'synthesizer')
SIZES = {'own': None, '48': (48, 48), '32 x 48': (32, 48)}
FACTORS = {
    'source': tuple(SOURCES),
    # the options, in which FOLDER is the source, BASE one with other weights, and NAME its architecture
    'way': (
        'FILE --model NAME',
        'FILE --model FOLDER',
        '--from FOLDER SWAP',
        '--from FOLDER --random-weights SWAP',
        '--from BASE --checkpoint FILE SWAP',
        '--from NAME --checkpoint FILE SWAP',
        '--from FOLDER TO',
        '--from FOLDER --random-weights TO',
        '--from BASE --checkpoint FILE TO',
        '--from NAME --checkpoint FILE TO',
    ),
    # in the folder, or elsewhere, in the formats of other programs
    'file': ('folder', 'safetensors', 'model', 'module', 'ema', 'lightning'),
    'folder': ('path', 'local-dir', 'config.json'),
    'converted': ('no', 'yes'),
    'mixer': tuple(MIXERS),
    'blocks': ('all', 'numbers', 'ranges'),
    'size': tuple(SIZES),
    'channels': ('color', 'grey', 'to grey'),
    'head': ('own', 'several', 'none'),
    'classes': ('kept', '7', '0'),
    'about': ('plain', 'map', 'held out'),
    'out': ('new', 'below new', 'empty', 'other files'),
    'reader': tuple(READERS),
}
SIZED = [name for name, (_, kwargs, _) in SOURCES.items() if kwargs is not None]
WITHOUT_CHILD = [name for name, (_, _, child) in SOURCES.items() if not child]
FILE_WAYS = [way for way in FACTORS['way'] if way.startswith('FILE')]
SWAPS, CHILDREN = ([way for way in FACTORS['way'] if way.endswith(end)] for end in ('SWAP', 'TO'))
BY_NAME = [way for way in FACTORS['way'] if 'NAME' in way]
WITH_FILE = [way for way in FACTORS['way'] if 'FILE' in way]
TRAINED_SWAPS = ['--from FOLDER SWAP', '--from BASE --checkpoint FILE SWAP', '--from NAME --checkpoint FILE SWAP']
FORBIDDEN = (
    Forbidden('way', CHILDREN, 'source', WITHOUT_CHILD, ''),
    # the arguments that are given are those of the new model
    Forbidden('way', ['--from NAME --checkpoint FILE TO'], 'source', [name for name in SIZED if SOURCES[name][2]], ''),
    Forbidden('way', ['--from NAME --checkpoint FILE TO'], 'channels', ['grey'], 'does not fit'),
    # timm builds it for one size
    Forbidden('source', ['cait'], 'size', ['48', '32 x 48'], 'does not fit'),
    # a name has attention, and a swapped one is no name
    Forbidden('way', BY_NAME, 'converted', ['yes'], ''),
    Forbidden('way', BY_NAME, 'source', ['swapped'], ''),
    Forbidden('way', [way for way in WITH_FILE if way not in CHILDREN], 'channels', ['to grey'], 'does not fit'),
    Forbidden('way', FILE_WAYS, 'classes', ['7'], 'has 3 classes'),
    Forbidden('way', ['--from FOLDER SWAP'], 'classes', ['7', '0'], 'does not fit the weights'),
    Forbidden('way', TRAINED_SWAPS[1:], 'classes', ['7'], 'has 3 classes'),
)
ROWS = covering_array(FACTORS, FORBIDDEN)


@pytest.fixture(scope='module')
def make_once(tmp_path_factory) -> MakeOnce:
    return MakeOnce(tmp_path_factory.mktemp('made'))


def find_data(row: dict[str, str], make_once: MakeOnce) -> str:
    kind = 'labels' if row['head'] == 'several' else 'folder'
    return make_once(make_data, f'{kind} undivided' if row['about'] == 'held out' else kind)


def find_source(row: dict[str, str], make_once: MakeOnce, seed: int = 0) -> Path:
    channels = 'grey' if row['channels'] == 'grey' else 'color'
    data_dir = find_data(row, make_once)
    folder = make_once(save_source, row['source'], row['head'], channels, row['about'], data_dir, seed)
    return make_once(save_converted, folder) if row['converted'] == 'yes' else folder


def to_words(kwargs: dict) -> list[str]:
    return [f'{key}={json.dumps(value)}' for key, value in kwargs.items() if value is not None]


def chosen_arguments(row: dict[str, str]) -> dict:
    """Arguments of the model that the user changes."""
    size = SIZES[row['size']]
    kwargs = {} if size is None else dict(img_size=size[0] if size[0] == size[1] else size)
    kwargs |= dict(in_chans=1) if row['channels'] == 'to grey' else {}
    return kwargs | ({} if row['classes'] == 'kept' else dict(num_classes=int(row['classes'])))


def command_line(row: dict[str, str], make_once: MakeOnce) -> list[str]:
    """The options of `vitzoo convert` that a row stands for, but for --out."""
    way, mixer, kwargs = row['way'], row['mixer'], MIXERS[row['mixer']]
    folder, base = (find_source(row, make_once, seed) for seed in (0, 1))
    name, _, child = SOURCES[row['source']]
    swap = {
        'all': ['--swap', mixer],
        'numbers': ['--swap', mixer, '--blocks', '1'],
        'ranges': ['--swap', f'{mixer}:0,softmax:1' if mixer != 'softmax' else 'softmax:0-1'],
    }[row['blocks']]
    if kwargs:
        words = to_words(kwargs)
        swap += ['--mixer-kwargs', *(to_words({mixer: kwargs}) if row['blocks'] == 'ranges' else words)]
    spelled = {'path': '{}', 'local-dir': 'local-dir:{}', 'config.json': '{}/config.json'}[row['folder']]
    filled = {
        'FOLDER': [spelled.format(folder)],
        'BASE': [spelled.format(base)],
        'NAME': [name],
        'FILE': [str(make_once(write_file, row['file'], folder))] if 'FILE' in way else [],
        'SWAP': swap,
        'TO': ['--to', child.format(mixer)],
    }
    chosen = chosen_arguments(row)
    if way.endswith('TO') and kwargs:
        chosen |= dict(mixer_kwargs=kwargs)
    if way.endswith('TO') and row['source'] == 'rope' and mixer in WITHOUT_ROPE:
        chosen['pos_embed'] = 'none'
    elif 'NAME' in way and not way.endswith('TO'):
        num_classes = len(LABELS[row['head']])
        chosen = arguments_of(row['source'], num_classes, 1 if row['channels'] == 'grey' else 3) | chosen
    words = [word for part in way.split() for word in filled.get(part, [part])]
    return [*words, '--model-kwargs', *to_words(chosen)] if chosen else words


def convert_in_python(row: dict[str, str], folder: Path, out: Path, seed: int) -> torch.nn.Module:
    """The model that a row makes of its source; values that are not from the source depend on the seed."""
    torch.manual_seed(seed)
    way, size, chosen = row['way'], SIZES[row['size']], chosen_arguments(row)
    if way.endswith('TO'):
        return inherit_in_python(row, folder, out)
    num_classes = chosen.pop('num_classes', None)
    if size is not None:
        chosen['img_size'] = size
    if row['source'] == 'pvt' and row['converted'] == 'no':
        # its mixers only have an image size, which a file elsewhere does not tell
        size = size or ((224, 224) if 'NAME' in way and row['file'] != 'folder' else None)
        chosen.pop('img_size', None)
    if 'random' in way:
        given = {} if num_classes is None else dict(num_classes=num_classes)
        model = timm.create_model(f'local-dir:{folder}', **chosen, **given)
    else:
        model = load_model(str(folder), model_kwargs=chosen).model
        if num_classes == 0:
            model.reset_classifier(0)
    if way.endswith('SWAP'):
        blocks, mixer = {'all': None, 'numbers': [1], 'ranges': [0]}[row['blocks']], row['mixer']
        vitzoo.swap_mixer(model, mixer, blocks, **MIXERS[mixer])
        if row['blocks'] == 'ranges':
            vitzoo.swap_mixer(model, 'softmax', [1], **(MIXERS[mixer] if mixer == 'softmax' else {}))
    if size is not None and 'img_size' not in chosen and hasattr(model, 'set_input_size'):
        model.set_input_size(size)
    return model.eval()


def inherit_in_python(row: dict[str, str], folder: Path, out: Path) -> torch.nn.Module:
    """The model of a name with the arguments in its folder, and the weights of the source."""
    source = timm.create_model(f'local-dir:{folder}', pretrained='random' not in row['way'])
    if SIZES[row['size']] is not None and hasattr(source, 'set_input_size'):
        source.set_input_size(SIZES[row['size']])
    config = json.loads((out / 'config.json').read_text())
    model = timm.create_model(config['architecture'], **config['model_args'] | dict(num_classes=config['num_classes']))
    weights = source.state_dict()
    if row['channels'] == 'to grey':
        (name,) = (name for name in weights if name in ('patch_embed.proj.weight', 'stages.0.embed.proj.weight'))
        weights[name] = weights[name].sum(dim=1, keepdim=True)
    vitzoo.inherit_weights(model, weights)
    return model.eval()


def assert_weights(row: dict[str, str], folder: Path, out: Path) -> torch.nn.Module:
    """The folder has every value that comes from its source; returns the model in Python with its weights."""
    found = load_file(out / 'model.safetensors')
    one, other = (convert_in_python(row, folder, out, seed) for seed in (1, 2))
    expected, second = one.state_dict(), other.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        is_known = tensor == second[name]
        assert found[name].shape == tensor.shape, name
        assert torch.equal(found[name][is_known], tensor[is_known]), name
    if row['way'].startswith('FILE'):
        assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
    one.load_state_dict(found)
    return one


def find_facts(row: dict[str, str], make_once: MakeOnce) -> Path | None:
    """The folder that describes the weights."""
    source, base = (find_source(row, make_once, seed) for seed in (0, 1))
    if 'FOLDER' in row['way'] or row['file'] == 'folder':
        return source
    return base if 'BASE' in row['way'] else None


def assert_config(row: dict[str, str], out: Path, facts: Path | None) -> dict:
    """The folder describes its weights as the folder that these are from does; returns its data config."""
    model = timm.create_model(f'local-dir:{out}', pretrained=True)
    name = SOURCES[row['source']][0]
    described = timm.create_model(name if facts is None else f'local-dir:{facts}')
    config, usual = resolve_data_config(model), resolve_data_config(described)
    in_chans = 3 if row['channels'] == 'color' else 1
    side = 128 if row['source'] == 'named' else 32
    size = SIZES[row['size']] or (side, side)
    if row['source'] == 'pvt' and facts is None and row['size'] == 'own':
        size = (224, 224)
    expected = usual | dict(input_size=(in_chans, *size))
    if len(usual['mean']) != in_chans:
        expected |= {key: (sum(usual[key]) / 3,) for key in ('mean', 'std')}
    for key in expected:
        assert config[key] == (pytest.approx(expected[key]) if key in ('mean', 'std') else expected[key]), key
    kept = facts is not None and row['classes'] == 'kept'
    assert label_names(model) == (label_names(described) if kept else [])
    about, source = read_about(str(out)), {} if facts is None or 'random' in row['way'] else read_about(str(facts))
    for key in ('multi_label', 'data_dir', 'class_map'):
        assert about.get(key) == source.get(key), key
    assert ('held_out' in about) == ('held_out' in source)
    if 'held_out' in source:
        assert about['held_out'].read_bytes() == source['held_out'].read_bytes()
    return config


def save_twin(row: dict[str, str], twin: torch.nn.Module, config: dict, facts: Path | None, folder: Path) -> Path:
    """The folder of a model in Python, with what describes it."""
    about = {} if facts is None or 'random' in row['way'] else read_about(str(facts))
    held_out = about.pop('held_out', None)
    twin.pretrained_cfg.pop('label_names', None)
    has_names = facts is not None and row['classes'] == 'kept'
    names = json.loads((facts / 'config.json').read_text()).get('label_names') if has_names else None
    description = dict(label_names=names, vitzoo=about)
    save_for_hf(twin, str(folder), safe_serialization=True, data_config=config, model_config=description)
    if held_out:
        shutil.copy(held_out, folder / HELD_OUT)
    return folder


def has_logits_of_source(row: dict[str, str], printed: str) -> bool:
    """True if nothing that a conversion changes, as it says itself, changes the logits."""
    if 'random' in row['way'] or row['classes'] != 'kept' or row['channels'] == 'to grey':
        return False
    if row['way'].endswith('SWAP'):
        had_softmax = row['source'] not in ('swin', 'pvt', 'ls', 'swapped') and row['converted'] == 'no'
        return row['mixer'] == 'softmax' and had_softmax
    is_same = 'computed otherwise' not in printed and 'initialized none' in printed and 'dropped none' in printed
    return row['way'].endswith('TO') and is_same and row['mixer'] == 'softmax'


@pytest.mark.parametrize(
    'row', ROWS, ids=lambda row: f'{row["source"]}-{row["mixer"]}-{row["reader"]}'.replace(' ', '_')
)
def test_a_pair_of_options_makes_the_folder_of_the_same_in_python(row, make_once, tmp_path, capsys):
    out = tmp_path / ('a/b/out' if row['out'] == 'below new' else 'out')
    if row['out'] in ('empty', 'other files'):
        out.mkdir()
    if row['out'] == 'other files':
        (out / 'notes.txt').write_text('mine')
    arguments = command_line(row, make_once)
    capsys.readouterr()
    convert([*arguments, '--out', str(out)])
    printed = capsys.readouterr().out
    assert (out / 'notes.txt').is_file() == (row['out'] == 'other files')
    source, facts, data_dir = find_source(row, make_once), find_facts(row, make_once), find_data(row, make_once)
    twin = assert_weights(row, source, out)
    config = assert_config(row, out, facts)
    size = config['input_size'][1:]
    folder = save_twin(row, twin, config, facts, tmp_path / 'twin')
    if has_logits_of_source(row, printed):
        # the layer scale of a parent is multiplied into the layers before it
        tolerance = 0 if row['way'].endswith('SWAP') else 1e-5
        torch.testing.assert_close(run_loaded(out), run_loaded(source, size), rtol=tolerance, atol=tolerance)
    found, expected = (read(row['reader'], place, data_dir, tmp_path) for place in (out, folder))
    assert found == expected


@for_each_sentence(FORBIDDEN)
def test_a_pair_that_is_refused_gets_one_sentence(rule, make_once, tmp_path, capsys):
    row = refused_row(FACTORS, rule)
    if rule.factor == 'way' and 'NAME' in row['way']:
        row['source'] = 'named'
    with pytest.raises(SystemExit) as end:
        main([*command_line(row, make_once), '--out', str(tmp_path / 'out')])
    assert end.value.code == 2 and rule.sentence in capsys.readouterr().err
    assert not (tmp_path / 'out').exists()


def test_the_conversions_cover_every_pair_that_is_not_refused(capsys):
    number = assert_covered(FACTORS, FORBIDDEN, ROWS)
    with capsys.disabled():
        print(f'\n{len(FACTORS)} options of convert, {number} pairs of values, {len(ROWS)} conversions')
