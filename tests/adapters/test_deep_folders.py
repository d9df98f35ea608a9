"""Nothing that looks at the volume fails because folders lie deep, and what may be announced can be restored."""

from pathlib import Path

import pytest
from tests.harness.deep_folders import deep_folders

from keepstep_agent.adapters.output.output_directories import OutputDirectories
from keepstep_agent.adapters.volume.announced_files import resolve_files
from keepstep_agent.adapters.volume.content_check import content_signature
from keepstep_agent.adapters.volume.disk import VolumeMeter
from keepstep_agent.adapters.volume.shared_volume import open_volume
from keepstep_agent.core.errors import RequestError
from keepstep_agent.core.limits import PATH_LEVELS


def test_every_look_at_a_volume_ends_however_deep_its_folders_are(tmp_path: Path) -> None:
    with deep_folders(tmp_path / "checkpoints" / "checkpoint-1") as deep:
        assert VolumeMeter(tmp_path).measure().used_bytes > 0
        assert content_signature(tmp_path, str(deep)) == content_signature(tmp_path, str(deep))
        found = OutputDirectories(tmp_path, [str(deep.parent)]).scan((), {})
        assert not found.files
        assert len(found.problems) == 1
        with pytest.raises(RequestError, match="nested folders"):
            resolve_files(tmp_path, str(deep), ())


@pytest.mark.parametrize("named", [True, False])
def test_the_deepest_file_that_may_be_announced_is_one_that_restore_can_place(tmp_path: Path, named: bool) -> None:
    """Restore makes the folders durable by a walk, which must reach all of them."""
    for levels, is_taken in ((PATH_LEVELS, True), (PATH_LEVELS + 1, False)):
        source = tmp_path / f"checkpoint-{levels}"
        path = "/".join(["d"] * (levels - 1) + ["model.bin"])
        (source / path).parent.mkdir(parents=True)
        (source / path).touch()
        with open_volume(tmp_path) as root, root.folder(source.name) as folder:
            if is_taken:
                assert list(resolve_files(tmp_path, str(source), (path,) if named else ()).paths) == [path]
                assert len(list(folder.walk())) == levels
            else:
                with pytest.raises(RequestError, match="folders"):
                    resolve_files(tmp_path, str(source), (path,) if named else ())
