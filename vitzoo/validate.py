"""`vitzoo validate`: accuracy, size, speed, oversmoothing and health of models, in a table, a file and a figure.

Examples:
    vitzoo validate runs/cvt_ls_13
    vitzoo validate 'deit_*' resnet50 --data-dir imagenet --results-file results.csv --plot curves.png
    accelerate launch --num_processes 4 validate.py cvt_ls_13 --data-dir imagenet
"""

import argparse
import os
import sys
from contextlib import nullcontext

import torch
from timm.data import ImageNetInfo, infer_imagenet_subset
from torch import nn

from vitzoo.data import Images, eval_loader, eval_transform, open_dataset
from vitzoo.errors import UserError, run_command
from vitzoo.launch import start_missing_processes
from vitzoo.load import find_models, fit_data_config, label_names, load_model, read_about
from vitzoo.metrics import HealthProbe, OversmoothingProbe, count_macs, evaluate
from vitzoo.metrics.speed import PeakMemory, images_per_second
from vitzoo.options import add_model_options, autocast
from vitzoo.results import check_output, plot_curves, print_health, print_table, write_results

DATA_DIR_HELP = """class folders, in a folder, .tar or .zip, or one that holds them in val/, validation/ or test/, or
WebDataset shards (wds/FOLDER), or data of torchvision or Hugging Face (torch/NAME, hfds/NAME); by default the bundled
sample"""


def main(argv: list[str] | None = None) -> None:
    """Run the command and end the process with its exit code."""
    start_missing_processes()
    run_command(validate, argv)


def validate(argv: list[str] | None = None) -> list[dict]:
    """Validate the models that the command line names, and return one record per model.

    Raises:
        UserError: A model, a file, a folder or a size is not what it should be.
    """
    args = parse_args(argv)
    names = find_models(args.models)
    if args.checkpoint and len(names) > 1:
        raise UserError(f'--checkpoint {args.checkpoint} is for one model, and there are {len(names)}')
    if args.results_file:
        check_output(args.results_file, ('.csv', '.json'))
    if args.plot:
        check_output(args.plot, ('.png', '.pdf', '.svg'))
    accelerator = _accelerator()
    is_main = accelerator is None or accelerator.is_main_process
    records = []
    for name in names:
        records.append(validate_model(name, args, accelerator))
        if is_main and args.results_file:
            # after every model, so that an interrupted run keeps what it has
            write_results(args.results_file, records)
    if is_main:
        print_table(records, _title(args, records[0]['n']))
        print_health(records)
        if args.plot:
            plot_curves(args.plot, records)
    return records


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser('vitzoo validate', description=__doc__.partition('\n')[0])
    add = parser.add_argument
    add('models', nargs='+', metavar='MODEL', help='a timm name, a wildcard in quotes, or a folder that training wrote')
    add('--data-dir', default='sample', metavar='DIR', help=DATA_DIR_HELP)
    add('--no-data', action='store_true', help='report only what needs no images')
    add('--random-weights', action='store_true', help='do not fetch published weights')
    add_model_options(parser)
    add('--results-file', metavar='FILE', help='write one record per model, .csv or .json')
    add('--plot', metavar='FILE', help='draw the oversmoothing curves, .png')
    add('--health', action='store_true', help='compare what approximates softmax attention with it, in a second pass')
    args = parser.parse_args(argv)
    if args.no_data and args.plot:
        parser.error('--plot draws oversmoothing curves, which need images: drop --no-data')
    if args.no_data and args.health:
        parser.error('--health compares attention on images: drop --no-data')
    return args


def validate_model(name: str, args: argparse.Namespace, accelerator=None) -> dict:
    """Measure one model and return its record; what needs images is None with --no-data.

    The oversmoothing curve is None also for a model without feature maps of its blocks, health for one in which nothing
    approximates softmax attention.
    """
    device = args.device if accelerator is None else accelerator.device
    with PeakMemory(device) as memory:
        model, weights = load_model(
            name,
            img_size=args.img_size,
            num_classes=args.num_classes,
            checkpoint=args.checkpoint,
            pretrained=not (args.no_data or args.random_weights),
        )
        model = model.to(device)
        with autocast(device, args.amp_dtype):
            data_config = fit_data_config(name, model, args.img_size)
            probe = _find_probe(model, data_config['input_size'])
            scores = {} if args.no_data else _evaluate(name, model, data_config, probe, args, accelerator)
            speed = _measure_speed(model, data_config['input_size'], args.batch_size, accelerator)
    with autocast(device, args.amp_dtype):
        # exact attention needs memory that is not the model's
        health = _measure_health(name, model, data_config, args, accelerator) if args.health else None
    height, width = data_config['input_size'][1:]
    return dict(
        model=name,
        weights=weights,
        **{key: scores.get(key) for key in ('top1', 'top5', 'loss', 'n', 'oversmoothing', 'map')},
        params=sum(parameter.numel() for parameter in model.parameters()),
        gmacs=count_macs(model, (height, width)) / 1e9,
        img_size=height if height == width else f'{height}x{width}',
        images_per_second=speed,
        peak_memory_mb=memory.megabytes,
        health=health,
    )


def open_validation_data(data_dir: str, model: nn.Module, transform=None, run: str | None = None) -> Images:
    """Open the validation split with the labels of the model's classes.

    With the folder of a run that held images of this very data out of training, these are the validation split.

    Classes are found by name where the model knows their names: those it was trained on, or ImageNet's WordNet ids, of
    which the data may have only some. Without names, class folders in natural order are the classes.

    Raises:
        UserError: The data has other classes than the model.
    """
    about = {} if run is None else read_about(run)
    options = {key: about[key] for key in ('multi_label', 'held_out') if key in about}
    dataset = open_dataset(data_dir, 'val', transform, **options)
    class_names = label_names(model)
    if not class_names:
        subset = infer_imagenet_subset(model)
        class_names = ImageNetInfo(subset).label_names() if subset else []
        if not set(dataset.class_names) <= set(class_names):
            class_names = []
    if class_names:
        return Images(dataset.reader, transform, {name: i for i, name in enumerate(class_names)})
    if len(dataset.class_names) != model.num_classes:
        raise UserError(
            f'the model has {model.num_classes} classes and {data_dir} has {len(dataset.class_names)}, which are not '
            f"ImageNet's WordNet ids ({', '.join(dataset.class_names[:3])}, …); validate a model that was trained on "
            'these classes: its folder, or --num-classes with --checkpoint'
        )
    return dataset


def _evaluate(name: str, model: nn.Module, data_config: dict, probe, args: argparse.Namespace, accelerator) -> dict:
    """Evaluate a model on the validation data, this process's share of it where several run."""
    from rich.console import Console
    from rich.progress import Progress

    dataset = open_validation_data(args.data_dir, model, eval_transform(data_config), run=name)
    share = dict(rank=accelerator.process_index, world=accelerator.num_processes) if accelerator is not None else {}
    loader = eval_loader(dataset, args.batch_size, args.workers, **share)
    console = Console(stderr=True)
    hidden = bool(share.get('rank')) or not console.is_terminal
    if dataset.is_held_out and not share.get('rank'):
        print(
            f'vitzoo: of {args.data_dir}, the {len(dataset)} images that {name} held out of its training',
            file=sys.stderr,
        )
    with Progress(console=console, disable=hidden) as bar, probe or nullcontext():
        task = bar.add_task(name, total=len(loader))
        return evaluate(model, loader, accelerator, progress=lambda n: bar.advance(task), probe=probe)


@torch.no_grad()
def _find_probe(model: nn.Module, input_size: tuple[int, int, int]) -> OversmoothingProbe | None:
    """A probe of the model's blocks, tried on an image; None where they cannot be watched, and a line that says why."""
    images = torch.zeros(1, *input_size, device=next(model.parameters()).device)
    try:
        with OversmoothingProbe(model) as probe:
            model(images)
    except UserError as error:
        print(f'vitzoo: {error}', file=sys.stderr)
        return None
    probe.per_image()
    return probe


def _measure_health(
    name: str, model: nn.Module, data_config: dict, args: argparse.Namespace, accelerator
) -> dict[str, dict[str, float]] | None:
    """Compare the mixers that approximate softmax attention with it on the validation data."""
    try:
        probe = HealthProbe(model)
    except UserError as error:
        print(f'vitzoo: {name}: {error}', file=sys.stderr)
        return None
    with torch.no_grad(), probe:
        # an image shows what each mixer has to say, also to a process with no share of the data
        model(torch.zeros(1, *data_config['input_size'], device=next(model.parameters()).device))
    probe.per_image()
    return probe.report(_evaluate(name, model, data_config, probe, args, accelerator)[probe.key])


def _measure_speed(model: nn.Module, input_size: tuple[int, int, int], batch_size: int, accelerator) -> float | None:
    """Time batches of the given size in the main process; on a CPU of at most 8 images, more only take longer."""
    device = next(model.parameters()).device
    batch_size = min(batch_size, 8) if device.type == 'cpu' else batch_size
    images = torch.randn(batch_size, *input_size, device=device)
    if accelerator is None:
        return images_per_second(model, images)
    # processes that share a machine would slow each other down
    accelerator.wait_for_everyone()
    speed = images_per_second(model, images) if accelerator.is_main_process else None
    accelerator.wait_for_everyone()
    return speed


def _accelerator():
    """The processes that `accelerate launch` or torchrun started; None where there is one."""
    if int(os.environ.get('WORLD_SIZE', '1')) == 1:
        return None
    from accelerate import Accelerator

    # without cpu=True, processes on a machine without an accelerator would not see each other
    return Accelerator(cpu=not torch.accelerator.is_available())


def _title(args: argparse.Namespace, num_images: int | None) -> str:
    device = torch.cuda.get_device_name(args.device) if args.device.type == 'cuda' else args.device.type
    data = 'no images' if args.no_data else f'{num_images:,} images of {args.data_dir}'
    world = int(os.environ.get('WORLD_SIZE', '1'))
    processes = f', {world} processes' if world > 1 else ''
    return f'{data}, {device}, {args.amp_dtype}, batches of {args.batch_size}{processes}'


if __name__ == '__main__':
    main()
