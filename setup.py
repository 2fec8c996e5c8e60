"""The build step that puts configs/ and weights/MODEL.TAG/ into the package; everything else is in pyproject.toml."""

from pathlib import Path
from shutil import copyfile

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithShippedFiles(build_py):
    """Copies the files that an editable installation finds in the checkout."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for file in [*Path('configs').rglob('*.yaml'), *Path('weights').glob('*.*/*')]:
            target = Path(self.build_lib, 'vitzoo', file)
            target.parent.mkdir(parents=True, exist_ok=True)
            copyfile(file, target)


setup(cmdclass={'build_py': BuildWithShippedFiles})
