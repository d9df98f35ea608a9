"""How a process ends that leaves its training, with the exit code that says whether its step is stored."""

import atexit
import ctypes
import logging
import os
import sys
import threading
import time
from contextlib import suppress
from typing import ClassVar, Final, NoReturn

from keepstep_api import names

_PATIENCE_SECONDS: Final = 10.0
_FLUSH_SECONDS: Final = 1.0

_is_leaving = False
_exit_code: int = names.JUST_IN_TIME_EXIT_CODE


class _LeftError(SystemExit):
    """Ends the main thread when another one has trained."""

    is_raised: ClassVar = threading.Event()

    def __init__(self) -> None:
        super().__init__(_exit_code)
        self.is_raised.set()


def leave(exit_code: int) -> NoReturn:
    """Raise SystemExit, in the main thread too, and end the process by force if its exit hangs.

    A process group may wait at exit for ranks that are gone, and a main thread for what the training returns.
    """
    global _is_leaving, _exit_code
    _exit_code = exit_code
    main = threading.main_thread()
    trains_in_main = threading.current_thread() is main
    if not trains_in_main and not main.is_alive():
        # It has ended, with another exit code, and waits for this thread.
        end_now(exit_code)
    if not trains_in_main and not _is_leaving and main.ident is not None:
        # Once: on its way out, the main thread may take its time.
        _is_leaving = True
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main.ident), ctypes.py_object(_LeftError))
    trained = threading.current_thread()
    threading.Thread(target=_end_what_hangs, args=(trained,), name="keepstep-leave", daemon=True).start()
    raise SystemExit(exit_code)


def end_now(exit_code: int) -> NoReturn:
    """End the process by force, once what it has printed is written, or is not read for a second."""
    last_resort = threading.Timer(_FLUSH_SECONDS, os._exit, (exit_code,))
    last_resort.daemon = True
    last_resort.start()
    logging.shutdown()
    for stream in (sys.stderr, sys.stdout):
        # Whoever read it may be gone.
        with suppress(OSError):
            stream.flush()
    os._exit(exit_code)


def _end_what_hangs(trained: threading.Thread) -> None:
    # The time counts from the end of these threads, because the program's own clean-up may take long.
    trained.join()
    main = threading.main_thread()
    if trained is main or _LeftError.is_raised.wait(_PATIENCE_SECONDS):
        main.join()
        time.sleep(_PATIENCE_SECONDS)
    end_now(_exit_code)


@atexit.register
def _end_as_left() -> None:
    # Of an exception from another thread, the exit code is lost before Python 3.12. Early, to be called late.
    if _is_leaving:
        end_now(_exit_code)
