"""The functions with which programs and frameworks write their tensors, as they behave within a save of Keepstep.

Owns their replacements: `torch.save` and safetensors' `save_file` hand what they were given to the save that is open
in their thread, and so do the streams into which `torch.distributed.checkpoint` writes its files. In any other thread,
and outside of a save, they do what they always did. Imports nothing of these libraries before the program does.
"""

import functools
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final

from keepstep.asynchronous_saves import direct_file
from keepstep.asynchronous_saves.background_writer import BackgroundSave

if TYPE_CHECKING:
    from keepstep.asynchronous_saves.memory_stream import MemoryStream

_MARK: Final = "__keepstep_saves__"
_USUAL: Final = {"_use_new_zipfile_serialization": True}
_TENSORS_OF_DCP: Final = ".distcp"
_open = threading.local()


@contextmanager
def handing_in(save: BackgroundSave) -> Iterator[None]:
    """While open, what this thread saves is handed to `save`; if this block raises, nothing more of it is written."""
    _install()
    before, _open.save = _current(), save
    try:
        yield
    except BaseException:
        save.cancel()
        raise
    finally:
        _open.save = before
        save.begin_writing()


def hand_in(value: Any, path: str | os.PathLike[str], write: Callable[[Any, Any], object]) -> bool:
    """Hand what `torch.save` takes to the save that is open in this thread, to be written later by `write`.

    `write` gets a copy of it, and the path of an empty file or an object that has a file's `write`. Returns False where
    the caller must write it by itself.
    """
    save = _current()
    if save is None:
        return False
    from keepstep.asynchronous_saves.host_copy import copy_to_host

    return save.take(path, functools.partial(copy_to_host, value), functools.partial(_write, write, save.wrote))


def opened(target: Any) -> AbstractContextManager[Any]:
    """Open what `hand_in`'s `write` got, if that is a path."""
    return open(target, "wb") if isinstance(target, str) else nullcontext(target)  # noqa: PTH123


def _write(write: Callable[[Any, Any], object], wrote: Callable[[int], object], copied: Any, path: str) -> None:
    with direct_file.opened(path, copied.size_bytes, wrote) as file:
        write(copied.value, path if file is None else file)


def _current() -> BackgroundSave | None:
    save: BackgroundSave | None = getattr(_open, "save", None)
    return save


def _install() -> None:
    for module, name, home, make in _FUNCTIONS:
        original = getattr(sys.modules.get(module), name, None)
        if original is not None and not hasattr(original, _MARK) and _is_from(original, home):
            ours = functools.wraps(original)(make(original))
            setattr(ours, _MARK, True)
            _replace(original, ours)

    filesystem: Any = sys.modules.get("torch.distributed.checkpoint.filesystem")
    if filesystem is not None and not hasattr(filesystem.FileSystem.create_stream, _MARK):
        stream = functools.wraps(filesystem.FileSystem.create_stream)(
            _create_stream(filesystem.FileSystem.create_stream)
        )
        setattr(stream, _MARK, True)
        filesystem.FileSystem.create_stream = stream


def _is_from(function: Any, home: str) -> bool:
    """Whether the library has this function, and not a program that put its own in its place, which we leave alone."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename == getattr(sys.modules.get(home), "__file__", None)


def _replace(original: Any, ours: Any) -> None:
    """Replace a function in every module that has it: most import it by its name."""
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is original:
                setattr(module, name, ours)


def _torch_save(save: Callable[..., Any]) -> Callable[..., Any]:
    def handing_save(obj: Any, f: Any, *arguments: Any, **keywords: Any) -> Any:
        # With further arguments it writes other formats. DeepSpeed asks for the usual one by name.
        is_plain = not arguments and keywords.items() <= _USUAL.items() and isinstance(f, str | os.PathLike)
        return None if is_plain and hand_in(obj, f, save) else save(obj, f, *arguments, **keywords)

    return handing_save


def _save_file(save_file: Callable[..., Any]) -> Callable[..., Any]:
    def handing_save_file(tensors: Any, filename: Any, metadata: Mapping[str, str] | None = None) -> Any:
        current = _current()
        if current is not None and _are_apart(tensors):
            from keepstep.asynchronous_saves.host_copy import copy_tensors_to_host
            from keepstep.asynchronous_saves.safetensors_file import write_tensors

            kept = None if metadata is None else dict(metadata)

            def write(copied: Any, target: Any) -> None:
                if isinstance(target, str):
                    save_file(copied, target, metadata=kept)
                else:
                    write_tensors(copied, target, kept)

            copy = functools.partial(copy_tensors_to_host, tensors)
            if current.take(filename, copy, functools.partial(_write, write, current.wrote)):
                return None
        return save_file(tensors, filename, metadata=metadata)

    return handing_save_file


def _create_stream(create_stream: Callable[..., Any]) -> Callable[..., Any]:
    @contextmanager
    def handing_stream(file_system: Any, path: Any, mode: str) -> Iterator[Any]:
        current = _current()
        with create_stream(file_system, path, mode) as file:
            # The metadata is small, and is renamed at once.
            if current is None or mode != "wb" or not str(path).endswith(_TENSORS_OF_DCP):
                yield file
                return
            from keepstep.asynchronous_saves.memory_stream import MemoryStream

            stream = MemoryStream(current.memory, file)
            yield stream
        if stream.kept:
            _hand_in_stream(current, path, stream)

    return handing_stream


def _hand_in_stream(current: BackgroundSave, path: Any, stream: "MemoryStream") -> None:
    from keepstep.asynchronous_saves.host_copy import HostCopy

    def write(kept: "MemoryStream", target: Any) -> None:
        with opened(target) as file:
            for piece in kept.contents():
                file.write(piece)

    copied = HostCopy(value=stream, size_bytes=stream.size_bytes)
    if not current.take(path, lambda _: copied, functools.partial(_write, write, current.wrote)):
        write(stream, os.fspath(path))


def _are_apart(tensors: Any) -> bool:
    """Whether these are dense tensors without holes, none of which overlaps another.

    Of others the function itself says, before it returns, why it does not save them.
    """
    import torch

    if not isinstance(tensors, dict) or not all(isinstance(one, torch.Tensor) for one in tensors.values()):
        return False
    if not all(one.layout == torch.strided and one.is_contiguous() for one in tensors.values()):
        return False
    spans = sorted((one.data_ptr(), one.data_ptr() + one.nbytes) for one in tensors.values() if one.nbytes)
    return all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


_FUNCTIONS: Final = (
    ("torch", "save", "torch.serialization", _torch_save),
    ("safetensors.torch", "save_file", "safetensors.torch", _save_file),
)
"""Module and name of a function, the module that has its code, and what makes its replacement."""
