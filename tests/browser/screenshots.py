"""The pictures in docs/images, of a console that shows a fleet.

`python -m tests.browser.screenshots ADDRESS` takes them from the address that `make fleet` prints.
"""

import argparse
from pathlib import Path
from typing import Final

from tests.browser.chromium import DESK, PHONE, chromium

IMAGES: Final = Path(__file__).parents[2] / "docs" / "images"
_RUN: Final = "run?name=language%2Fmedium"
_PICTURES: Final = {
    "console-runs": ("", DESK, 800, False),
    "console-run-dark": (_RUN, DESK, 760, True),
    "console-run-phone": (_RUN, PHONE, 760, False),
}
"""Path, width and height in CSS pixels, and whether it is dark, by name."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Take the pictures in docs/images.")
    parser.add_argument("address", help="of the console's pages, as make fleet prints it")
    address = parser.parse_args().address
    IMAGES.mkdir(exist_ok=True)
    with chromium() as browser:
        for name, (path, width, height, dark) in _PICTURES.items():
            browser.be(width, height, dark=dark)
            browser.picture(address + path, IMAGES / f"{name}.png")


if __name__ == "__main__":
    main()
