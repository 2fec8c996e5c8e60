"""Folders next to the package in a checkout that wheels have inside of it: configs/ and weights/."""

from pathlib import Path

_PACKAGE = Path(__file__).parent


def resource_folder(name: str) -> Path:
    """The folder `name` of the installed package, or of the checkout, whose package does not have it."""
    inside = _PACKAGE / name
    return inside if inside.is_dir() else _PACKAGE.parent / name
