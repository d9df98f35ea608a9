"""The image itself: what runs in it, as whom, and what is not in it."""

import json

import pytest
from tests.containers.container import run
from tests.containers.engine import Engine
from tests.containers.image import BASE, IMAGE

pytestmark = [pytest.mark.containers, pytest.mark.timeout(2400)]

# In megabytes on top of the base, as a registry's user sees it unpacked. Python itself is some 40 of them.
LARGEST_ADDED_MEGABYTES = 350


def test_every_part_of_mooring_starts_from_the_one_image(engine: Engine) -> None:
    script = "mooring --version; for part in agent restore webhook ready terminating; do mooring $part --help; done"
    said = run(engine, f"set -e; {script}", entrypoint=["sh", "-c"])
    assert said.startswith("mooring, version ")
    for part in ("agent", "restore", "webhook", "ready", "terminating"):
        assert f"Usage: mooring {part}" in said


def test_it_runs_as_a_numbered_user_that_is_not_root_and_as_any_other_on_a_read_only_root(engine: Engine) -> None:
    write = "for file in /opt/mooring/x /tmp/x /x; do touch $file 2>/dev/null && echo written; done"
    look = f"id -u; {write}; mooring --version"
    assert run(engine, look, entrypoint=["sh", "-c"]).split()[0] == "65532"
    # As OpenShift does: a user that no image knows, in root's group.
    for user in ("1000730000:0", "0:0"):
        said = run(engine, look, entrypoint=["sh", "-c"], user=user)
        assert said.split()[0] == user.partition(":")[0]
        assert "mooring, version" in said
        assert "written" not in said


def test_it_holds_no_compiler_no_installer_and_no_torch(engine: Engine) -> None:
    look = (
        "for tool in gcc cc c++ g++ ld make pip pip3; do command -v $tool; done; "
        "/opt/mooring/bin/python -c 'import importlib.util as u; "
        'print([name for name in ("torch", "numpy", "pip", "setuptools", "hatchling", "moto", "pytest") '
        "if u.find_spec(name)])'"
    )
    assert run(engine, look, entrypoint=["sh", "-c"]) == "[]\n"


def test_it_says_what_it_is_and_is_not_large(engine: Engine) -> None:
    (image,) = json.loads(engine.podman("image", "inspect", IMAGE))
    (base,) = json.loads(engine.podman("image", "inspect", BASE))
    labels = image["Labels"]
    assert labels["org.opencontainers.image.title"] == "mooring"
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert labels["org.opencontainers.image.base.name"] == BASE
    assert image["Config"]["User"] == "65532:65532"
    assert image["Config"]["Entrypoint"] == ["mooring"]
    added = (image["Size"] - base["Size"]) / 1e6
    print(f"the image has {image['Size'] / 1e6:.0f} MB, {added:.0f} of them on top of its base")
    assert added < LARGEST_ADDED_MEGABYTES
