"""`vitzoo validate`: accuracy, size, speed, oversmoothing and health of models, as a table, a file and a figure.

Examples:
    vitzoo validate runs/cvt_ls_13
    vitzoo validate 'deit_*' resnet50 --data-dir imagenet --results-file results.csv --plot curves.png
    vitzoo validate cvt_ls_13 --suite robust --data-root variants --results-file robustness.csv
    vitzoo validate runs/photos --data-dir photos --corrupt
    vitzoo validate cvt_13 deit_ls_tiny --data-dir imagenet --measures cosine,effective_rank --plot tokens.png
    vitzoo validate cvt_ls_13 --data-dir imagenet --save-predictions predictions.csv --errors errors
    vitzoo validate --from-predictions predictions.csv --errors errors --data-dir imagenet
    accelerate launch --num_processes 4 validate.py cvt_ls_13 --data-dir imagenet
"""


def main(argv: list[str] | None = None) -> None:
    """Run the command and exit with its exit code."""
    # imported here, so that vitzoo.validate.results can be imported without Accelerate
    from vitzoo.errors import run_command
    from vitzoo.launch import start_missing_processes
    from vitzoo.validate.command import validate

    start_missing_processes()
    run_command(validate, argv)
