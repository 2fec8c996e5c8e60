"""Scores of students beside their teacher: of one process or several, and by neighbours and linear probes."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from processes import start_processes
from teachers import batches, divergence_of, make_teacher
from torch import distributed
from torch.nn import functional as F
from torch.utils.data import Dataset

from vitzoo.data import eval_loader
from vitzoo.errors import UserError
from vitzoo.train.divergence import same_classes
from vitzoo.transfer import measures, zero_attention
from vitzoo.transfer.measures import Retention, linear_probe, nearest_neighbours
from vitzoo.transfer.students import make_student

# six batches for the processes, or one for all of them
BATCH_SIZES = 2, 16


class RandomImages(Dataset):
    """Labelled images, one of which may be broken."""

    def __init__(self, number: int, broken: int | None = None) -> None:
        generator = torch.Generator().manual_seed(number)
        self.images, self.broken = torch.randn(number, 3, 48, 48, generator=generator), broken

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == self.broken:
            raise UserError(f'image {index} is broken')
        return self.images[index], index % 3


def all_scores(accelerator: Accelerator | None) -> list[dict]:
    """Scores of a teacher and of its student for each kind and batch size."""
    rank, world = (0, 1) if accelerator is None else (accelerator.process_index, accelerator.num_processes)
    teacher = make_teacher()
    student, found = make_student('teacher', teacher, 'linear', {}, 0), []
    for batch_size in BATCH_SIZES:
        load = partial(eval_loader, batch_size=batch_size, rank=rank, world=world)
        for kind in ('top1', 'knn', 'cosine'):
            bank = load(RandomImages(13)) if kind == 'knn' else None
            retention = Retention(teacher, load(RandomImages(11)), kind, bank, accelerator)
            found += [retention.teacher, retention.score(student)]
    return found


def score_in_process(folder: str) -> None:
    """Write the scores, and the error of a broken image that only the last process reads."""
    accelerator = Accelerator(cpu=True)
    rank, world = accelerator.process_index, accelerator.num_processes
    loader = eval_loader(RandomImages(4, broken=3), 2, rank=rank, world=world)
    with pytest.raises(UserError) as error:
        Retention(make_teacher(), loader, 'top1', None, accelerator)
    results = dict(scores=all_scores(accelerator), error=str(error.value))
    Path(folder, f'{rank}.json').write_text(json.dumps(results))
    # a thread of torch 2.6 may still need Python's lock, which destroying the group holds while it waits for the thread
    accelerator.wait_for_everyone()
    distributed.destroy_process_group()


def test_processes_that_share_the_images_have_the_scores_of_one(tmp_path):
    outcome = start_processes(2, score_in_process, str(tmp_path))
    assert outcome.codes == [0, 0], outcome.err
    for rank in range(2):
        results = json.loads((tmp_path / f'{rank}.json').read_text())
        assert results['scores'] == all_scores(None)
        assert results['error'] == 'image 3 is broken'


def test_the_zero_control_has_the_score_of_a_model_without_attention():
    teacher = make_teacher()
    labels = torch.arange(8) % 5
    loader = [(torch.randn(8, 3, 48, 48, generator=torch.Generator().manual_seed(0)), labels)]
    retention = Retention(teacher, loader, 'top1')
    student = make_student('teacher', teacher, 'linear', {}, 0)
    without = make_teacher()
    for block in without.blocks:
        torch.nn.init.zeros_(block.attn.proj.weight)
        torch.nn.init.zeros_(block.attn.proj.bias)
    with zero_attention(student):
        assert retention.score(student) == retention.score(without)
    assert retention.teacher['agreement'] == 100
    assert retention.score(student) != retention.score(without)


def test_a_multi_label_student_agrees_if_it_has_the_labels_of_its_teacher():
    teacher = make_teacher()
    (images,) = batches(1, batch_size=8)
    loader = [(images, torch.zeros(8))]
    shifted = make_teacher()
    with torch.no_grad():
        shifted.head.bias += 5
    logits = [model(images).detach() for model in (shifted, teacher)]
    scores = {several: Retention(teacher, loader, 'cosine', multi_label=several).score(shifted) for several in (0, 1)}
    assert [scores[several]['agreement'] for several in (0, 1)] == [100, 0]
    for several in (0, 1):
        assert scores[several]['divergence'] == pytest.approx(
            divergence_of(*logits, several).item(), rel=1e-4, abs=1e-5
        )


@pytest.mark.parametrize('cells', [2**26, 100])
def test_neighbours_and_probe_find_separate_clusters(cells, monkeypatch):
    # of 30 queries in one part, or in parts of three
    monkeypatch.setattr(measures, '_MAX_CELLS', cells)
    generator = torch.Generator().manual_seed(0)
    centers = 5 * torch.randn(3, 6, generator=generator)
    labels = torch.arange(30) % 3
    bank, queries = (centers[labels] + torch.randn(30, 6, generator=generator) for _ in range(2))
    assert torch.equal(nearest_neighbours(bank, labels, queries), labels)
    assert torch.equal(linear_probe(bank, labels, queries), labels)


def test_a_neighbour_votes_with_its_similarity_whatever_the_length_of_its_features():
    bank = torch.tensor([[1.0, 0.1], [30.0, 60.0], [30.0, -60.0], [-1.0, 0.0]])
    assert nearest_neighbours(bank, torch.tensor([0, 1, 1, 2]), torch.tensor([[5.0, 0.0]]), count=3).item() == 0
    assert nearest_neighbours(bank, torch.tensor([0, 1, 1, 2]), torch.tensor([[5.0, 5.0]]), count=3).item() == 1


def test_the_linear_probe_is_a_ridge_regression_with_a_constant():
    generator = torch.Generator().manual_seed(0)
    bank, queries = (torch.randn(count, 4, generator=generator) * torch.tensor([1, 1, 9, 9]) + 5 for count in (24, 200))
    # classes of unequal size that overlap
    labels = (torch.arange(24) % 6).clamp(max=2)
    std, mean = torch.std_mean(bank.double(), dim=0, correction=0)
    x, one_hot = (bank - mean) / std, F.one_hot(labels).double()
    # the penalty as rows of the data
    left = torch.cat([x, (0.01 * 24) ** 0.5 * torch.eye(4)])
    right = torch.cat([one_hot - one_hot.mean(dim=0), torch.zeros(4, 3)])
    expected = (queries - mean) / std @ torch.linalg.lstsq(left, right).solution + one_hot.mean(dim=0)
    assert torch.equal(linear_probe(bank, labels, queries), expected.argmax(dim=1))


def test_the_cosine_is_that_of_the_features_that_the_head_reads():
    teacher = make_teacher()
    student = make_student('teacher', teacher, 'linear', {}, 0)
    (images,) = batches(1, batch_size=8)
    with torch.no_grad():
        features = [model.forward_head(model.forward_features(images), pre_logits=True) for model in (student, teacher)]
    found = Retention(teacher, [(images[:5], torch.zeros(5)), (images[5:], torch.zeros(3))], 'cosine').score(student)
    assert found['score'] == found['cosine'] == pytest.approx(100 * F.cosine_similarity(*features).mean().item())


def test_a_student_with_one_other_label_does_not_agree():
    teacher, student = torch.tensor([[1.0, -2, 3], [1, -2, 3]]), torch.tensor([[9.0, -1, 1], [1, 2, 3]])
    assert same_classes(student, teacher, multi_label=True).tolist() == [True, False]
    assert same_classes(student, teacher).tolist() == [False, True]
