"""`vitzoo transfer`: replace the attention of a pretrained ViT by efficient mixers, without labels.

Examples:
    vitzoo transfer vit_small_patch16_dinov3 --mixer ls --data-dir photos --output runs/dinov3_ls
    vitzoo transfer runs/photos --mixer ls,nystrom,performer --data-dir photos --output runs/cheap --keep-softmax auto
    vitzoo transfer runs/photos --mixer performer --data-dir photos --probe-only
"""

from vitzoo.transfer.attention import zero_attention
from vitzoo.transfer.distillation import distil
from vitzoo.transfer.hybrid import keep_softmax
from vitzoo.transfer.matching import match_blocks
from vitzoo.transfer.probing import BlockCost, probe

__all__ = ['BlockCost', 'distil', 'keep_softmax', 'match_blocks', 'probe', 'zero_attention']


def main(argv: list[str] | None = None) -> None:
    """Run the command and exit with its exit code."""
    # lazy: the functions above need no Accelerate
    from vitzoo.errors import run_command
    from vitzoo.launch import start_missing_processes
    from vitzoo.transfer.command import transfer

    start_missing_processes()
    run_command(transfer, argv)
