"""The build step that puts weights/MODEL.TAG into the package; everything else is in pyproject.toml."""

from pathlib import Path
from shutil import copytree

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithWeights(build_py):
    """Copies the shipped weights, which an editable installation finds in the checkout."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for config in Path('weights').glob('*.*/config.json'):
            folder = config.parent
            copytree(folder, Path(self.build_lib, 'vitzoo', folder), dirs_exist_ok=True)


setup(cmdclass={'build_py': BuildWithWeights})
