"""Export to ONNX: the exported model gives the same logits in onnxruntime."""

from pathlib import Path

import pytest
import timm
import torch
from helpers import build_model as build
from helpers import images, mixers_of_ours, one_in
from timm.models import save_for_hf
from torch import nn

import vitzoo
from vitzoo.export.formats import NOT_IN_ONNX, trace

onnxruntime = pytest.importorskip('onnxruntime')
pytest.importorskip('onnxscript')

OPSET = 18
IN_ONNX = [mixer for mixer in vitzoo.list_mixers() if mixer not in NOT_IN_ONNX]
DOCS = Path(__file__).resolve().parents[2] / 'docs' / 'export.md'


def run_exported(model, x, path):
    program = trace(model, x[:2])
    torch.onnx.export(program, f=path, opset_version=OPSET, dynamo=True, verbose=False, external_data=False)
    session = onnxruntime.InferenceSession(path, providers=['CPUExecutionProvider'])
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])


# the exporter takes seconds for each mixer
@pytest.mark.parametrize('mixer', one_in(30, IN_ONNX))
@pytest.mark.filterwarnings('ignore')
def test_an_onnx_model_gives_the_same_logits(mixer, tmp_path):
    model, x = build(f'deit_{mixer}_tiny', depth=1), images()
    with torch.no_grad():
        expected = model(x)
    torch.testing.assert_close(run_exported(model, x, tmp_path / 'model.onnx'), expected, rtol=1e-4, atol=1e-5)


class OnGrid(nn.Module):
    """A mixer of tokens on its own grid."""

    def __init__(self, mixer):
        super().__init__()
        self.mixer = mixer

    def forward(self, x):
        return self.mixer(x, self.mixer.grid_size)


@pytest.mark.parametrize(
    'mixer',
    [pytest.param(mixer, marks=[] if mixer in ('local', 'relu_linear') else pytest.mark.slow) for mixer in IN_ONNX],
)
@pytest.mark.filterwarnings('ignore')
def test_an_onnx_mixer_without_prefix_tokens_takes_any_batch_size(mixer, tmp_path):
    # few channels, so that some tokens have no feature that is not 0
    torch.manual_seed(0)
    module = OnGrid(vitzoo.create_mixer(mixer, 8, 2, grid_size=(6, 8)).eval())
    x = torch.randn(5, 48, 8)
    with torch.no_grad():
        expected = module(x)
    torch.testing.assert_close(run_exported(module, x, tmp_path / 'mixer.onnx'), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['aft_linear_tiny', 'cvt_linear_13', 'vil_linear_tiny'])
@pytest.mark.filterwarnings('ignore')
def test_the_other_backbones_export_too(name, tmp_path):
    model, x = build(name), images()
    with torch.no_grad():
        expected = model(x)
    torch.testing.assert_close(run_exported(model, x, tmp_path / 'model.onnx'), expected, rtol=1e-4, atol=1e-5)


# without rotary positions in tests/export/test_export.py
@pytest.mark.filterwarnings('ignore')
def test_a_swapped_model_of_a_folder_exports_too(tmp_path):
    model = timm.create_model(
        'vit_small_patch16_dinov3', depth=1, embed_dim=24, num_heads=2, img_size=32, num_classes=3
    )
    save_for_hf(vitzoo.swap_mixer(model, 'linear'), str(tmp_path), safe_serialization=True)
    model, x = timm.create_model(f'local-dir:{tmp_path}', pretrained=True).eval(), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = model(x)
    torch.testing.assert_close(run_exported(model, x, tmp_path / 'model.onnx'), expected, rtol=1e-4, atol=1e-5)


def test_the_documentation_says_what_exports():
    table = {}
    for line in DOCS.read_text().splitlines():
        cells = [cell.strip().strip('`') for cell in line.split('|')]
        if len(cells) == 5 and cells[1] in vitzoo.list_mixers():
            table[cells[1]] = cells[3]
    assert table == {mixer: 'no' if mixer in NOT_IN_ONNX else 'yes' for mixer in mixers_of_ours()}
