"""A checkpoint that is a file comes back as that file, whatever has its name."""

from pathlib import Path

import pytest
from tests.fakes.fake_store import FakeStore
from tests.restore.restored_volume import content, leftovers, record, run
from tests.restore.stored_checkpoints import rank_files, store_checkpoint

from keepstep.checkpoints.records import damage, read_records
from keepstep_agent.ports import ObjectStore

NAME = "epoch=1-step=7.ckpt"
BODY = rank_files(7)["model-0.safetensors"]


async def test_a_checkpoint_that_is_a_file_comes_back_as_that_file_and_is_known_there(
    real_store: ObjectStore, volume: Path
) -> None:
    info = await store_checkpoint(real_store, 7, name=NAME, ranks=[{NAME: BODY}], single_file=True)
    restored = await run(real_store, volume)
    assert restored is not None
    assert restored.path == volume / "checkpoints" / NAME
    assert restored.path.read_bytes() == BODY
    assert not leftovers(volume)
    # As the client's own records are: the file is the checkpoint.
    assert record(volume, NAME)["files"] == [{"path": "", "size": len(BODY)}]
    assert (one := read_records(volume / ".keepstep" / "records")[0]).save == info.save
    assert damage(one, restored.path) is None
    again = await run(real_store, volume)
    assert again is not None
    assert not again.downloaded

    with restored.path.open("r+b") as file:
        file.write(b"damaged")
    again = await run(real_store, volume)
    assert again is not None
    assert again.downloaded
    assert restored.path.read_bytes() == BODY
    assert not leftovers(volume)


@pytest.mark.parametrize("body", [BODY, b""])
@pytest.mark.parametrize("before", ["folder", "file"])
async def test_a_file_takes_the_place_of_whatever_has_its_name(
    before: str, body: bytes, store: FakeStore, volume: Path
) -> None:
    place = volume / "checkpoints" / NAME
    await store_checkpoint(store, 6, name=NAME, ranks=[{NAME: b"other"}], single_file=before == "file")
    await run(store, volume)
    assert place.is_dir() == (before == "folder")
    await store_checkpoint(store, 7, name=NAME, ranks=[{NAME: body}], single_file=True)
    await run(store, volume)
    assert place.read_bytes() == body
    assert not leftovers(volume)
    await store_checkpoint(store, 8, name=NAME, ranks=[{NAME: b"folder"}])
    await run(store, volume)
    assert content(place) == {NAME: b"folder"}
    assert not leftovers(volume)


@pytest.mark.parametrize("ranks", [[{NAME: BODY}, {}, {}], [{}, {NAME: BODY}], [{NAME: BODY}, {NAME: BODY}]])
async def test_ranks_that_brought_one_file_or_nothing_get_that_file(
    ranks: list[dict[str, bytes]], store: FakeStore, volume: Path
) -> None:
    await store_checkpoint(store, 7, name=NAME, ranks=ranks, single_file=True)
    restored = await run(store, volume)
    assert restored is not None
    assert restored.path.read_bytes() == BODY


async def test_ranks_that_brought_a_file_each_get_a_folder_of_them(store: FakeStore, volume: Path) -> None:
    ranks = [{"rank-0.pt": b"0"}, {"rank-1.pt": b"1"}]
    await store_checkpoint(store, 7, ranks=ranks, single_file=True)
    restored = await run(store, volume)
    assert restored is not None
    assert content(restored.path) == {"rank-0.pt": b"0", "rank-1.pt": b"1"}
