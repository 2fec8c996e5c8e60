"""`vitzoo convert`: convert an official checkpoint, or a model with other mixers, to a folder that timm loads.

Examples:
    vitzoo convert model_best.pth --model vil_ls_medium.nvidia_in1k --out vil_ls_medium
    vitzoo convert --from deit_small_patch16_224 --to deit_performer_small --out deit_performer_small
    vitzoo convert --from vil_small --checkpoint model_best.pth --to vil_nystrom_small --out vil_nystrom_small
    vitzoo convert --from vit_small_patch14_dinov2 --swap ls:0-9,softmax:10,11 --out dinov2_ls
"""

from vitzoo.convert.command import convert
from vitzoo.errors import run_command


def main(argv: list[str] | None = None) -> None:
    """Run the command and exit with its exit code."""
    run_command(convert, argv)
