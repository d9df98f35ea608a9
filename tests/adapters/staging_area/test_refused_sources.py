"""Nothing from outside the volume is ever staged, and nothing that cannot be stored."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.adapters.staging_area.staged_files import pinned_contents, refusal, stage_request, staged_names

from keepstep_agent.adapters.volume.staging_area import LocalStagingArea
from keepstep_agent.core.errors import ErrorKind, RequestError


def test_a_path_outside_the_volume_is_refused(tmp_path: Path, area: LocalStagingArea) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    assert refusal(area, stage_request(tmp_path / "secret")).kind is ErrorKind.PATH_OUTSIDE_VOLUME
    assert refusal(area, stage_request(tmp_path)).kind is ErrorKind.PATH_OUTSIDE_VOLUME


def test_a_link_that_leaves_the_volume_is_refused_by_name(
    tmp_path: Path, volume: Path, area: LocalStagingArea, checkpoint: Path
) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    (checkpoint / "model" / "link").symlink_to(tmp_path / "secret")
    error = refusal(area, stage_request(checkpoint))
    assert error.kind is ErrorKind.PATH_OUTSIDE_VOLUME
    assert f"{checkpoint}/model/link" in str(error)
    assert f"{tmp_path}/secret" in str(error)
    assert refusal(area, stage_request(checkpoint, "model/link")).kind is ErrorKind.PATH_OUTSIDE_VOLUME
    (volume / "way-out").symlink_to(tmp_path)
    assert refusal(area, stage_request(volume / "way-out" / "secret")).kind is ErrorKind.PATH_OUTSIDE_VOLUME
    assert refusal(area, stage_request(volume, "way-out/secret")).kind is ErrorKind.PATH_OUTSIDE_VOLUME
    assert staged_names(volume) == []


def test_links_that_stay_inside_are_stored_as_the_files_they_name(
    volume: Path, area: LocalStagingArea, checkpoint: Path
) -> None:
    (volume / "shared").mkdir()
    (volume / "shared" / "tokenizer").write_bytes(b"words")
    (checkpoint / "tokenizer").symlink_to("../../shared/tokenizer")
    (checkpoint / "folder").symlink_to(volume / "shared")
    (volume / "latest").symlink_to(checkpoint)
    files = area.stage(stage_request(volume / "latest"))
    contents = pinned_contents(volume, files)
    assert (contents["tokenizer"], contents["folder/tokenizer"]) == (b"words", b"words")
    assert not any((volume / file.pin).is_symlink() for file in files)


def test_a_volume_that_is_itself_reached_by_a_link_works(tmp_path: Path, volume: Path, checkpoint: Path) -> None:
    (tmp_path / "mount").symlink_to(volume)
    area = LocalStagingArea(tmp_path / "mount")
    files = area.stage(stage_request(tmp_path / "mount" / "checkpoints" / "checkpoint-1"))
    assert pinned_contents(volume, files)["state.json"] == b"{}"


@pytest.mark.parametrize("target", ["nowhere", "link", "."])
def test_links_that_lead_nowhere_or_in_circles_are_refused(
    area: LocalStagingArea, checkpoint: Path, target: str
) -> None:
    (checkpoint / "link").symlink_to(target)
    error = refusal(area, stage_request(checkpoint))
    assert error.kind is (ErrorKind.FILE_MISSING if target == "nowhere" else ErrorKind.BAD_REQUEST)
    assert f"{checkpoint}/link" in str(error)


def test_keepsteps_own_folder_is_never_staged(volume: Path, area: LocalStagingArea, checkpoint: Path) -> None:
    area.stage(stage_request(checkpoint))
    (checkpoint / "back").symlink_to(volume / ".keepstep" / "staged")
    for source in (volume, volume / ".keepstep", volume / ".keepstep" / "staged" / "save-1", checkpoint):
        assert refusal(area, stage_request(source, save="save-2")).kind is ErrorKind.BAD_REQUEST
    request = stage_request(volume, ".keepstep/staged/save-1/rank-00003.json", save="save-2")
    assert refusal(area, request).kind is ErrorKind.BAD_NAME


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        (("missing",), ErrorKind.FILE_MISSING),
        (("state.json/below",), ErrorKind.FILE_MISSING),
        (("model",), ErrorKind.BAD_REQUEST),
        (("../checkpoint-1/state.json",), ErrorKind.BAD_NAME),
        (("/etc/passwd",), ErrorKind.BAD_NAME),
    ],
)
def test_named_files_that_cannot_be_stored_are_refused(
    volume: Path, area: LocalStagingArea, checkpoint: Path, files: tuple[str, ...], kind: ErrorKind
) -> None:
    assert refusal(area, stage_request(checkpoint, "state.json", *files)).kind is kind
    assert staged_names(volume) == []


def test_missing_empty_and_relative_sources_are_refused(volume: Path, area: LocalStagingArea, checkpoint: Path) -> None:
    (volume / "hollow" / "folder").mkdir(parents=True)
    assert refusal(area, stage_request(volume / "missing")).kind is ErrorKind.FILE_MISSING
    assert refusal(area, stage_request(volume / "hollow")).kind is ErrorKind.CHECKPOINT_EMPTY
    assert refusal(area, stage_request(Path("checkpoints"))).kind is ErrorKind.BAD_REQUEST
    assert refusal(area, stage_request(checkpoint / "state.json", "state.json")).kind is ErrorKind.BAD_REQUEST


def test_save_ids_cannot_lead_out_of_the_staging_folder(area: LocalStagingArea, checkpoint: Path) -> None:
    assert refusal(area, stage_request(checkpoint, save="../escape")).kind is ErrorKind.BAD_NAME
    with pytest.raises(RequestError):
        area.release("..")


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as unix_socket:
        # sun_path is short: bind by a relative name.
        before = Path.cwd()
        os.chdir(path.parent)
        try:
            unix_socket.bind(path.name)
        finally:
            os.chdir(before)


@pytest.mark.parametrize(("make", "kind"), [(_fifo, "fifo"), (_socket, "socket")])
def test_special_files_are_refused(
    area: LocalStagingArea, checkpoint: Path, make: Callable[[Path], None], kind: str
) -> None:
    make(checkpoint / "special")
    error = refusal(area, stage_request(checkpoint))
    assert error.kind is ErrorKind.BAD_REQUEST
    assert kind in str(error)


@pytest.mark.parametrize("name", [b"not-utf8-\xff", b"new\nline", b"x" * 250 + b"/" + b"y" * 250 + b"/" + b"z" * 250])
def test_names_that_cannot_be_keys_are_refused(area: LocalStagingArea, checkpoint: Path, name: bytes) -> None:
    path = Path(os.fsdecode(os.fsencode(checkpoint) + b"/" + name))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"content")
    assert refusal(area, stage_request(checkpoint)).kind is ErrorKind.BAD_NAME
