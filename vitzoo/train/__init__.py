"""`vitzoo train`: train an image classifier, on one process or, with `accelerate launch`, on several.

Examples:
    vitzoo train --config quickstart.yaml
    vitzoo train --config finetune.yaml --data-dir photos --model deit_tiny_patch16_224 --pretrained
    accelerate launch --num_processes 8 train.py --config imagenet/vil.yaml --data-dir imagenet
    vitzoo train --resume runs/cvt_ls_13

A run is a function of its recipe. All random numbers follow from the seed and the step, so data order, augmentation and
mixup are the same for any number of loader workers, and after any interruption. SIGTERM, as clusters send it on
preemption, ends a run with a checkpoint.
"""


def main(argv: list[str] | None = None) -> None:
    """Run the command and exit with its exit code."""
    # lazy: vitzoo.train.recipe must be importable without Accelerate
    from vitzoo.errors import run_command
    from vitzoo.launch import start_missing_processes
    from vitzoo.train.loop import train

    start_missing_processes()
    run_command(train, argv)
