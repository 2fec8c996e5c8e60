"""`vitzoo explain`: the figures it writes, the heatmaps in them, and its error messages."""

from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.models import save_for_hf

from vitzoo.data import eval_loader, eval_transform, resolve_data_config
from vitzoo.data.transforms import unnormalize
from vitzoo.data.unlabelled import ImageFiles, find_files
from vitzoo.errors import UserError
from vitzoo.explain import _choose_paths, _find_class, explain_files, explain_images, main
from vitzoo.load import load_model

NAMES = ['blue', 'green', 'red']


@pytest.fixture(scope='module')
def images(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp('images')
    for i, name in enumerate(('a.png', 'b.jpg', 'more/a.png')):
        (root / name).parent.mkdir(exist_ok=True)
        noise = np.random.default_rng(i).integers(0, 256, (3, 4, 3), dtype=np.uint8)
        Image.fromarray(noise).resize((40, 36)).save(root / name)
    return root


@pytest.fixture(scope='module')
def trained(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    model = timm.create_model('deit_softmax_tiny', img_size=32, depth=2, num_classes=3)
    torch.nn.init.normal_(model.head.weight, std=0.1)
    folder = tmp_path_factory.mktemp('runs') / 'deit'
    save_for_hf(model, folder, model_config=dict(label_names=NAMES), safe_serialization=True)
    return folder


def run(*argv) -> list[str]:
    return explain_files([*map(str, argv), '--workers', '0'])


@pytest.mark.parametrize('method', ('auto', 'rollout', 'gradcam'))
def test_every_image_gets_a_figure(images, trained, tmp_path, method, capsys):
    assert run(images, '--model', trained, '--out', tmp_path / 'maps', '--method', method) == []
    assert capsys.readouterr().out == f'wrote 3 figures to {tmp_path}/maps\n'
    assert sorted(path.name for path in (tmp_path / 'maps').iterdir()) == ['a-2.png', 'a.png', 'b.png']
    for path in (tmp_path / 'maps').iterdir():
        with Image.open(path) as figure:
            assert figure.width > 800 and len(figure.convert('RGB').getcolors(1 << 22)) > 100


@pytest.mark.parametrize('target', (None, 1))
def test_the_maps_are_those_of_the_class(images, trained, target):
    model = load_model(str(trained)).model
    dataset = ImageFiles(find_files([str(images)]), eval_transform(resolve_data_config(model)))
    records = list(explain_images(model, eval_loader(dataset, 2), 'gradient', target))
    for record, (image, file, _) in zip(records, dataset, strict=True):
        with torch.no_grad():
            shares = model(image[None])[0].softmax(dim=0)
        label = int(shares.argmax()) if target is None else target
        assert record['file'] == file and record['label'] == label and record['method'] == 'gradient'
        assert record['probability'] == pytest.approx(shares[label].item(), abs=1e-5)
        assert record['image'].equal(image) and record['heat'].shape == (32, 32)
    other = list(explain_images(model, eval_loader(dataset, 2), 'gradient', 2 if target != 2 else 0))
    assert not torch.allclose(records[0]['heat'], other[0]['heat'], atol=0.01)


def test_an_image_is_drawn_without_normalization():
    pixels = torch.rand(3, 4, 5)
    config = dict(mean=(0.4, 0.5, 0.6), std=(0.1, 0.2, 0.3))
    mean, std = (torch.tensor(config[key])[:, None, None] for key in ('mean', 'std'))
    torch.testing.assert_close(unnormalize((pixels - mean) / std, config), pixels)
    grey = unnormalize((pixels[:1] - 0.5) / 0.5, dict(mean=(0.5,), std=(0.5,)))
    torch.testing.assert_close(grey, pixels[:1].expand(3, -1, -1))


def test_an_image_that_cannot_be_read_is_named_and_the_others_are_explained(images, trained, tmp_path, capsys):
    broken = tmp_path / 'broken.png'
    broken.write_bytes(b'nothing')
    with pytest.raises(SystemExit) as end:
        argv = [broken, images / 'a.png', '--model', trained, '--out', tmp_path / 'maps', '--workers', '0']
        main([*map(str, argv)])
    assert end.value.code == 1
    assert f'cannot read {broken}' in capsys.readouterr().err
    assert [path.name for path in (tmp_path / 'maps').iterdir()] == ['a.png']


@pytest.mark.parametrize(
    ('argv', 'message'),
    [
        (['--target', 'rde'], "the model has no class 'rde', did you mean red?"),
        (['--target', '3'], "the model has no class '3': there are 3, from blue to red"),
        (['--checkpoint', 'nothing.pth'], 'nothing.pth'),
    ],
)
def test_a_mistake_gets_one_sentence(images, trained, tmp_path, argv, message, capsys):
    with pytest.raises(SystemExit) as end:
        main([str(images), '--model', str(trained), '--out', str(tmp_path / 'maps'), '--workers', '0', *argv])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert message in error and error.count('\n') == 1


@pytest.mark.parametrize(('text', 'index'), [('n02102040', 1), ('English springer', 1), ('crane', 2), ('2', 2)])
def test_a_class_is_found_by_its_name_by_words_and_by_its_index(text, index):
    assert _find_class(text, ['n01440764', 'n02102040', 'n02012849']) == index


def test_a_figure_whose_name_is_taken_by_a_folder_is_named_first(images, trained, tmp_path):
    (tmp_path / 'b.png').mkdir()
    with pytest.raises(UserError, match=r"cannot write '.*b.png': Is a directory"):
        run(images, '--model', trained, '--out', tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ['b.png']


@pytest.mark.parametrize('names', [['a.png'], ['a.jpg', 'a.png'], ['b.jpg', 'more/b.png']], ids=' '.join)
def test_a_figure_does_not_overwrite_an_image(images, trained, tmp_path, names):
    (tmp_path / 'more').mkdir()
    for name in names:
        (tmp_path / name).write_bytes((images / 'a.png').read_bytes())
    if 'more/b.png' in names:
        (tmp_path / 'b.png').symlink_to(tmp_path / 'more' / 'b.png')
    with pytest.raises(UserError, match=r"the figure of '.*' would overwrite the image '.*\.png'; give another folder"):
        run(*(tmp_path / name for name in names), '--model', trained, '--out', tmp_path)
    assert all((tmp_path / name).read_bytes() == (images / 'a.png').read_bytes() for name in names)


def test_figures_are_written_again_beside_other_images(images, trained, tmp_path):
    (tmp_path / 'a.jpg').write_bytes((images / 'b.jpg').read_bytes())
    for _ in range(2):
        assert run(tmp_path / 'a.jpg', images / 'b.jpg', '--model', trained, '--out', tmp_path) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ['a.jpg', 'a.png', 'b.png']


def test_the_class_has_the_largest_logit_where_all_probabilities_are_1(images, trained):
    model = load_model(str(trained)).model
    torch.nn.init.zeros_(model.head.weight)
    model.head.bias.data = torch.tensor([18.0, 33, 25])
    dataset = ImageFiles(find_files([str(images)]), eval_transform(resolve_data_config(model)))
    records = list(explain_images(model, eval_loader(dataset, 2), 'gradient', is_multi_label=True))
    assert [(record['label'], record['probability']) for record in records] == [(1, 1.0)] * 3


def test_random_weights_have_nothing_to_explain(images, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main([str(images), '--model', 'deit_ls_tiny', '--out', str(tmp_path)])
    assert 'there are no weights of deit_ls_tiny' in capsys.readouterr().err


@pytest.mark.parametrize('target', [(), ('--target', '0')])
def test_a_model_without_a_classifier_has_nothing_to_explain(images, tmp_path, capsys, target):
    model = timm.create_model('deit_softmax_tiny', img_size=32, depth=2, num_classes=0)
    save_for_hf(model, tmp_path / 'run', safe_serialization=True)
    with pytest.raises(SystemExit):
        main([str(images), '--model', str(tmp_path / 'run'), '--out', str(tmp_path / 'maps'), *target])
    assert 'run has no classifier' in capsys.readouterr().err


def test_a_model_that_computes_nan_has_no_map(images, trained):
    model = load_model(str(trained)).model
    model.head.bias.data[1] = torch.nan
    dataset = ImageFiles(find_files([str(images)]), eval_transform(resolve_data_config(model)))
    with pytest.raises(UserError, match=r'the logits of .*a\.png are not finite: the weights head\.bias'):
        list(explain_images(model, eval_loader(dataset, 2), 'gradient'))


def test_frames_of_one_name_get_numbers_without_trying_all_smaller_ones(monkeypatch):
    tried = []

    class Names(set):
        def __contains__(self, name: object) -> bool:
            tried.append(name)
            return super().__contains__(name)

    monkeypatch.setattr('vitzoo.explain.set', Names, raising=False)
    files = ['a-2.png', *(f'{folder}/a.png' for folder in range(50)), 'b/a-2.png']
    names = ['a-2', 'a', *(f'a-{number}' for number in range(3, 52)), 'a-2-2']
    assert _choose_paths('out', files) == [f'out/{name}.png' for name in names]
    assert len(tried) < 2 * len(files)
