"""SIGTERM ends a transfer with a sentence; what it has done is on the disk."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Stopped(Exception):
    """The process has to end; the message is the end of the sentence 'stopped …'."""


@contextmanager
def raise_on_sigterm() -> Iterator[None]:
    """Raise Stopped in the block if this process receives SIGTERM."""

    def stop(*signal_and_frame: object) -> None:
        raise Stopped('by SIGTERM')

    # Python only allows signal handlers in the main thread
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        # None is a handler of another language, which Python cannot set again
        signal.signal(signal.SIGTERM, previous or signal.SIG_DFL)
