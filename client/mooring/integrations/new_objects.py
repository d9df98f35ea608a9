"""Zero code for a framework whose trainer is an object: each one that is made is protected."""

import functools
from collections.abc import Callable
from typing import Any

from mooring.autoload.post_import import reason, warn


def protect_new(cls: Any, install: Callable[[Any], None]) -> None:
    """Call `install` with every object of `cls` that is made from now on. What it raises costs one warning."""
    make = cls.__init__

    @functools.wraps(make)
    def make_protected(self: Any, *arguments: Any, **keywords: Any) -> None:
        make(self, *arguments, **keywords)
        try:
            install(self)
        except Exception as error:
            warn(f"{type(self).__qualname__} is not protected: {reason(error)}")

    cls.__init__ = make_protected
