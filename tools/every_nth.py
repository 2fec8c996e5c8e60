"""Links a folder of images with every n-th image of each class of its validation split, for short evaluations.

python tools/every_nth.py imagenette imagenette_4 4
"""

import sys
from pathlib import Path


def main(source: str, target: str, n: int) -> None:
    """Link the training split whole, and every `n`-th validation image by name."""
    root = Path(source).resolve()
    Path(target).mkdir(parents=True)
    (Path(target) / 'train').symlink_to(root / 'train')
    for folder in sorted((root / 'val').iterdir()):
        links = Path(target) / 'val' / folder.name
        links.mkdir(parents=True)
        for image in sorted(folder.iterdir())[::n]:
            (links / image.name).symlink_to(image)


if __name__ == '__main__':
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
