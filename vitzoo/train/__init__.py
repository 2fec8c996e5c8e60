"""`vitzoo train`: trains an image classifier, in one process or, under `accelerate launch`, in many.

Examples:
    vitzoo train --config configs/quickstart.yaml
    vitzoo train --config configs/finetune.yaml --data-dir photos --model deit_tiny_patch16_224 --pretrained
    accelerate launch --num_processes 8 train.py --config configs/imagenet/vil.yaml --data-dir imagenet
    vitzoo train --resume runs/cvt_ls_13

A run is a function of its recipe. All random numbers follow from the seed and the step, so images are drawn, augmented
and mixed in the same way for any number of worker processes, and after any interruption. SIGTERM, as a cluster sends
it before it takes a machine away, ends a run with a checkpoint.
"""


def main(argv: list[str] | None = None) -> None:
    """Run the command and end the process with its exit code."""
    # imported here, so that vitzoo.train.recipe can be imported without Accelerate
    from vitzoo.errors import run_command
    from vitzoo.launch import start_missing_processes
    from vitzoo.train.loop import train

    start_missing_processes()
    run_command(train, argv)
