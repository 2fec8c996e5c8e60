"""Accuracy and loss, against counts image by image, for any batch size and number of processes."""

import json
from math import isnan

import pytest
import timm
import torch
from processes import start_processes
from timm.task import MultiLabelClassificationEvaluator
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from vitzoo.data import eval_loader
from vitzoo.errors import UserError
from vitzoo.metrics import OversmoothingProbe, accuracy, evaluate, oversmoothing, score_images

SIZES = (1, 3, 5, 10, 17, 22)
BATCH_SIZES = (1, 3, 7, 64)


def make_problem(size: int, num_classes: int = 7) -> tuple[nn.Module, TensorDataset]:
    generator = torch.Generator().manual_seed(size)
    images = torch.randn(size, 3, 2, 2, generator=generator)
    target = torch.randint(num_classes, (size,), generator=generator)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, num_classes, bias=False))
    model[1].weight.data = torch.randn(num_classes, 12, generator=generator)
    return model, TensorDataset(images, target)


def count_by_hand(model: nn.Module, dataset: TensorDataset) -> tuple[int, int, float]:
    correct1, correct5, losses = 0, 0, []
    for image, target in dataset:
        logits = model(image[None])[0].tolist()
        better = sum(logit > logits[target] for logit in logits)
        correct1, correct5 = correct1 + (better == 0), correct5 + (better < 5)
        losses.append(-torch.tensor(logits).double().log_softmax(0)[target].item())
    return correct1, correct5, sum(losses) / len(losses)


@pytest.mark.parametrize('size', SIZES)
@pytest.mark.parametrize('batch_size', BATCH_SIZES)
def test_counts_are_the_same_for_any_batch_size(size, batch_size):
    model, dataset = make_problem(size)
    scores = evaluate(model, DataLoader(dataset, batch_size))
    correct1, correct5, loss = count_by_hand(model, dataset)
    assert (scores['n'], scores['correct1'], scores['correct5']) == (size, correct1, correct5)
    assert scores['top1'] == 100 * correct1 / size and scores['top5'] == 100 * correct5 / size
    assert scores['loss'] == pytest.approx(loss, rel=1e-5)


def with_several_labels(dataset: TensorDataset, num_classes: int = 7) -> TensorDataset:
    """The same images with 1 to 3 labels each; the last class never occurs."""
    images, target = dataset.tensors
    labels = torch.stack([target, target * 3 + 1, target * 5 + 2], dim=1) % (num_classes - 1)
    return TensorDataset(images, torch.zeros(len(images), num_classes).scatter_(1, labels, 1))


def average_precision_by_hand(scores: list[float], is_positive: list[bool]) -> float:
    """Precision at the place of each positive, every image with the same score standing at the same place."""
    precisions = []
    for score, positive in zip(scores, is_positive, strict=True):
        if positive:
            above = [
                other_positive for other, other_positive in zip(scores, is_positive, strict=True) if other >= score
            ]
            precisions.append(sum(above) / len(above))
    return sum(precisions) / len(precisions)


@pytest.mark.parametrize('size', SIZES)
@pytest.mark.parametrize('batch_size', BATCH_SIZES)
def test_several_labels_are_scored_image_by_image(size, batch_size):
    model, dataset = make_problem(size)
    images, target = with_several_labels(dataset).tensors
    scores = evaluate(model, DataLoader(TensorDataset(images, target), batch_size))
    logits = model(images).detach()
    hits = [bool(labels[row.argmax()]) for row, labels in zip(logits, target)]
    assert (scores['n'], scores['correct1'], scores['top1']) == (size, sum(hits), 100 * sum(hits) / size)
    probability = logits.double().sigmoid()
    loss = -(target * probability.log() + (1 - target) * (1 - probability).log()).mean()
    assert scores['loss'] == pytest.approx(loss.item(), rel=1e-5)
    classes = [label for label in range(7) if target[:, label].any()]
    by_hand = [average_precision_by_hand(logits[:, i].tolist(), (target[:, i] > 0).tolist()) for i in classes]
    assert scores['map'] == pytest.approx(100 * sum(by_hand) / len(by_hand), rel=1e-9)


def test_the_average_precision_is_computed_of_some_classes_at_a_time(monkeypatch):
    model, dataset = make_problem(10)
    loader = DataLoader(with_several_labels(dataset), 5)
    expected = evaluate(model, loader)['map']
    monkeypatch.setattr(accuracy, '_MAX_LOGITS', 25)
    shapes, update = [], MultiLabelClassificationEvaluator.update

    def watch(evaluator, output, target):
        shapes.append(tuple(output.shape))
        update(evaluator, output, target)

    monkeypatch.setattr(MultiLabelClassificationEvaluator, 'update', watch)
    assert evaluate(model, loader)['map'] == pytest.approx(expected, rel=1e-12)
    assert shapes == [(10, 2)] * 3


class _OneOutput(nn.Module):
    """Writes all outputs to the same memory, as a CUDA graph does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.output = torch.empty(0)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.output.resize_(len(images), 7).copy_(self.model(images))


def test_the_outputs_of_a_cuda_graph_are_scored_before_the_next_run_overwrites_them():
    model, dataset = make_problem(10)
    for data in (dataset, with_several_labels(dataset)):
        expected, found = (evaluate(each, DataLoader(data, 5)) for each in (model, _OneOutput(model)))
        assert found == expected


def test_images_with_equal_scores_share_their_precision():
    dataset = TensorDataset(torch.tensor([[1.0], [1.0], [0.0], [0.0]]), torch.tensor([[1.0], [0.0], [0.0], [1.0]]))
    assert evaluate(nn.Identity(), DataLoader(dataset, 2))['map'] == 50


def test_an_image_without_labels_cannot_be_right_or_wrong():
    target = torch.tensor([[1.0, 0], [0, 0], [0, 1.0]])
    scores = evaluate(nn.Identity(), DataLoader(TensorDataset(torch.tensor([[2.0, 1]] * 3), target), 2))
    assert (scores['n'], scores['correct1'], scores['top1'], scores['top5']) == (3, 1, 50, 100)
    scores = evaluate(nn.Identity(), DataLoader(TensorDataset(torch.ones(3, 2), torch.zeros(3, 2)), 2))
    assert scores['n'] == 3 and isnan(scores['top1']) and isnan(scores['map'])


class BrokenAt(Dataset):
    def __init__(self, dataset: Dataset, index: int):
        self.dataset, self.index = dataset, index

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        if index == self.index:
            raise UserError(f'cannot read the image {index}')
        return self.dataset[index]


def with_nan(dataset: TensorDataset, index: int) -> TensorDataset:
    images, target = dataset.tensors
    images = images.clone()
    images[index, 0, 0, 0] = torch.nan
    return TensorDataset(images, target)


def evaluate_in_process(folder: str) -> None:
    """Evaluate every problem with every kind of sharded loader."""
    from accelerate import Accelerator
    from timm.data.distributed_sampler import OrderedDistributedSampler

    accelerator = Accelerator(cpu=True)
    rank, world = accelerator.process_index, accelerator.num_processes
    results = {}
    for size in SIZES:
        model, dataset = make_problem(size)
        for batch_size in BATCH_SIZES:
            loaders = {
                'vitzoo': eval_loader(dataset, batch_size, rank=rank, world=world),
                'timm': DataLoader(dataset, batch_size, sampler=OrderedDistributedSampler(dataset, world, rank)),
                'accelerate': accelerator.prepare_data_loader(DataLoader(dataset, batch_size)),
                'not sharded': DataLoader(dataset, batch_size),
            }
            for name, loader in loaders.items():
                results[f'{name} {size} {batch_size}'] = evaluate(model, loader, accelerator)
            loader = eval_loader(with_several_labels(dataset), batch_size, rank=rank, world=world)
            results[f'labels {size} {batch_size}'] = evaluate(model, loader, accelerator)
    model, dataset = make_problem(22)
    for name, index in {'first': 0, 'last': 21}.items():
        with pytest.raises(UserError) as error:
            evaluate(model, eval_loader(BrokenAt(dataset, index), 3, rank=rank, world=world), accelerator)
        results[name] = str(error.value)
    with pytest.raises(UserError) as error:
        evaluate(model, eval_loader(with_nan(dataset, 19), 3, rank=rank, world=world), accelerator)
    results['nan'] = str(error.value)
    with open(f'{folder}/{rank}.json', 'w') as file:
        json.dump(results, file)
    accelerator.wait_for_everyone()
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize('world', (pytest.param(2, marks=pytest.mark.slow), 3))
def test_counts_are_the_same_for_any_number_of_processes(world, tmp_path):
    outcome = start_processes(world, evaluate_in_process, str(tmp_path))
    assert outcome.codes == [0] * world, outcome.err
    ranks = [json.loads((tmp_path / f'{rank}.json').read_text()) for rank in range(world)]
    assert all(rank == ranks[0] for rank in ranks)
    results = ranks[0]
    assert results.pop('first') == 'cannot read the image 0'
    assert results.pop('last') == 'cannot read the image 21'
    assert results.pop('nan') == 'Sequential: the logits of image 19 are not finite: the images are not finite'
    for key, scores in results.items():
        name, size, batch_size = key.rsplit(' ', 2)
        model, dataset = make_problem(int(size))
        dataset = with_several_labels(dataset) if name == 'labels' else dataset
        alone = evaluate(model, DataLoader(dataset, int(batch_size)))
        assert scores.pop('loss') == pytest.approx(alone.pop('loss'), rel=1e-6)
        assert scores == alone, key


def test_two_classes_have_a_top_5():
    model, dataset = make_problem(9, num_classes=2)
    assert evaluate(model, DataLoader(dataset, 4))['correct5'] == 9


def test_an_image_that_the_sampler_repeats_counts_once():
    model, dataset = make_problem(5)
    scores = evaluate(model, DataLoader(dataset, 2, sampler=[3, 0, 1, 1, 2, 4, 0]))
    assert scores == evaluate(model, DataLoader(dataset, 5))


def test_an_image_that_the_sampler_leaves_out_is_noticed():
    model, dataset = make_problem(5)
    with pytest.raises(RuntimeError, match='4 different images of 5'):
        evaluate(model, DataLoader(dataset, 2, sampler=[0, 1, 2, 4, 4]))
    with pytest.raises(RuntimeError, match='4 different images of 5'):
        evaluate(model, DataLoader(dataset, 2, drop_last=True))
    with pytest.raises(RuntimeError, match='5 different images of 6'):
        evaluate(model, DataLoader(dataset, 2), num_samples=6)


def test_a_stream_is_evaluated_and_checked_only_against_a_given_size():
    model, dataset = make_problem(10)

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(dataset)

    assert evaluate(model, DataLoader(Stream(), 3)) == evaluate(model, DataLoader(dataset, 3))
    with pytest.raises(RuntimeError, match='10 different images of 11'):
        evaluate(model, DataLoader(Stream(), 3), num_samples=11)


def test_timm_loaders_can_be_evaluated():
    model, dataset = make_problem(5)
    plain = evaluate(model, DataLoader(dataset, 2))
    assert evaluate(model, timm.data.loader.MultiEpochsDataLoader(dataset, 2)) == plain
    prefetched = timm.data.loader.PrefetchLoader(DataLoader(dataset, 2), device=torch.device('cpu'))
    assert evaluate(model, prefetched)['n'] == 5


def test_evaluation_needs_images_and_leaves_the_model_in_its_mode():
    model, dataset = make_problem(5)
    evaluate(model.train(), DataLoader(dataset, 2))
    assert model.training
    with pytest.raises(UserError, match='no images'):
        evaluate(model, DataLoader(TensorDataset(torch.empty(0, 3, 2, 2), torch.empty(0, dtype=torch.long)), 2))
    with pytest.raises(UserError, match='image 3'):
        evaluate(model.eval(), DataLoader(BrokenAt(dataset, 3), 2))
    assert not model.training


def test_evaluation_leaves_frozen_modules_in_their_mode():
    model, dataset = make_problem(5)
    model = nn.Sequential(nn.BatchNorm2d(3), model).train()
    model[0].eval()
    evaluate(model, DataLoader(dataset, 2))
    assert model.training and not model[0].training


def test_labels_that_the_model_does_not_have_are_named():
    (model, dataset), (_, others) = make_problem(5, num_classes=3), make_problem(5, num_classes=7)
    evaluate(model, DataLoader(dataset, 2))
    images = others.tensors[0]
    # -100 is left out of the loss by PyTorch
    for labels in ([0, 1, 2, 3, 1], [0, 1, 3, 2, 3], [0, 2, 1, 0, -1], [-100, 1, 2, 0, 0]):
        wrong = next(label for label in labels if label not in range(3))
        with pytest.raises(UserError, match=f'an image has the label {wrong}, which is none of the 3 classes'):
            evaluate(model, DataLoader(TensorDataset(images, torch.tensor(labels)), 5))
    with pytest.raises(UserError, match='the images have 7 labels each, and the model 3 classes'):
        evaluate(model, DataLoader(with_several_labels(others), 2))


def test_what_a_score_of_ones_own_gets_need_not_be_a_label():
    model, dataset = make_problem(5, num_classes=3)
    loader = DataLoader(TensorDataset(dataset.tensors[0], torch.arange(-2, 48, 10)), 2)
    columns = score_images(model, loader, lambda logits, number: dict(number=number))
    assert columns['number'].tolist() == [-2, 8, 18, 28, 38]


def test_an_error_in_a_worker_process_stays_one_sentence():
    model, dataset = make_problem(5)
    with pytest.raises(UserError) as error:
        evaluate(model, DataLoader(BrokenAt(dataset, 3), 2, num_workers=1))
    assert str(error.value) == 'cannot read the image 3'


def test_progress_is_called_with_the_images_of_every_batch():
    model, dataset = make_problem(10)
    seen = []
    evaluate(model, DataLoader(dataset, 4), progress=seen.append)
    assert seen == [4, 4, 2]


def test_evaluation_reads_the_probe_of_each_image_once():
    model = timm.create_model('test_vit', img_size=32, num_classes=4)
    dataset = TensorDataset(torch.randn(5, 3, 32, 32), torch.arange(5) % 4)
    with OversmoothingProbe(model) as probe:
        curve = evaluate(model, DataLoader(dataset, 2, sampler=[0, 1, 2, 3, 4, 4, 4]), probe=probe)['oversmoothing']
        dataset = with_several_labels(dataset, num_classes=4)
        scores = evaluate(model, DataLoader(dataset, 2), probe=probe)
    assert curve == pytest.approx(oversmoothing(model.eval(), dataset.tensors[0]), abs=1e-5)
    assert scores['oversmoothing'] == pytest.approx(curve, abs=1e-5) and 0 < scores['map'] <= 100


@pytest.mark.parametrize('batch_size', (1, 3, 64))
@pytest.mark.parametrize('num_labels', ('one', 'several'))
def test_an_image_whose_logits_are_not_finite_is_named(batch_size, num_labels):
    model, dataset = make_problem(10)
    dataset = with_nan(with_several_labels(dataset) if num_labels == 'several' else dataset, 7)
    with pytest.raises(UserError, match='the logits of image 7 are not finite: the images are not finite'):
        evaluate(model, DataLoader(dataset, batch_size))
    with pytest.raises(UserError, match='the logits of image 7 are not finite'):
        evaluate(model, DataLoader(dataset, batch_size, sampler=[9, 8, 7, 6, 5, 4, 3, 2, 1, 0]))


def test_the_first_layer_that_is_not_finite_is_named():
    model, dataset = make_problem(10)
    model[1].weight.data[3, 3] = torch.inf
    with pytest.raises(UserError, match=r'image 0 are not finite: the weights 1\.weight are not finite'):
        evaluate(model, DataLoader(dataset, 4))
    model, dataset = make_problem(10)
    model.append(nn.Linear(7, 7))
    model[2].weight.data.fill_(3e38)
    with pytest.raises(UserError, match=r'the first layer with an output that is not finite is 2$'):
        evaluate(model, DataLoader(dataset, 4))


def test_a_narrow_precision_is_named():
    model, dataset = make_problem(10)
    dataset = TensorDataset(dataset.tensors[0] * 1e5, dataset.tensors[1])
    assert evaluate(model, DataLoader(dataset, 4))['n'] == 10
    with (
        torch.autocast('cpu', torch.float16),
        pytest.raises(UserError, match='is 1. They were computed in float16'),
    ):
        evaluate(model, DataLoader(dataset, 4))
