"""The command `vitzoo validate`: evaluates the models, and writes and prints their records."""

from typing import TYPE_CHECKING, Any

import torch

from vitzoo.errors import count_of
from vitzoo.load import find_models
from vitzoo.metrics import summarize
from vitzoo.options import num_processes
from vitzoo.validate.error_analysis import open_predicted, write_error_analysis
from vitzoo.validate.evaluation import ACCURACY_KEYS, validate_model
from vitzoo.validate.options import EvalOptions, check_models, check_outputs, parse_args
from vitzoo.validate.predictions import read_predictions
from vitzoo.validate.results import RECORD_KEYS, print_calibration, print_results, write_results
from vitzoo.validate.robustness import open_suite
from vitzoo.validate.unfinished import remove_unfinished

if TYPE_CHECKING:
    from accelerate import Accelerator


def validate(argv: list[str] | None = None) -> list[dict]:
    """Validate the models named on the command line, and return one record per model.

    Raises:
        UserError: A model, a file, a folder or a size is invalid.
    """
    options = parse_args(argv)
    names = find_models(options.models)
    check_models(options, names)
    check_outputs(options)
    if options.from_predictions:
        return [_validate_predictions(options.from_predictions, options)]
    accelerator = _create_accelerator()
    is_main = accelerator is None or accelerator.is_main_process
    suite = open_suite(options.data_root, options.allow_partial, is_main) if options.suite and options.data_root else []
    records = []
    try:
        for name in names:
            records.append(validate_model(name, options, accelerator, suite))
            if is_main and options.results_file:
                write_results(options.results_file, records)
        if is_main:
            remove_unfinished(options, names)
    finally:
        # print what we have even if a later model fails or the user interrupts
        if is_main and records:
            print_results(records, options)
    return records


def _validate_predictions(path: str, options: EvalOptions) -> dict:
    """Compute the record of a file of predictions: accuracies and error analysis only."""
    predictions = read_predictions(path)
    summary = summarize(predictions.columns)
    record: dict[str, Any] = dict.fromkeys(RECORD_KEYS) | {key: summary.get(key) for key in ACCURACY_KEYS}
    record |= dict(model=path, weights='predictions')
    if options.errors:
        load_image = (
            None
            if options.data_dir is None
            else open_predicted(options.data_dir, predictions.files, options.data_options)
        )
        record |= write_error_analysis(options.errors, predictions, load_image)
    if options.results_file:
        write_results(options.results_file, [record])
    scores = f'top-1 {record["top1"]:.2f} %, top-5 {record["top5"]:.2f} %, loss {record["loss"]:.3f}'
    if record['map'] is not None:
        scores += f', mAP {record["map"]:.2f} %'
    print(f'{path}: {scores}, {count_of(record["n"], "image")}')
    print_calibration(record, options)
    return record


def _create_accelerator() -> 'Accelerator | None':
    """The `Accelerator` of processes started by `accelerate launch` or torchrun; None for a single process."""
    if num_processes() == 1:
        return None
    from accelerate import Accelerator

    # without cpu=True, Accelerate does not connect the processes of a machine without a GPU
    return Accelerator(cpu=not torch.accelerator.is_available())
