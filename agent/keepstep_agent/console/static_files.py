"""The style sheet, the script and the icon of the pages."""

from collections.abc import Mapping
from importlib import resources
from types import MappingProxyType
from typing import Final

from aiohttp import web

STATIC_FILES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "console.css": "text/css",
        "console.js": "text/javascript",
        "icon.svg": "image/svg+xml",
    }
)
"""The content type of each, by its name below `/static/`."""


def static_file(name: str) -> web.Response:
    """Return one of `STATIC_FILES`."""
    body = resources.files("keepstep_agent.console").joinpath("static", name).read_bytes()
    return web.Response(body=body, content_type=STATIC_FILES[name], charset="utf-8")
