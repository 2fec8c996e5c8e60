"""`vitzoo report`: evaluate models and write the results as one self-contained HTML page.

Examples:
    vitzoo report runs/cvt_13 runs/cvt_ls_13 --out report
    vitzoo report 'deit_*_patch16_224' resnet50 --data-dir imagenet --corrupt --out report
    vitzoo report --results results.json --out report
    vitzoo report cvt_21 --results report/report.json --title 'CvT on ImageNet' --out report

The options of `vitzoo validate` are accepted, except those for its output files.
"""

from vitzoo.errors import run_command
from vitzoo.report.command import make_report


def main(argv: list[str] | None = None) -> None:
    """Run the command and exit with its exit code."""
    run_command(make_report, argv)
