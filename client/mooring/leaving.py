"""The way out after a just-in-time save."""

import os
import sys
import threading
import time
from typing import Final, NoReturn

from mooring_api import names

_PATIENCE_SECONDS: Final = 10.0


def leave() -> NoReturn:
    """SystemExit(143), whose way out nothing holds up for long: a process group may wait for ranks that are gone."""
    threading.Thread(target=_end_what_hangs, name="mooring-leave", daemon=True).start()
    raise SystemExit(names.JUST_IN_TIME_EXIT_CODE)


def _end_what_hangs() -> None:
    # It counts from the end of the main thread: the program's own cleaning up may take its time.
    threading.main_thread().join()
    time.sleep(_PATIENCE_SECONDS)
    sys.stderr.flush()
    sys.stdout.flush()
    os._exit(names.JUST_IN_TIME_EXIT_CODE)
