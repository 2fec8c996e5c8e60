"""`vitzoo export`: write a model to a file of ONNX, OpenVINO or torch.export, and compare its logits with the model's.

Examples:
    vitzoo export runs/photos --to onnx --out photos.onnx
    vitzoo export cvt_13 --to openvino --img-size 384 --out cvt_13.xml
    vitzoo export vil_ls_small --checkpoint model.safetensors --to torch --out vil.pt2

The file takes normalized images (B, C, H, W) in float32, with any B, and returns logits. Its metadata has the class
names and what preprocessing needs.
"""

from vitzoo.errors import run_command
from vitzoo.export.command import export_to_file


def main(argv: list[str] | None = None) -> None:
    """Run the command and exit with its exit code."""
    run_command(export_to_file, argv)
