"""What a snapshot of the output directories consists of."""

from dataclasses import replace

import pytest

from keepstep_agent.core.mirror.base import HeldFile, HeldFiles, MirrorBase, decode_base, encode_base
from keepstep_agent.core.mirror.output_history import Decision
from keepstep_agent.core.mirror.output_scan import OutputScan
from keepstep_agent.core.mirror.plan import SnapshotPlan, plan_snapshot
from keepstep_agent.core.model import FileEntry, Fingerprint, Owner, PinMethod, SnapshotId


def seen(size_bytes: int, *, inode: int = 1, mtime_ns: int = 0) -> Fingerprint:
    return Fingerprint(size_bytes=size_bytes, mtime_ns=mtime_ns, inode=inode)


def held(path: str, fingerprint: Fingerprint, *, save: str = "s-1") -> HeldFile:
    owner = Owner(name="node-0", save=save, rank=0, path=path)
    entry = FileEntry(
        path=path,
        size_bytes=fingerprint.size_bytes,
        part_size_bytes=8,
        checksums=[1] * -(-fingerprint.size_bytes // 8),
        owner=owner,
        modified_ns=fingerprint.mtime_ns,
    )
    return HeldFile(fingerprint=fingerprint, entry=entry)


def base_of(*files: HeldFile, others: dict[str, Fingerprint] | None = None) -> MirrorBase:
    snapshot = SnapshotId(series="node-0", number=7, save="s-1")
    return MirrorBase(snapshot=snapshot, files=HeldFiles(files), others=others or {})


def plan(
    files: dict[str, Fingerprint],
    base: MirrorBase,
    *,
    links: dict[str, str] | None = None,
    problems: dict[str, str] | None = None,
    decision: Decision | None = None,
    pinned_before: dict[str, Fingerprint] | None = None,
    budget_bytes: int | None = None,
) -> SnapshotPlan:
    scan = OutputScan(files=files, links=links or {}, problems=problems or {})
    known = base.files.looks()
    return plan_snapshot(
        scan,
        base,
        decision or Decision(),
        pinned_before=known if pinned_before is None else pinned_before,
        budget_bytes=budget_bytes,
    )


def sent(planned: SnapshotPlan) -> dict[str, PinMethod]:
    return {file.path: file.method for file in planned.content.files}


def kept(planned: SnapshotPlan) -> dict[str, str]:
    return {entry.path: entry.owner.path if entry.owner else entry.link for entry in planned.content.kept}


def test_only_what_has_changed_is_sent_and_the_rest_names_its_owner() -> None:
    base = base_of(held("out/a", seen(5)), held("out/b", seen(5, inode=2)))
    found = plan({"out/a": seen(5), "out/b": seen(6, inode=3), "out/c": seen(1, inode=4)}, base)
    assert sent(found) == {"out/b": PinMethod.LINK, "out/c": PinMethod.LINK}
    assert kept(found) == {"out/a": "out/a"}
    assert found.content.base == base.snapshot
    assert found.is_news


def test_nothing_new_is_no_news_and_a_deletion_alone_is() -> None:
    base = base_of(held("out/a", seen(5)), held("out/b", seen(5, inode=2)))
    assert not plan({"out/a": seen(5), "out/b": seen(5, inode=2)}, base).is_news
    without = plan({"out/a": seen(5)}, base)
    assert without.is_news
    assert not without.content.files


def test_a_renamed_file_is_not_sent_again() -> None:
    found = plan({"out/previous.pt": seen(5)}, base_of(held("out/ckpt.pt", seen(5))))
    assert not found.content.files
    assert kept(found) == {"out/previous.pt": "out/ckpt.pt"}
    assert found.is_news


def test_a_file_that_is_rewritten_in_place_is_copied_and_a_log_as_it_is() -> None:
    base = base_of(held("out/ckpt.pt", seen(5)), held("out/a.log", seen(5, inode=2)))
    files = {"out/ckpt.pt": seen(5, mtime_ns=9), "out/a.log": seen(9, inode=2)}
    found = plan(files, base, decision=Decision(growing=frozenset({"out/a.log"})))
    assert sent(found) == {"out/ckpt.pt": PinMethod.COPY, "out/a.log": PinMethod.COPY_AS_IS}


def test_a_file_that_an_earlier_snapshot_failed_with_is_copied_too() -> None:
    found = plan({"out/ckpt.pt": seen(5, mtime_ns=9)}, MirrorBase(), pinned_before={"out/ckpt.pt": seen(5)})
    assert sent(found) == {"out/ckpt.pt": PinMethod.COPY}


def test_a_broken_file_keeps_its_last_version_and_a_new_one_is_left_out_and_both_are_told() -> None:
    base = base_of(held("out/a.pt", seen(5)))
    broken = {"out/a.pt": "cut short", "out/b.pt": "cut short"}
    found = plan({"out/a.pt": seen(3), "out/b.pt": seen(3, inode=2)}, base, decision=Decision(left_out=broken))
    assert not found.content.files
    assert kept(found) == {"out/a.pt": "out/a.pt"}
    assert found.looks == {"out/a.pt": seen(5)}
    assert found.not_stored == ("out/a.pt: cut short", "out/b.pt: cut short")
    assert not found.is_news


def test_copies_that_do_not_fit_are_left_out_the_oldest_first() -> None:
    files = {f"out/{name}": seen(10, inode=number, mtime_ns=number) for number, name in enumerate("abc")}
    before = {path: seen(1, inode=one.inode) for path, one in files.items()}
    found = plan(files, MirrorBase(), pinned_before=before, budget_bytes=25)
    assert set(sent(found)) == {"out/b", "out/c"}
    assert found.not_stored == ("out/a: a copy of its 10 bytes does not fit on the volume",)


def test_links_stay_links_unless_they_lead_elsewhere() -> None:
    links = {"out/latest": "step-9", "out/x/up": "../step-9", "out/away": "../../etc", "out/root": "/etc/passwd"}
    found = plan({}, MirrorBase(), links=links)
    assert kept(found) == {"out/latest": "step-9", "out/x/up": "../step-9"}
    assert len(found.not_stored) == 2


def test_files_of_other_nodes_are_no_part_of_this_nodes_snapshots_until_they_change() -> None:
    base = base_of(held("out/a", seen(5)), others={"out/b": seen(5, inode=2)})
    assert not plan({"out/a": seen(5), "out/b": seen(5, inode=2)}, base).is_news
    assert set(sent(plan({"out/a": seen(5), "out/b": seen(6, inode=2)}, base))) == {"out/b"}


def test_while_a_new_file_is_left_out_none_that_it_replaces_is_given_up() -> None:
    base = base_of(held("out/step-10/model", seen(5)))
    new = {"out/step-20/model": seen(5, inode=2)}
    left_out = Decision(left_out={"out/step-20/model": "cut short"})
    found = plan(new, base, decision=left_out)
    assert kept(found) == {"out/step-10/model": "out/step-10/model"}
    assert not found.is_news
    assert not kept(plan(new, base))


def test_what_was_deleted_a_moment_ago_is_kept_until_its_successor_may_be_there() -> None:
    base = base_of(held("out/ckpt-10", seen(5)))
    found = plan({}, base, decision=Decision(deleted=frozenset({"out/ckpt-10"})))
    assert not found.is_news
    assert plan({}, base).is_news


def test_what_may_be_kept_instead_is_the_last_version_of_what_is_sent_and_of_what_was_deleted() -> None:
    base = base_of(held("out/a", seen(5)), held("out/gone", seen(5, inode=2)), held("out/same", seen(5, inode=3)))
    found = plan({"out/a": seen(6, inode=4), "out/same": seen(5, inode=3)}, base)
    assert [entry.path for entry in found.content.instead] == ["out/a", "out/gone"]


@pytest.mark.parametrize("suffix", ["-journal", "-wal"])
def test_the_journal_of_an_older_version_of_a_database_is_never_kept_beside_a_newer_one(suffix: str) -> None:
    """SQLite would roll the newer one back with it."""
    journal = f"out/study.db{suffix}"
    base = base_of(held("out/study.db", seen(1)), held(journal, seen(2)), held("out/model", seen(3)))
    files = {"out/study.db": seen(4), "out/other": seen(5)}
    left_out = Decision(left_out={"out/other": "it was being written to"}, deleted=frozenset({journal, "out/model"}))
    planned = plan(files, base, decision=left_out)
    assert sorted(sent(planned)) == ["out/study.db"]
    assert sorted(kept(planned)) == ["out/model"]
    # With the version that it belongs to, it is.
    planned = plan({"out/study.db": seen(1), "out/other": seen(5)}, base, decision=left_out)
    assert sorted(kept(planned)) == ["out/model", "out/study.db", journal]


def test_a_group_is_sent_as_a_whole_or_not_at_all() -> None:
    files = {f"out/{name}": seen(10, inode=number, mtime_ns=number) for number, name in enumerate("abc")}
    decision = Decision(together={"out/a": 1, "out/c": 1}, copied=frozenset(files))
    found = plan(files, MirrorBase(), decision=decision, budget_bytes=25)
    assert set(sent(found)) == {"out/b"}
    assert len(found.not_stored) == 2


def test_a_link_to_what_is_left_out_keeps_its_last_target() -> None:
    base = replace(base_of(held("out/step-10/model", seen(5))), links={"out/latest": "step-10"})
    files = {"out/step-10/model": seen(5), "out/step-20/model": seen(5, inode=2)}
    half = {"out/step-20/model": "it was being written to"}
    left_out = plan(files, base, links={"out/latest": "step-20"}, decision=Decision(left_out=half))
    assert kept(left_out)["out/latest"] == "step-10"
    assert "out/latest: what it leads to is not stored" in left_out.not_stored
    assert kept(plan(files, base, links={"out/latest": "step-20"}))["out/latest"] == "step-20"


def test_the_base_is_read_as_it_was_written() -> None:
    base = base_of(held("out/a", seen(50)), others={"out/b": seen(5, inode=2)})
    assert decode_base(b"".join(encode_base(base))) == base


def test_a_link_in_the_place_of_a_stored_file_or_folder_leaves_room_for_nothing_else() -> None:
    base = base_of(held("out/best.pt", seen(5)), held("out/last/x", seen(5, inode=2)), held("out/z", seen(5, inode=3)))
    links = {"out/best.pt": "z", "out/last": "z"}
    decision = Decision(left_out={"out/new": "half"}, deleted=frozenset({"out/best.pt", "out/last/x"}))
    found = plan({"out/z": seen(5, inode=3), "out/new": seen(1, inode=4)}, base, links=links, decision=decision)
    assert sorted(entry.path for entry in found.content.kept) == ["out/best.pt", "out/last", "out/z"]
    assert not found.content.instead
