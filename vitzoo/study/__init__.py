"""`vitzoo study`: train, convert and compare models with several seeds, in cells that many workers can share.

Examples:
    vitzoo study run study/imagenette.yaml
    vitzoo study run study.yaml --launch 'accelerate launch --num_processes 4'
    vitzoo study run study.yaml --retry
    vitzoo study status study.yaml
    vitzoo study report study.yaml --out tables

`run` computes the cells that are not finished. It can be stopped at any time and started again, and on several
machines at once if they share the folder of the study.
"""


def main(argv: list[str] | None = None) -> None:
    """Run the command and exit with its exit code."""
    # lazy: the command imports timm and the trainer
    from vitzoo.errors import run_command
    from vitzoo.study.command import run_study

    run_command(run_study, argv)
