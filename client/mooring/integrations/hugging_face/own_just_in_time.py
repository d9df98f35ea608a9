"""The Trainer's own just-in-time saving (`enable_jit_checkpoint`), which ours replaces.

It stops each rank by itself, three seconds after that rank's SIGTERM: when only one has it, training hangs.
"""

import logging
import signal
import threading
from typing import Any, Final

_log: Final = logging.getLogger("mooring")


def remove_own_just_in_time(callback_handler: Any) -> None:
    """Remove its callback, and give SIGTERM back to whoever had it before."""
    for callback in list(callback_handler.callbacks):
        if type(callback).__name__ != "JITCheckpointCallback":
            continue
        callback_handler.remove_callback(callback)
        previous = callback.jit_manager._original_sigterm_handler
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL if previous is None else previous)
        _log.info("enable_jit_checkpoint is replaced by Mooring's just-in-time save, on all ranks at one step")
