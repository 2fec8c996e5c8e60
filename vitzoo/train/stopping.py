"""Tells a training that its process has to end, so that it can save its state first."""

import os
import signal
import threading


class StopSignal:
    """Records whether this process received SIGTERM, or torchrun, which started it, was killed."""

    def __init__(self) -> None:
        self.received = False
        self.launcher = os.getppid() if 'TORCHELASTIC_RUN_ID' in os.environ else None

    @property
    def is_orphan(self) -> bool:
        """True if torchrun has ended without ending this process."""
        return self.launcher not in (None, os.getppid())

    @property
    def reason(self) -> str:
        """The end of the sentence 'stopped …'."""
        return 'because its launcher was killed' if self.is_orphan else 'by SIGTERM'

    def _handle(self, *signal_and_frame: object) -> None:
        self.received = True

    def __enter__(self) -> 'StopSignal':
        # Python only allows signal handlers in the main thread
        self.is_installed = threading.current_thread() is threading.main_thread()
        if self.is_installed:
            self.previous = signal.signal(signal.SIGTERM, self._handle)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.is_installed:
            # None is a handler of another language, which Python cannot set again
            signal.signal(signal.SIGTERM, self.previous or signal.SIG_DFL)
