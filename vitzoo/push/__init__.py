"""`vitzoo push`: upload a trained model with its model card to the Hugging Face hub, or write it to weights/.

Examples:
    vitzoo push runs/photos --to hf-hub:me/photos --license cc-by-4.0
    vitzoo push runs/photos/best --to hf-hub:me/photos --license cc-by-4.0 --half --private
    vitzoo push runs/imagenette/scratch/deit_ls_nano/seed-0 --to weights/deit_ls_nano.vz_imagenette --half \\
        --license 'ImageNet terms, non-commercial research'

The numbers on the card are those of the uploaded weights, measured by this command on the validation images of the run.
"""


def main(argv: list[str] | None = None) -> None:
    """Run the command and exit with its exit code."""
    # lazy: the command imports timm and the trainer
    from vitzoo.errors import run_command
    from vitzoo.push.command import push

    run_command(push, argv)
