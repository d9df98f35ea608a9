"""When a snapshot of the output directories is due."""

from keepstep_agent.core.mirror.output_scan import OutputScan
from keepstep_agent.core.mirror.quiet_moments import Look, QuietMoments
from keepstep_agent.core.model import Fingerprint

MIB = 1024**2


def seen(size_bytes: int, *, mtime_ns: int = 0, inode: int = 1) -> Fingerprint:
    return Fingerprint(size_bytes=size_bytes, mtime_ns=mtime_ns, inode=inode)


def scan(links: dict[str, str] | None = None, **files: Fingerprint) -> OutputScan:
    return OutputScan(files={f"out/{name.replace('__', '/')}": one for name, one in files.items()}, links=links or {})


def looks(moments: QuietMoments, *scans: OutputScan, every_seconds: float = 1.0, start: float = 0.0) -> list[Look]:
    return [moments.look(one, start + every_seconds * number) for number, one in enumerate(scans)]


def test_a_snapshot_is_due_once_a_new_file_has_been_quiet() -> None:
    found = looks(QuietMoments({}), *[scan(ckpt=seen(5))] * 4)
    assert [look.due for look in found] == [False, False, False, True]
    assert [look.restless for look in found] == [True, True, True, False]


def test_nothing_is_due_while_all_is_as_in_the_newest_snapshot() -> None:
    moments = QuietMoments({"out/ckpt": seen(5)})
    assert not any(look.due or look.restless for look in looks(moments, *[scan(ckpt=seen(5))] * 9))


def test_what_was_taken_is_not_due_again() -> None:
    moments = QuietMoments({})
    looks(moments, *[scan(ckpt=seen(5))] * 4)
    moments.taken()
    assert not any(look.due for look in looks(moments, *[scan(ckpt=seen(5))] * 9, start=4.0))
    moments.missed(20.0)
    assert moments.look(scan(ckpt=seen(5)), 20.0).due


def test_each_change_begins_the_quiet_time_anew() -> None:
    growing = [scan(ckpt=seen(size)) for size in (1, 2, 2, 3, 3, 3, 3)]
    assert [look.due for look in looks(QuietMoments({}), *growing)] == [False] * 6 + [True]


def test_a_deletion_and_another_link_are_changes_too() -> None:
    before = {"out/a": seen(5), "out/b": seen(5, inode=2)}
    moments = QuietMoments(before)
    both, one = scan(a=seen(5), b=seen(5, inode=2)), scan(a=seen(5))
    assert [look.due for look in looks(moments, both, one, one, one, one)] == [False] * 4 + [True]
    moments.taken()
    linked = scan(a=seen(5), links={"out/latest": "a"})
    assert [look.due for look in looks(moments, linked, linked, linked, linked, start=9.0)] == [False] * 3 + [True]


def test_logs_neither_make_a_snapshot_due_nor_delay_it() -> None:
    logs = ["train.log", "metrics.jsonl", "events.out.tfevents.1.host.2.0"]
    moments = QuietMoments({})
    for at in range(20):
        files = {f"out/{name}": seen(at, mtime_ns=at) for name in logs}
        look = moments.look(OutputScan(files=files), float(at))
        assert not look.due
        assert not look.restless
    with_checkpoint = [
        OutputScan(files={"out/train.log": seen(at, mtime_ns=at), "out/ckpt": seen(5)}) for at in range(20, 24)
    ]
    assert [look.due for look in looks(moments, *with_checkpoint, start=20.0)] == [False, False, False, True]


def test_a_program_that_is_never_quiet_gets_a_snapshot_without_the_folder_that_it_writes_to() -> None:
    moments = QuietMoments({})
    found = [
        moments.look(scan(step1__model=seen(5), step2__model=seen(at * 100 * MIB, inode=2)), float(at))
        for at in range(130)
    ]
    due = [at for at, look in enumerate(found) if look.due]
    assert due[0] == 120
    assert found[120].held_back == {"out/step2"}


def test_a_small_file_that_changes_all_the_time_does_not_hold_up_its_folder_for_ever() -> None:
    moments = QuietMoments({})
    for at in range(125):
        look = moments.look(scan(status=seen(100, mtime_ns=at)), float(at))
    assert look.growing == {"out/status"}
    moments.taken()
    found = [
        moments.look(scan(status=seen(100, mtime_ns=at), ckpt=seen(10 * MIB, inode=2)), float(at))
        for at in range(125, 129)
    ]
    assert [look.due for look in found] == [False, False, False, True]
    assert not found[-1].held_back


def test_a_large_file_that_grows_fast_is_no_log() -> None:
    moments = QuietMoments({})
    for at in range(200):
        look = moments.look(scan(model=seen(at * 50 * MIB, mtime_ns=at)), float(at))
    assert look.held_back == {"out"}
    assert not look.growing
