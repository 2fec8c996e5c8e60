"""Runs transfers in processes of their own, and interrupts them."""

import gc
import os
import pkgutil

from processes import run_in_turn
from tiny import install_datasets

# functions that all processes call, during which a transfer is interrupted
MOMENTS = {
    'probe': 'vitzoo.transfer.measurements.probe',
    'matching': 'vitzoo.transfer.descent._Descent.measure',
    'softmax': 'vitzoo.transfer.hybrid._most_useful',
    'rates': 'vitzoo.transfer.stages.try_rates',
    'network': 'vitzoo.train.loop.train_step',
    'controls': 'vitzoo.transfer.measurements.zero_attention',
    'export': 'vitzoo.transfer.command.export_student',
}


def transfer_tiny(runs: dict[int, list[str]], file: str) -> None:
    """Transfer once for each port, and write the results of all to a JSON file."""
    from vitzoo.transfer.command import transfer

    _prepare()
    run_in_turn(transfer, runs, file)


def interrupt_tiny(arguments: list[str], moment: str, call: int, number: int, skew: int) -> None:
    """Begin a transfer, and send a signal to this process.

    Args:
        moment: A key of `MOMENTS`.
        call: The call of its function, from 1, before which this process gets the signal.
        number: The signal.
        skew: The number of calls by which each process gets it later than the one before it.
    """
    from vitzoo.transfer import main

    _prepare()
    _send_signal(moment, call + skew * int(os.environ.get('RANK', '0')), number)
    main(arguments)


def _prepare() -> None:
    """Make transfers quick, and the speeds in their results the same."""
    from vitzoo.transfer import measurements
    from vitzoo.validate.evaluation import Speed

    # a transfer collects garbage, and would look through all objects of the imported modules each time
    gc.freeze()
    measurements.measure_throughput = lambda *args: Speed(1.0)
    install_datasets()


def _send_signal(moment: str, call: int, number: int) -> None:
    """Send a signal to this process before a call of the function of a moment."""
    function, calls = pkgutil.resolve_name(MOMENTS[moment]), 0

    def call_after_signal(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == call:
            os.kill(os.getpid(), number)
        return function(*args, **kwargs)

    place, _, name = MOMENTS[moment].rpartition('.')
    setattr(pkgutil.resolve_name(place), name, call_after_signal)
