"""Folders next to the package in a checkout that wheels have inside of it: configs/ and weights/."""

from pathlib import Path

_PACKAGE = Path(__file__).parent


def resource_folder(name: str) -> Path:
    """The folder `name` of the checkout, or of the installed package."""
    is_checkout = (_PACKAGE.parent / 'pyproject.toml').is_file()
    return (_PACKAGE.parent if is_checkout else _PACKAGE) / name
