"""Every two values of two options of `vitzoo transfer` in one tiny run, which survives an interruption.

It ends with a model that loads, with the scores of `vitzoo validate` and the bytes of a run that was not interrupted.
"""

import csv
import io
import json
import math
import shlex
import shutil
import signal
from contextlib import redirect_stdout
from pathlib import Path
from shlex import split

import pytest
import timm
import torch
import yaml
from pairs import Forbidden, assert_covered, covering_array, refused_row
from processes import assert_ended, at_free_ports, start_processes
from teachers import make_teacher
from timm.models import save_for_hf
from tiny import CLASSES, MakeOnce, install_datasets, make_data
from transfers import MOMENTS, interrupt_tiny, transfer_tiny

import vitzoo
from vitzoo.data import open_dataset, resolve_data_config
from vitzoo.data.held_out import HELD_OUT, write_held_out
from vitzoo.load import load_model
from vitzoo.mixers import mixer_class
from vitzoo.report.command import make_report
from vitzoo.transfer import main
from vitzoo.transfer.options import parse_args
from vitzoo.validate.command import validate

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures('quick_timing')]

BASE = split('--batch-size 8 --lr 1e-3')
PYRAMID = dict(depth=None, embed_dim=None, embed_dims=(16, 32), depths=(1, 1), num_heads=(2, 2))
# timm's name, and what differs from `make_teacher`
TEACHERS = {
    'vit': ('vit_tiny_patch16_224', {}),
    # without a class token
    'registers': ('vit_medium_patch16_reg4_gap_256', {}),
    'distilled': ('deit_tiny_distilled_patch16_224', {}),
    'beit': ('beit_base_patch16_224', {}),
    'dinov3': ('vit_small_patch16_dinov3', {}),
    'eva02': ('eva02_tiny_patch14_224', {}),
    'swin': (
        'swin_tiny_patch4_window7_224',
        dict(PYRAMID, embed_dim=16, embed_dims=None, patch_size=4, window_size=4),
    ),
    'pvt': ('pvt_v2_b0', dict(PYRAMID, img_size=None, patch_size=None, sr_ratios=(2, 1), mlp_ratios=(2, 2))),
    'cvt': ('cvt_softmax_nano', PYRAMID),
    'swapped': ('deit_softmax_nano', {}),
}
MIXERS = {
    'performer': '--mixer performer',
    'ls': '--mixer ls --mixer-kwargs window_size=1 rank=2',
    'linear': '--mixer linear',
    'nystrom': '--mixer nystrom --mixer-kwargs num_landmarks=4',
    'aft_conv': '--mixer aft_conv',
    'local': '--mixer local --mixer-kwargs block_size=2 memory_halo=1',
    'agent': '--mixer agent --mixer-kwargs num_cells=2',
    'routing': '--mixer routing',
    'two': '--mixer linear,pool --mixer-kwargs pool.pool_size=5',
}
OPTIONS = {
    'mixer': MIXERS,
    'size': {'own': '', '48': '--img-size 48', '32 x 48': '--img-size 32x48'},
    'steps': {'0': '--steps 0', '2': '--steps 2', '3': '--steps 3'},
    'network': {'0': '--network-steps 0', '2': '--network-steps 2', '3': '--network-steps 3'},
    'evals': {'1': '--evals 1', '2': '--evals 2', '5': '--evals 5'},
    'eval images': {'2': '--eval-images 2', 'fifth': ''},
    'rate': {
        'scaled': '--network-lr scaled',
        'auto': '--network-lr auto',
        'number': '--network-lr 1e-4',
        'two numbers': '--network-lr 1e-4 --network-new-lr 3e-3 --new-lr 1e-3',
    },
    'softmax': {
        '0': '',
        '1': '--keep-softmax 1',
        'auto': '--keep-softmax auto --tolerance 0',
        'auto at once': '--keep-softmax auto --tolerance 99',
    },
    'labels': {'no': '', 'yes': '--labels'},
    'weight': {'0.1': '', '0': '--block-weight 0'},
    'average': {
        'none': '',
        'ema': '--model-ema --model-ema-decay 0.5',
        'warmup': '--model-ema --model-ema-warmup',
    },
    'clipping': {
        'none': '',
        'norm': '--clip-grad 1',
        'value': '--clip-grad 0.1 --clip-mode value',
        'agc': '--clip-grad 0.02 --clip-mode agc',
    },
    'accumulation': {'1': '', '2': '--grad-accum-steps 2'},
    'checkpoints': {'evaluations': '', 'always': '--checkpoint-minutes 1e-6'},
    'control': {'no': '--no-random-control', 'random': ''},
    'sizes': {'none': '--sizes', '32': '--sizes 32', '32, 48': '--sizes 32 48'},
    'precision': {'float32': '', 'bfloat16': '--amp-dtype bfloat16'},
    'workers': {'0': '--workers 0', '1': '--workers 1'},
    'seed': {'0': '', '3': '--seed 3'},
    'map': {'none': '', 'recorded': '', 'given': '--class-map CLASS_MAP', 'subset': '--class-map SUBSET'},
}
FACTORS = {
    'teacher': tuple(TEACHERS),
    # of a folder, or of a file in it that is the --checkpoint of another folder
    'given': ('folder', 'local-dir', 'checkpoint'),
    'head': ('own', 'others', 'none', 'several'),
    'channels': ('color', 'grey'),
    'held out': ('none', 'listed'),
    'data': ('folder', 'folder undivided', 'tar', 'zip undivided', 'wds', 'hfds', 'labels', 'flat'),
    'config': ('no', 'yes'),
    'probe': ('no', 'before'),
    # the first process gets its signal earlier than others if it is skewed
    'end': ('none', 'sigterm', 'skewed sigterm', 'sigkill', 'overwrite'),
    'moment': tuple(MOMENTS),
    'call': ('1', '2'),
    'processes': ('1', '2'),
    'resumed by': ('as many', 'others'),
    'resumed with': ('the same', 'other workers', 'other accumulation'),
    **{name: tuple(values) for name, values in OPTIONS.items()},
}
FORBIDDEN = (
    Forbidden('teacher', ['dinov3'], 'mixer', ['aft_conv', 'two'], 'would lose its rotary positions'),
    Forbidden('labels', ['yes'], 'head', ['others'], '--labels needs images of the classes of'),
    Forbidden('labels', ['yes'], 'head', ['none'], 'but it has no head; leave --labels out'),
    Forbidden('labels', ['yes'], 'head', ['several'], 'predicts several labels; leave --labels out'),
    Forbidden('labels', ['yes'], 'data', ['flat'], 'no class folders; leave --labels out'),
    Forbidden('data', ['flat'], 'map', ['given', 'subset'], 'no class folders'),
)
ROWS = covering_array(FACTORS, FORBIDDEN)
LABELS = {
    'own': CLASSES,
    'others': ['cat', 'dog', 'owl'],
    'none': [],
    'several': ['blue', 'first', 'green', 'red'],
}
CLASS_MAP = dict(red='blue', blue='red', green='green')
SUBSET = dict(red='red', blue='blue')


@pytest.fixture(scope='module')
def make_once(tmp_path_factory) -> MakeOnce:
    return MakeOnce(tmp_path_factory.mktemp('made'))


def make_images_of(kind: str, root: Path) -> str:
    """As `make_data`; 'flat' has no class folders."""
    if kind != 'flat':
        return make_data(kind, root)
    files = sorted(Path(make_data('folder undivided', root)).rglob('*.jpg'))
    for number, file in enumerate(files):
        (root / 'flat').mkdir(exist_ok=True)
        shutil.copy(file, root / 'flat' / f'{number}.jpg')
    return str(root / 'flat')


def make_tiny(name: str, num_classes: int, channels: str) -> torch.nn.Module:
    """A teacher with random weights."""
    architecture, kwargs = TEACHERS[name]
    settings = dict(depth=2, img_size=32, num_classes=num_classes, in_chans=1 if channels == 'grey' else 3)
    model = make_teacher(architecture, **{**settings, **kwargs})
    return vitzoo.swap_mixer(model, ['softmax', 'linear']) if name == 'swapped' else model


def save_tiny(name: str, head: str, channels: str, has_map: bool, data_dir: str, root: Path) -> Path:
    """The folder of a teacher as training writes it; with `data_dir`, it held out images of it."""
    classes, in_chans = LABELS[head], 1 if channels == 'grey' else 3
    model = make_tiny(name, len(classes), channels)
    about = dict(multi_label=head == 'several') | (dict(class_map=CLASS_MAP) if has_map else {})
    data_config = dict(input_size=(in_chans, 32, 32), crop_pct=0.9, mean=(0.5,) * in_chans, std=(0.3,) * in_chans)
    config = dict(label_names=classes or None, vitzoo=about)
    save_for_hf(model, str(root), model_config=config, safe_serialization=True, data_config=data_config)
    if data_dir:
        images = open_dataset(data_dir, 'val', multi_label=head == 'several' and 'labels' in data_dir, val_fraction=0.2)
        if images.is_held_out:
            write_held_out(root / HELD_OUT, images.reader)
    return root


def save_base(name: str, head: str, channels: str, root: Path) -> Path:
    """The folder of a model with the architecture of a teacher, but with other weights and without names of classes."""
    save_for_hf(make_tiny(name, 0 if head == 'none' else 5, channels), str(root), safe_serialization=True)
    return root


def fill_in_maps(options: str, make_once: MakeOnce) -> list[str]:
    """The words of options that name class maps."""
    for name, content in dict(CLASS_MAP=CLASS_MAP, SUBSET=SUBSET).items():
        options = options.replace(name, make_once(write_class_map, json.dumps(content)))
    return split(options)


def write_class_map(content: str, root: Path) -> str:
    (root / 'map.json').write_text(content)
    return str(root / 'map.json')


def teacher_words(row: dict[str, str], folder: Path, make_once: MakeOnce) -> list[str]:
    """The teacher as `vitzoo transfer` and `vitzoo validate` take it."""
    if row['given'] != 'checkpoint':
        return [f'local-dir:{folder}' if row['given'] == 'local-dir' else str(folder)]
    base = make_once(save_base, row['teacher'], row['head'], row['channels'])
    words = [str(base), '--checkpoint', str(folder / 'model.safetensors')]
    return words if row['head'] == 'none' else [*words, '--num-classes', str(len(LABELS[row['head']]))]


def find_teacher(row: dict[str, str], data_dir: str, make_once: MakeOnce) -> Path:
    listed = data_dir if row['held out'] == 'listed' and row['data'] != 'flat' else ''
    return make_once(save_tiny, row['teacher'], row['head'], row['channels'], row['map'] == 'recorded', listed)


def option_words(row: dict[str, str], data_dir: str, make_once: MakeOnce) -> list[str]:
    """The options of `vitzoo transfer` that a row stands for, but for those of the teacher and the output."""
    options = ' '.join(values[row[option]] for option, values in OPTIONS.items())
    return [*BASE, *fill_in_maps(options, make_once), '--data-dir', data_dir]


def to_config(words: list[str], file: Path) -> list[str]:
    """Move options to a file for --config."""
    options: dict[str, list] = {}
    for word in words:
        if word.startswith('--'):
            options[word] = []
        else:
            options[[*options][-1]].append(word)
    content = {}
    for flag, values in options.items():
        name = flag.removeprefix('--').replace('-', '_')
        if name == 'mixer_kwargs':
            content[name] = dict(value.split('=') for value in values)
        else:
            content[name] = True if not values and name != 'sizes' else values if len(values) != 1 else values[0]
    file.write_text(yaml.safe_dump(content))
    return ['--config', str(file)]


def must_be_reached(row: dict[str, str]) -> bool:
    """True if a run certainly comes to the moment of its interruption."""
    return {
        'probe': row['call'] == '1',
        'matching': row['call'] == '1' or row['steps'] != '0',
        'softmax': row['softmax'] == '1' and row['call'] == '1',
        'rates': row['rate'] == 'auto' and row['network'] != '0',
        'network': row['network'] != '0',
        'controls': row['call'] == '1',
        'export': row['call'] == '1',
    }[row['moment']]


def interrupt(row: dict[str, str], arguments: list[str], run: Path, results: Path) -> None:
    """Do what the row says before a run: a transfer that is interrupted, or another one in its folder."""
    world, end, arguments = int(row['processes']), row['end'], [*arguments, '--output', str(run)]
    if end == 'overwrite':
        arguments += split('--seed 7 --steps 1 --network-steps 0 --no-random-control')
        assert_ended(start_processes(world, transfer_tiny, at_free_ports([arguments]), str(results)))
    if end in ('none', 'overwrite'):
        return
    number = signal.SIGKILL if end == 'sigkill' else signal.SIGTERM
    skew = int(end == 'skewed sigterm')
    outcome = start_processes(world, interrupt_tiny, arguments, row['moment'], int(row['call']), number, skew)
    # processes that have lost another one end with an error
    expected = {'sigkill': {0, -signal.SIGKILL}, 'skewed sigterm': {0, 2}}.get(end, {0})
    assert set(outcome.codes) <= expected, outcome.err[-5000:]
    assert 'Traceback' not in outcome.err
    stopped = outcome.out.count('stopped by SIGTERM')
    assert stopped <= (end != 'sigkill')
    if must_be_reached(row):
        assert stopped or -signal.SIGKILL in outcome.codes


def resuming_words(row: dict[str, str]) -> list[str]:
    """Options of a run after what `interrupt` did."""
    if row['end'] in ('none', 'overwrite'):
        return ['--overwrite'] if row['end'] == 'overwrite' else []
    changes = {'other workers': '--workers 1 --checkpoint-minutes 0', 'other accumulation': '--grad-accum-steps 2'}
    return ['--resume', *split(changes.get(row['resumed with'], ''))]


@pytest.mark.parametrize('row', ROWS, ids=lambda row: f'{row["data"]}-{row["teacher"]}'.replace(' ', '_'))
def test_a_pair_of_options_is_transferred_resumed_loaded_and_validated(row, make_once, tmp_path):
    install_datasets()
    data_dir = make_once(make_images_of, row['data'])
    folder, world, file = find_teacher(row, data_dir, make_once), int(row['processes']), tmp_path / 'results.json'
    words = option_words(row, data_dir, make_once)
    if row['config'] == 'yes':
        words = to_config(words, tmp_path / 'options.yaml')
    arguments, run, twin = [*teacher_words(row, folder, make_once), *words], tmp_path / 'run', tmp_path / 'twin'
    interrupt(row, arguments, run, file)
    runs = [[*arguments, *resuming_words(row), '--output', str(run)]]
    is_resumed = row['end'] not in ('none', 'overwrite')
    # the numbers of another division of batches are rounded in another way
    is_same = not is_resumed or (row['resumed by'] == 'as many' and row['resumed with'] != 'other accumulation')
    if is_same and row['end'] != 'none':
        runs.append([*arguments, '--output', str(twin)])
    else:
        twin = run
    if row['probe'] == 'before':
        runs.insert(0, [*arguments, '--probe-only'])
    world = 3 - world if is_resumed and row['resumed by'] == 'others' else world
    outcome = start_processes(world, transfer_tiny, at_free_ports(runs), str(file))
    assert_ended(outcome)

    results = json.loads(file.read_text())
    if row['probe'] == 'before':
        assert_same_probes(results.pop(0), results[0])
    for result in results[0]:
        mixer = result['settings']['mixer']
        own = run / mixer if row['mixer'] == 'two' else run
        assert_same_files(own, twin / mixer if row['mixer'] == 'two' else twin)
        assert json.loads((own / 'transfer.json').read_text()) == json.loads(json.dumps(result))
        assert_results(row, result)
        assert_model(row, own, folder, result)
        assert_scores(row, own, teacher_words(row, folder, make_once), result, data_dir, make_once, tmp_path / 'page')


def assert_same_probes(probes: list[dict], results: list[dict]) -> None:
    """--probe-only gives the numbers of the first stage, which do not depend on the number of processes."""
    found = [probe['probe'] for probe in probes]
    assert json.dumps(found) == json.dumps([result['probe'] for result in results])


def read_results(folder: Path) -> dict:
    """transfer.json without times, and without what depends on the machine, with nan equal to itself."""
    results = json.loads((folder / 'transfer.json').read_text(), parse_constant=str)
    return {key: value for key, value in results.items() if key not in ('seconds', 'machine')}


def assert_same_files(folder: Path, other: Path) -> None:
    """Two folders have the same files."""
    assert read_results(folder) == read_results(other)
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in other.iterdir())
    for name in ('model.safetensors', 'config.json', 'metrics.csv'):
        assert (folder / name).read_bytes() == (other / name).read_bytes(), name


def expected_kind(row: dict[str, str]) -> str:
    """The measure of a student."""
    if row['data'] == 'flat' or (row['head'] == 'several' and row['data'] == 'labels'):
        return 'cosine'
    return 'top1' if row['head'] == 'own' else 'knn'


def num_rows(steps: int, evals: int) -> int:
    """Rows of a stage: its start and its evaluations."""
    return 1 + math.ceil(steps / max(1, steps // evals))


def assert_results(row: dict[str, str], result: dict) -> None:
    assert result['kind'] == expected_kind(row)
    steps, network, evals = (int(row[name]) for name in ('steps', 'network', 'evals'))
    # pooling has no parameters that could match attention
    matching = 1 if result['settings']['mixer'] == 'pool' else num_rows(steps, evals)
    assert [len(result[stage]) for stage in ('matching', 'network')] == [matching, num_rows(network, evals)]
    for stage in ('matching', 'network'):
        best = [min(r['output_error'], r.get('ema_output_error', math.inf)) for r in result[stage] if r['best']]
        assert best == sorted(best, reverse=True) and math.isfinite(best[-1])
        assert ('ema_output_error' in result[stage][-1]) == (
            stage == 'network' and row['average'] != 'none' and row['network'] != '0'
        )
    assert ('keep_softmax' in result) == (row['softmax'] != '0')
    if row['softmax'] != '0':
        last = result['keep_softmax'][-1]
        assert len(last['kept']) == len(result['keep_softmax']) - 1
        blocks = len(result['probe'])
        if row['softmax'] == '1':
            assert len(last['kept']) == 1
        elif last['gap'] > (0 if row['softmax'] == 'auto' else 99):
            assert len(last['kept']) == blocks - 1
        assert result['hybrid']['score'] == pytest.approx(result['teacher']['score'] - last['gap'])
    assert ('network_trials' in result) == (row['rate'] == 'auto' and network > 0)
    assert ('random' in result['controls']) == (row['control'] == 'random')
    assert 'zero' in result['controls']
    sides = {side for side in row['sizes'].split(', ') if side != 'none'}
    assert result['images_per_second'].keys() == sides
    assert all({'teacher', 'student'} <= pair.keys() for pair in result['images_per_second'].values())
    if network == 0:
        assert result['student'] == result['hybrid']
    if row['softmax'] == '0':
        assert result['hybrid'] == result['matched']
    if steps == 0:
        assert result['start'] == result['matched']


def assert_model(row: dict[str, str], run: Path, folder: Path, result: dict) -> None:
    """The folder of a student is a model for the images and classes of its teacher, whose weights it starts from."""
    model, teacher = (timm.create_model(f'local-dir:{path}', pretrained=True).eval() for path in (run, folder))
    assert load_model(str(run)).weights == 'trained'
    config, expected = resolve_data_config(model), resolve_data_config(teacher)
    side = {'own': (32, 32), '48': (48, 48), '32 x 48': (32, 48)}[row['size']]
    assert config == expected | dict(input_size=(expected['input_size'][0], *side))
    assert model.pretrained_cfg.get('label_names') == teacher.pretrained_cfg.get('label_names')
    assert model.num_classes == teacher.num_classes == len(LABELS[row['head']])
    assert model(torch.zeros(1, *config['input_size'])).isfinite().all()
    if row['steps'] == row['network'] == row['softmax'] == '0':
        assert_inherits(row, model, folder, result)
    with (run / 'metrics.csv').open(newline='') as file:
        stages = [line['stage'] for line in csv.DictReader(file)]
    assert stages == ['matching'] * len(result['matching']) + ['network'] * len(result['network'])


def assert_inherits(row: dict[str, str], model: torch.nn.Module, folder: Path, result: dict) -> None:
    """A student that was not trained has the weights of `vitzoo.swap_mixer`, but for terms that start at 0."""
    settings = result['settings']
    mixer, seed = settings['mixer'], settings['seed']
    size = None if row['size'] == 'own' else tuple(settings['img_size'])
    other = load_model(str(folder), img_size=size).model
    torch.manual_seed(seed)
    vitzoo.swap_mixer(other, mixer, **settings['mixer_kwargs'])
    if size and not hasattr(load_model(str(folder)).model, 'set_input_size'):
        other.set_input_size(img_size=size)
    found, expected = model.state_dict(), other.state_dict()
    assert found.keys() == expected.keys()
    terms = tuple(f'.{name}' for name in mixer_class(mixer).added_terms)
    different = [name for name in found if not torch.equal(found[name], expected[name])]
    assert [name for name in different if not any(term in name for term in terms)] == []


def validate_once(words: tuple[str, ...], folder: Path) -> dict:
    (record,) = validate([*words, '--workers', '0', '--batch-size', '8'])
    return record


def assert_scores(
    row: dict[str, str], run: Path, words: list[str], result: dict, data_dir: str, make_once: MakeOnce, page: Path
) -> None:
    """`vitzoo validate` gives the scores of the student and of the teacher, and `vitzoo report` has a page of them."""
    data = ['--data-dir', data_dir, '--amp-dtype', row['precision'], '--workers', '0', '--batch-size', '8']
    has_classes = result['kind'] == 'top1' or (row['head'] == 'several' and row['data'] == 'labels')
    if not has_classes:
        data = ['--no-data']
    with redirect_stdout(io.StringIO()):
        make_report([str(run), *data, '--out', str(page)])
    (record,) = json.loads((page / 'report.json').read_text())['records']
    assert result['verdict'] in (page / 'index.html').read_text().replace('&#x27;', "'")
    assert_command(record, result)
    if not has_classes:
        return
    assert record['n'] == result['settings']['validation_images']
    if result['kind'] != 'top1':
        return
    assert record['top1'] == pytest.approx(result['student']['top1'])
    if 'undivided' in row['data'] and row['held out'] == 'none':
        # without a list of what is held out, all images would be validation images
        return
    size = [] if row['size'] == 'own' else ['--img-size', row['size'].replace(' ', '')]
    options = fill_in_maps(OPTIONS['map'][row['map']], make_once)
    teacher = make_once(validate_once, (*words, *data[:4], *size, *options))
    assert teacher['top1'] == pytest.approx(result['teacher']['top1'])


def assert_command(record: dict, result: dict) -> None:
    """The command in a report has the options of the transfer."""
    (command,) = record['commands']
    program, name, *words = shlex.split(command)
    assert (program, name) == ('vitzoo', 'transfer')
    settings = json.loads(json.dumps(parse_args(words).settings))
    own = ('mixer', 'mixer_kwargs', 'training_images', 'validation_images')
    found = {key: value for key, value in result['settings'].items() if key not in own}
    assert {key: value for key, value in settings.items() if key not in own} == found


@pytest.mark.usefixtures('fresh_accelerate')
@pytest.mark.parametrize('rule', FORBIDDEN, ids=lambda rule: f'{rule.factor}-{rule.other}-{rule.other_values[0]}')
def test_a_pair_that_is_refused_gets_one_sentence(rule, make_once, tmp_path, capsys):
    row = refused_row(FACTORS, rule)
    data_dir = make_once(make_images_of, row['data'])
    folder = find_teacher(row, data_dir, make_once)
    words = [*teacher_words(row, folder, make_once), *option_words(row, data_dir, make_once)]
    with pytest.raises(SystemExit) as end:
        main([*words, '--output', str(tmp_path / 'run')])
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith('vitzoo: error: '))
    assert end.value.code == 2 and rule.sentence in line
    assert not (tmp_path / 'run').exists()


def test_the_runs_cover_every_pair_that_is_not_refused(capsys):
    number = assert_covered(FACTORS, FORBIDDEN, ROWS)
    with capsys.disabled():
        print(f'\n{len(FACTORS)} options of transfer, {number} pairs of values, {len(ROWS)} runs')
