"""What the ranks of a job share, without torch: its key store as a server, and a stand-in for `torch.distributed`.

Starting a trainer then takes a fraction of a second, so that chaos can end hundreds of them in minutes.
"""

import contextlib
import sys
import threading
import types
from collections.abc import Sequence
from multiprocessing.managers import BaseManager
from typing import Any

_KEY = b"chaos"


class _Keys:
    """The methods of `torch.distributed.Store` that the client uses."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: str) -> None:
        with self._lock:
            self._values[key] = value

    def get(self, key: str) -> bytes:
        with self._lock:
            return self._values[key].encode()

    def check(self, keys: Sequence[str]) -> bool:
        with self._lock:
            return all(key in self._values for key in keys)

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            self._values[key] = str(int(self._values.get(key, "0")) + amount)
            return int(self._values[key])

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        with self._lock:
            if self._values.get(key, "") == expected:
                self._values[key] = desired
            return self._values[key].encode()

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def delete_key(self, key: str) -> bool:
        with self._lock:
            return self._values.pop(key, None) is not None


class _Manager(BaseManager):
    pass


class KeyServer:
    """Serves one start of the job on a port of loopback; like torch's it is gone with that start."""

    def __init__(self) -> None:
        keys = _Keys()

        class Serving(BaseManager):
            pass

        Serving.register("keys", callable=lambda: keys)
        # typeshed knows little of a manager's server.
        server: Any = Serving(address=("127.0.0.1", 0), authkey=_KEY).get_server()
        self._server = server
        self.port: int = server.address[1]
        threading.Thread(target=self._serve, name="chaos-keys", daemon=True).start()

    def _serve(self) -> None:
        # It ends by SystemExit.
        with contextlib.suppress(SystemExit):
            self._server.serve_forever()

    def stop(self) -> None:
        self._server.stop_event.set()


class KeyClient:
    """A rank's connection. RuntimeError when the server has gone, as torch's store raises it."""

    def __init__(self, port: int) -> None:
        self._port = port
        _Manager.register("keys")
        manager = _Manager(address=("127.0.0.1", port), authkey=_KEY)
        try:
            manager.connect()
            self._keys: Any = manager.keys()  # type: ignore[attr-defined]
        except (OSError, EOFError) as error:
            raise RuntimeError(str(error)) from error

    def clone(self) -> "KeyClient":
        return KeyClient(self._port)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._keys, name)

        def call(*arguments: object) -> object:
            try:
                return method(*arguments)
            except (OSError, EOFError) as error:
                raise RuntimeError(str(error)) from error

        return call


def become_rank(port: int, rank: int, world_size: int) -> KeyClient:
    """Make this process a rank, as `torch.distributed.init_process_group` does."""
    store = KeyClient(port)
    distributed: Any = types.ModuleType("torch.distributed")
    distributed.is_available = distributed.is_initialized = lambda: True
    distributed.get_rank = lambda: rank
    distributed.get_world_size = lambda: world_size
    distributed.distributed_c10d = types.SimpleNamespace(_get_default_store=lambda: store)
    sys.modules["torch.distributed"] = distributed
    return store
