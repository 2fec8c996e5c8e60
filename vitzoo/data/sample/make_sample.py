"""Cuts the bundled sample from CIFAR-10: `python vitzoo/data/sample/make_sample.py cifar10.tar.xz`.

The archive holds `train/<class>/0000.jpg` to `4999.jpg` and `test/<class>/0000.jpg` to `0999.jpg`. Every 25th training
and every 20th test photograph of a class is taken, its bytes untouched. The same archive gives the same two files, bit
for bit.
"""

import io
import sys
import tarfile
from pathlib import Path


def make_sample(archive: str | Path, out_dir: str | Path) -> None:
    """Writes train.tar (2,000 photographs) and val.tar (500) into `out_dir`."""
    with tarfile.open(archive) as tar:
        photos = {}
        for member in tar:
            file = tar.extractfile(member)
            if file is not None:
                photos[member.name] = file.read()
    write_split(photos, 'train', 25, Path(out_dir) / 'train.tar')
    write_split(photos, 'test', 20, Path(out_dir) / 'val.tar')


def write_split(photos: dict[str, bytes], folder: str, step: int, tar_path: Path) -> None:
    """Writes every `step`-th photograph of each class in `folder` to `tar_path`, as `<class>/<name>.jpg`."""
    with tarfile.open(tar_path, 'w', format=tarfile.USTAR_FORMAT) as tar:
        for path in sorted(photos):
            split, class_name, name = path.split('/')
            if split != folder or int(Path(name).stem) % step:
                continue
            # a fresh TarInfo has mtime, uid and gid 0 and no user name
            member = tarfile.TarInfo(f'{class_name}/{name}')
            member.size = len(photos[path])
            tar.addfile(member, io.BytesIO(photos[path]))


if __name__ == '__main__':
    make_sample(sys.argv[1], Path(__file__).parent)
