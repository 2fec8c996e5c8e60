"""Small classifiers as training saves them, and folders of coloured images to evaluate them on."""

from pathlib import Path

import timm
import torch
from PIL import Image
from timm.models import save_for_hf

COLORS = {'red': (220, 30, 30), 'green': (30, 200, 40), 'blue': (20, 40, 210)}


def make_class_folders(folder: Path, counts: dict[str, int], size: int = 40) -> Path:
    """Write `counts` images of each class, its colour with noise."""
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for i in range(count):
            generator = torch.Generator().manual_seed(i)
            noise = torch.randint(-20, 20, (size, size, 3), generator=generator)
            pixels = (torch.tensor(COLORS.get(name, (128, 128, 128))) + noise).clamp(0, 255)
            Image.fromarray(pixels.byte().numpy()).save(folder / name / f'{i}.png')
    return folder


def make_ten_images(root: Path) -> Path:
    """Write a validation split of 5 blue, 3 green and 2 red images."""
    make_class_folders(root / 'val', {'blue': 5, 'green': 3, 'red': 2})
    return root


def save_classifier(
    folder: Path, label_names: tuple[str, ...] = ('blue', 'green', 'red'), answer: str | None = None
) -> Path:
    """Save a model as training does, random or with a constant answer."""
    torch.manual_seed(0)
    model = timm.create_model('deit_softmax_tiny', img_size=32, depth=2, num_classes=len(label_names)).eval()
    torch.nn.init.normal_(model.head.weight)
    if answer is not None:
        torch.nn.init.zeros_(model.head.weight)
        model.head.bias.data = torch.eye(len(label_names))[label_names.index(answer)]
    save_for_hf(model, folder, model_config=dict(label_names=list(label_names)), safe_serialization=True)
    return folder
