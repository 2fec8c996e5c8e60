"""`vitzoo export`: the file gives the model's logits for any batch size, and says what preprocessing needs."""

import json
from functools import partial
from unittest.mock import Mock

import pytest
import timm
import torch
from timm.models import save_for_hf
from torch._export.verifier import SpecViolationError

import vitzoo
from vitzoo.data import resolve_data_config
from vitzoo.errors import UserError
from vitzoo.export import command, main
from vitzoo.export.command import export_to_file
from vitzoo.export.formats import FILE_FORMATS, NOT_IN_TORCH_2_6, Format, write_file
from vitzoo.load import LoadedModel, find_model

NAMES = ['blue', 'grün', 'red']
# torch 2.6 cannot read its own file
READABLE = 'onnx' if torch.__version__.startswith('2.6') else 'torch'
# the import of OpenVINO, and its compiler, take seconds
formats = pytest.mark.parametrize('to', ['torch', 'onnx', pytest.param('openvino', marks=pytest.mark.slow)])


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """The folder of a swapped model with class names, as training writes it."""
    folder = tmp_path_factory.mktemp('runs') / 'swapped'
    torch.manual_seed(0)
    model = timm.create_model('vit_tiny_patch16_224', depth=1, embed_dim=24, num_heads=2, img_size=32, num_classes=3)
    model = vitzoo.swap_mixer(model, 'linear')
    torch.nn.init.normal_(model.head.weight)
    save_for_hf(
        model, folder, model_config=dict(label_names=NAMES, vitzoo=dict(multi_label=True)), safe_serialization=True
    )
    return folder


TEXTS = ('model', 'weights', 'license', 'vitzoo', 'interpolation', 'crop_mode')
FACTS = (*TEXTS, 'class_names', 'multi_label', 'input_size', 'mean', 'std', 'crop_pct')


def read_facts(to, path):
    """The metadata of a file, by the packages of its format only."""
    if to == 'onnx':
        import onnxruntime

        facts = onnxruntime.InferenceSession(path).get_modelmeta().custom_metadata_map
    elif to == 'openvino':
        import openvino

        model = openvino.Core().read_model(path)
        facts = {key: model.get_rt_info(['vitzoo', key]).value for key in FACTS}
    else:
        extra = {'vitzoo': ''}
        torch.export.load(path, extra_files=extra)
        return json.loads(extra['vitzoo'])
    return {key: value if key in TEXTS else json.loads(value) for key, value in facts.items()}


@formats
def test_the_file_gives_the_logits_of_the_model_and_what_preprocessing_needs(to, trained, tmp_path, capsys):
    for package in FILE_FORMATS[to].packages:
        pytest.importorskip(package)
    path = tmp_path / f'model{FILE_FORMATS[to].suffix}'
    if to == 'torch' and torch.__version__.startswith('2.6'):
        with pytest.raises(UserError, match='cannot read its file .* use torch 2.7 or --to onnx'):
            export_to_file([str(trained), '--to', to, '--out', str(path)])
        assert not path.exists()
        return
    export_to_file([str(trained), '--to', to, '--out', str(path)])
    assert 'largest difference from the logits of the model: ' in capsys.readouterr().out
    model = timm.create_model(f'local-dir:{trained}', pretrained=True).eval()
    run = FILE_FORMATS[to].open(path)
    for batch_size in (1, 4):
        images = torch.randn(batch_size, 3, 32, 32)
        with torch.no_grad():
            torch.testing.assert_close(run(images), model(images), rtol=1e-4, atol=1e-5)
    facts = read_facts(to, path)
    assert sorted(facts) == sorted(FACTS)
    assert facts['class_names'] == NAMES and facts['input_size'] == [3, 32, 32] and facts['multi_label'] is True
    assert facts['weights'] == 'trained' and facts['vitzoo'] == vitzoo.__version__
    config = model.pretrained_cfg
    for key in ('mean', 'std', 'interpolation', 'crop_pct', 'crop_mode', 'license'):
        expected = config[key]
        assert facts[key] == (list(expected) if isinstance(expected, tuple) else expected)


@pytest.mark.slow
def test_a_rectangular_size_and_a_checkpoint_are_exported(trained, tmp_path):
    out = tmp_path / f'model{FILE_FORMATS[READABLE].suffix}'
    checkpoint = trained / 'model.safetensors'
    export_to_file(
        [str(trained), '--checkpoint', str(checkpoint), '--to', READABLE, '--img-size', '32x48', '--out', str(out)]
    )
    facts = read_facts(READABLE, out)
    assert facts['input_size'] == [3, 32, 48] and facts['weights'] == 'checkpoint'
    assert FILE_FORMATS[READABLE].open(out)(torch.zeros(1, 3, 32, 48)).shape == (1, 3)


def test_a_model_without_weights_is_exported_only_if_asked(tmp_path, monkeypatch):
    # the exporter takes seconds for each block
    monkeypatch.setattr(timm, 'create_model', partial(timm.create_model, depth=1))
    out = tmp_path / f'a{FILE_FORMATS[READABLE].suffix}'
    argv = ['deit_linear_nano', '--to', READABLE, '--img-size', '32', '--out', str(out)]
    with pytest.raises(UserError, match='there are no weights of deit_linear_nano'):
        export_to_file(argv)
    assert not out.exists()
    export_to_file([*argv, '--random-weights'])
    assert read_facts(READABLE, out)['weights'] == 'random weights'


def test_sinkhorn_with_whole_blocks_is_exported(tmp_path):
    torch.manual_seed(0)
    model = timm.create_model('deit_sinkhorn_nano', depth=1, embed_dim=24, num_heads=2, img_size=32)
    path, images = tmp_path / f'model{FILE_FORMATS[READABLE].suffix}', torch.randn(2, 3, 32, 32)
    write_file(READABLE, model.eval(), images, path, {})
    with torch.no_grad():
        torch.testing.assert_close(FILE_FORMATS[READABLE].open(path)(images), model(images), rtol=1e-4, atol=1e-5)


def test_a_file_that_torch_cannot_read_is_one_sentence(tmp_path, monkeypatch):
    error = SpecViolationError('a node is missing\nsome field')
    monkeypatch.setattr(torch.export, 'load', Mock(side_effect=error))
    for version, advice in {'2.6.0+cpu': 'torch 2.7 or --to onnx', '2.14.1': '--to onnx'}.items():
        monkeypatch.setattr(torch, '__version__', version)
        with pytest.raises(UserError) as raised:
            FILE_FORMATS['torch'].open(tmp_path / 'a.pt2')
        assert str(raised.value) == f'torch {version} cannot read its file (a node is missing); use {advice}'


@pytest.mark.parametrize('to', ['onnx', 'openvino'])
def test_a_mixer_that_a_format_lacks_is_refused_before_it_is_traced(to, tmp_path, monkeypatch):
    monkeypatch.setattr(command, 'check_packages', lambda *args: None)
    model = timm.create_model('deit_reformer_nano', depth=1, img_size=32)
    with pytest.raises(UserError, match=f'{to} has no form of reformer'):
        write_file(to, model, torch.zeros(2, 3, 32, 32), tmp_path / 'a.onnx', {})


@pytest.mark.parametrize('mixer', NOT_IN_TORCH_2_6)
def test_torch_2_6_is_refused_for_fourier_transforms(mixer, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, '__version__', '2.6.0+cpu')
    model = timm.create_model(f'deit_{mixer}_nano', depth=1, img_size=32)
    with pytest.raises(UserError, match=rf'^torch 2\.6\.0\+cpu cannot export {mixer}; use torch 2\.7$'):
        write_file('torch', model, torch.zeros(2, 3, 32, 32), tmp_path / 'a.pt2', {})


def test_the_classes_of_a_file_are_in_the_order_of_the_logits():
    model = timm.create_model('deit_linear_nano', num_classes=12)
    loaded = LoadedModel('deit_linear_nano', model, 'random weights')
    facts = command.describe_export(loaded, resolve_data_config(model))
    assert facts['class_names'] == [*map(str, range(12))]


def test_a_folder_is_the_same_run_by_timms_name_for_it(trained):
    assert find_model(f'local-dir:{trained}') == find_model(str(trained)) == str(trained)


def test_the_reason_of_a_failed_export_is_its_cause(monkeypatch, tmp_path):
    def fail(*args):
        try:
            raise TypeError('\x1b[96mno such operator\x1b[0m\nand more')
        except TypeError as error:
            raise RuntimeError('step 2 of 3\nfailed') from error

    monkeypatch.setitem(FILE_FORMATS, 'torch', Format('.pt2', (), fail, None))
    model = timm.create_model('deit_linear_nano', depth=1).eval()
    with pytest.raises(UserError, match='^DeiT cannot be exported to torch: no such operator$'):
        write_file('torch', model, torch.randn(2, 3, 128, 128), tmp_path / 'a.pt2', {})


@pytest.mark.parametrize('batch_size', [1, 2, 3])
def test_a_difference_in_one_batch_is_found(batch_size):
    batches = command.random_batches((3, 4, 4))

    def run(images):
        return images + (len(images) == batch_size)

    difference, largest = command.compare_logits(lambda images: images, run, batches)
    assert difference == pytest.approx(1, abs=1e-6) and largest == max(images.abs().max() for images in batches)


@pytest.mark.parametrize('wrong', [2.0, float('nan')])
def test_a_file_whose_logits_differ_is_not_kept(wrong, trained, tmp_path, monkeypatch):
    monkeypatch.setattr(command, 'write_file', lambda file_format, model, images, path, facts: path.write_text('x'))
    model = timm.create_model(f'local-dir:{trained}', pretrained=True).eval()
    monkeypatch.setitem(FILE_FORMATS, 'torch', Format('.pt2', (), None, lambda path: lambda x: wrong * model(x)))
    out = tmp_path / 'kept.pt2'
    out.write_text('of before')
    with pytest.raises(UserError, match=r'logits of the torch file of .* differ .* more than --tolerance 0.001 allows'):
        export_to_file([str(trained), '--to', 'torch', '--out', str(out)])
    assert [path.name for path in tmp_path.iterdir()] == ['kept.pt2'] and out.read_text() == 'of before'


@pytest.mark.parametrize(
    ('argv', 'message'),
    [
        ('nothing --to onnx --out a.onnx', "unknown model 'nothing'"),
        ('deit_linear_nano --to onnx --out a.xml', "cannot tell the format of 'a.xml': its name must end in .onnx"),
        ('deit_linear_nano --to torch --img-size 7 --out a.pt2', 'deit_linear_nano cannot'),
        ('deit_linear_nano --to onnx --out a.ONNX', "the name of the file 'a.ONNX' must end in .onnx in lower case"),
        (
            'deit_linear_nano --to onnx --num-classes 3 --out a.onnx',
            '--num-classes 3 is for the weights of a --checkpoint',
        ),
        (
            'deit_linear_nano --to onnx --model-kwargs num_classes=3 --out a.onnx',
            '--model-kwargs num_classes=3 is not taken here; give --num-classes',
        ),
        ('deit_linear_nano --to openvino --out a.xml', 'needs packages that are not installed: pip install nowhere'),
    ],
)
def test_a_mistake_is_one_sentence(argv, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ('onnx', 'openvino'):
        packages = ('nowhere',) if name == 'openvino' else ()
        monkeypatch.setitem(FILE_FORMATS, name, Format(FILE_FORMATS[name].suffix, packages, None, None))
    with pytest.raises(SystemExit) as end:
        main(argv.split())
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith('vitzoo: error: ') and message in error and error.count('\n') == 1
    assert list(tmp_path.iterdir()) == []
