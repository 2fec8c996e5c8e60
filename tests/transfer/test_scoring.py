"""Scores of students beside their teacher: of one process or several."""

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
from vitzoo.train.kl import same_classes
from vitzoo.transfer import zero_attention
from vitzoo.transfer.scoring import StudentScorer
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
            scorer = StudentScorer(teacher, load(RandomImages(11)), kind, bank, accelerator)
            found += [scorer.teacher_scores, scorer.score(student)]
    return found


def score_in_process(folder: str) -> None:
    """Write the scores, and the error of a broken image that only the last process reads."""
    accelerator = Accelerator(cpu=True)
    rank, world = accelerator.process_index, accelerator.num_processes
    loader = eval_loader(RandomImages(4, broken=3), 2, rank=rank, world=world)
    with pytest.raises(UserError) as error:
        StudentScorer(make_teacher(), loader, 'top1', None, accelerator)
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
    scorer = StudentScorer(teacher, loader, 'top1')
    student = make_student('teacher', teacher, 'linear', {}, 0)
    without = make_teacher()
    for block in without.blocks:
        torch.nn.init.zeros_(block.attn.proj.weight)
        torch.nn.init.zeros_(block.attn.proj.bias)
    with zero_attention(student):
        assert scorer.score(student) == scorer.score(without)
    assert scorer.teacher_scores['agreement'] == 100
    assert scorer.score(student) != scorer.score(without)


def test_a_multi_label_student_agrees_if_it_has_the_labels_of_its_teacher():
    teacher = make_teacher()
    (images,) = batches(1, batch_size=8)
    loader = [(images, torch.zeros(8))]
    shifted = make_teacher()
    with torch.no_grad():
        shifted.head.bias += 5
    logits = [model(images).detach() for model in (shifted, teacher)]
    scores = {
        several: StudentScorer(teacher, loader, 'cosine', multi_label=several).score(shifted) for several in (0, 1)
    }
    assert [scores[several]['agreement'] for several in (0, 1)] == [100, 0]
    for several in (0, 1):
        assert scores[several]['divergence'] == pytest.approx(
            divergence_of(*logits, several).item(), rel=1e-4, abs=1e-5
        )


def test_the_cosine_is_that_of_the_features_that_the_head_reads():
    teacher = make_teacher()
    student = make_student('teacher', teacher, 'linear', {}, 0)
    (images,) = batches(1, batch_size=8)
    with torch.no_grad():
        features = [model.forward_head(model.forward_features(images), pre_logits=True) for model in (student, teacher)]
    held_out = [(images[:5], torch.zeros(5)), (images[5:], torch.zeros(3))]
    found = StudentScorer(teacher, held_out, 'cosine').score(student)
    assert found['score'] == found['cosine'] == pytest.approx(100 * F.cosine_similarity(*features).mean().item())


def test_a_student_with_one_other_label_does_not_agree():
    teacher, student = torch.tensor([[1.0, -2, 3], [1, -2, 3]]), torch.tensor([[9.0, -1, 1], [1, 2, 3]])
    assert same_classes(student, teacher, multi_label=True).tolist() == [True, False]
    assert same_classes(student, teacher).tolist() == [False, True]
