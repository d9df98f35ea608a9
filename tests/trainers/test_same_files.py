"""What Keepstep writes behind a training is, file by file, what its framework writes while the training waits."""

import os
import pickletools
import re
import zipfile
from pathlib import Path

import pytest
from tests.harness.bounds import HANG_SECONDS
from tests.harness.warm_python import warm_python
from tests.servers.process import free_port
from tests.trainers.job import LIBRARIES
from tests.trainers.trainers import EXAMPLES

from keepstep.checkpoints.records import read_records
from keepstep_api import names

PROGRAM = Path(__file__).with_name("disturbed.py")

pytestmark = [pytest.mark.trainers, pytest.mark.timeout(900)]


def newest_files(trainer: str, volume: Path, *, asynchronous: bool) -> dict[str, object]:
    """Train, and return the content of each file of the newest checkpoint."""
    volume.mkdir()
    environment = {
        **os.environ,
        **{
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        },
        names.ENV_VOLUME: str(volume),
        names.ENV_CHECKPOINT_DIRECTORY: str(volume / names.CHECKPOINT_DIRECTORY),
        names.ENV_ASYNCHRONOUS_SAVES: str(asynchronous).lower(),
    }
    words = [str(PROGRAM), str(EXAMPLES / f"{trainer}.py"), "--steps=4", "--save-every=2"]
    with (volume / "log").open("wb") as log, Path(os.devnull).open("rb") as nothing:
        files = [nothing.fileno(), log.fileno(), log.fileno()]
        started = warm_python(LIBRARIES[trainer]).start(
            words, environment=environment, files=files, directory=volume, new_session=True
        )
        assert started.wait(HANG_SECONDS) == 0, (volume / "log").read_text()
    record = read_records(volume / names.STATE_DIRECTORY / names.RECORDS_DIRECTORY)[0]
    place = volume / (record.directory or names.CHECKPOINT_DIRECTORY) / record.name
    return {file.path: content(place / file.path if place.is_dir() else place) for file in record.files}


def content(path: Path) -> object:
    """The bytes of a file, less what two trainings do not share."""
    if path.suffix == ".json":
        # How long an evaluation took is there too.
        return [line for line in path.read_text().splitlines() if not re.search(r"runtime|per_second", line)]
    if not zipfile.is_zipfile(path):
        return path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        # The archive's folder has another name, and one part of it is a checksum of others.
        parts = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    del parts[".data/serialization_id"]
    return parts | {"data.pkl": instructions(parts["data.pkl"])}


def instructions(pickled: bytes) -> list[tuple[str, object]]:
    """What a pickle consists of. A text that it refers to is the same as one that is written out again."""
    found: list[tuple[str, object]] = []
    kept: dict[object, tuple[str, object]] = {}
    for code, argument, _ in pickletools.genops(pickled):
        if "PUT" in code.name:
            is_text = found[-1][0] == "BINUNICODE"
            kept[argument] = found[-1] if is_text else ("object", sum(one[0] == "object" for one in kept.values()))
        else:
            found.append(kept[argument] if "GET" in code.name else (code.name, argument))
    return found


@pytest.mark.parametrize("trainer", list(LIBRARIES))
def test_a_checkpoint_written_behind_the_training_is_the_same_byte_by_byte(trainer: str, tmp_path: Path) -> None:
    # Some write the path of the checkpoint into it.
    volume = tmp_path / "volume"
    found = []
    for asynchronous in (True, False):
        found.append(newest_files(trainer, volume, asynchronous=asynchronous))
        volume.rename(tmp_path / f"volume-{asynchronous}")
    assert found[0].keys() == found[1].keys()
    assert [name for name, written in found[0].items() if written != found[1][name]] == []
