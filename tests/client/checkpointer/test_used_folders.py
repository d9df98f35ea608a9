"""A Checkpointer removes nothing that it did not write, in saves and in the rotation."""

from pathlib import Path

from tests.client.checkpointer.saved_steps import Make, save, visible


def test_a_folder_that_has_the_name_already_keeps_its_files(make: Make, directory: Path) -> None:
    (directory / "checkpoint-3").mkdir(parents=True)
    (directory / "checkpoint-3" / "note").write_text("the program's")
    save(make(), 3)
    assert sorted(path.name for path in (directory / "checkpoint-3").iterdir()) == ["note", "state"]
    assert make().resume() == directory / "checkpoint-3"


def test_the_rotation_leaves_what_the_program_put_into_a_checkpoint(make: Make, directory: Path) -> None:
    checkpointer = make(keep_local=1)
    save(checkpointer, 1)
    (directory / "checkpoint-1" / "metrics.json").write_text("{}")
    for step in (2, 3, 4):
        save(checkpointer, step)
    assert visible(directory) == ["checkpoint-1", "checkpoint-3", "checkpoint-4"]
    assert [path.name for path in (directory / "checkpoint-1").iterdir()] == ["metrics.json"]
    assert make().resume() == directory / "checkpoint-4"
