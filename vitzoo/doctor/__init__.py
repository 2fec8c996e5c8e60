"""`vitzoo doctor`: examine all images of a dataset, and report problems and how to fix them.

Examples:
    vitzoo doctor photos
    vitzoo doctor photos.zip --img-size 64 --json findings.json

The exit code is 1 if there are errors, which would end training or make its accuracy wrong.
"""

from vitzoo.doctor.command import examine_and_exit
from vitzoo.errors import run_command


def main(argv: list[str] | None = None) -> None:
    """Run the command and exit with its exit code."""
    run_command(examine_and_exit, argv)
