"""Decides what a snapshot consists of: which files are sent, which are kept from earlier snapshots, which are left out.

Invariants: a file that is left out keeps its last stored version, and the plan says so. As long as anything is left
out, nothing that the base holds is given up, because the program may have deleted it in favour of what is left out.
What has not changed since the base is never sent, even under a new name. Files of which only a copy can be pinned are
taken newest first, as far as the volume has room.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from heapq import merge
from operator import attrgetter
from typing import Final

from keepstep_agent.core.errors import RequestError, printable
from keepstep_agent.core.file_lists import FileEntries, SnapshotContent
from keepstep_agent.core.mirror.base import MirrorBase
from keepstep_agent.core.mirror.output_history import Decision, database_of
from keepstep_agent.core.mirror.output_scan import OutputScan, bad_name, folder_of, folders_above
from keepstep_agent.core.model import FileEntry, Fingerprint, PinMethod, SourceFile
from keepstep_agent.core.stored.object_layout import check_link

_MOST_LINES: Final = 20
_UNANNOUNCED: Final = "it looks like a checkpoint of those that are announced, and nobody has announced it"


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotPlan:
    """What the next snapshot consists of. `looks`: what each of its files looks like here.

    `not_stored` has a line for each file of which the snapshot does not hold the present version. `is_news`: it differs
    from the base.
    """

    content: SnapshotContent
    looks: Mapping[str, Fingerprint]
    not_stored: tuple[str, ...]
    is_news: bool


def plan_snapshot(
    scan: OutputScan,
    base: MirrorBase,
    decision: Decision,
    *,
    pinned_before: Mapping[str, Fingerprint],
    budget_bytes: int | None,
) -> SnapshotPlan:
    """Plan a snapshot of what a look has shown, and of which `decision` says what is fit for it.

    Args:
        pinned_before: What the files of the last snapshots looked like, even of those that failed. A file that has
            changed and is still the same inode is rewritten in place, so it must be copied.
        budget_bytes: Room for copies; None: not known.
    """
    stored = base.files.looks()
    # Of files that may have got another name.
    aliases = {seen: path for path, seen in stored.items()}
    # Paths whose stored version is kept; links, and what is stored under another path.
    kept: list[str] = []
    others: list[FileEntry] = []
    looks: dict[str, Fingerprint] = {}
    not_stored = dict(scan.problems) | dict.fromkeys(scan.unannounced, _UNANNOUNCED)
    wanted: list[SourceFile] = []
    for path, seen in scan.files.items():
        if base.others.get(path) == seen:
            continue
        held = stored.get(path)
        if held is None or held != seen:
            reason = decision.left_out.get(path, "")
            alias = aliases.get(seen)
            if alias is not None and not reason:
                others.append(replace(base.files[alias].entry, path=path, modified_ns=seen.mtime_ns))
                looks[path] = seen
                continue
            if reason:
                not_stored[path] = reason
            else:
                method = _method(path, seen, decision, pinned_before)
                group = decision.together.get(path)
                wanted.append(SourceFile(path=path, fingerprint=seen, method=method, group=group))
                continue
        if held is not None:
            kept.append(path)
            looks[path] = held
    sent, too_large = _within(wanted, budget_bytes)
    for file in too_large:
        not_stored[file.path] = f"a copy of its {file.fingerprint.size_bytes:,} bytes does not fit on the volume"
        if file.path in stored:
            kept.append(file.path)
            looks[file.path] = stored[file.path]
    looks.update((file.path, file.fingerprint) for file in sent)
    instead = [base.files[file.path].entry for file in sent if file.path in base.files]
    is_left_out = bool(not_stored.keys() - scan.problems.keys() - scan.unannounced)
    if gone := sorted(base.files.keys() - scan.files.keys()):
        taken = looks.keys() | scan.links.keys()
        folders = {folder for path in taken for folder in folders_above(path)}
        sent_paths = {file.path for file in sent}
        for path in gone:
            # Another file or a link has its name, has taken it for a folder, or lies above it.
            if path in taken or path in folders or not taken.isdisjoint(folders_above(path)):
                continue
            # The log or journal of another version would destroy a database.
            has_new_database = database_of(path) in sent_paths
            if (is_left_out or path in decision.deleted or scan.is_unknown(path)) and not has_new_database:
                kept.append(path)
                looks[path] = stored[path]
            else:
                instead.append(base.files[path].entry)
    links = dict(_links_to_keep(scan, base, looks, not_stored))
    others += (
        FileEntry(path=path, size_bytes=0, part_size_bytes=1, checksums=(), link=target)
        for path, target in links.items()
    )
    path_of = attrgetter("path")
    unchanged = (base.files[path].entry for path in sorted(kept))
    return SnapshotPlan(
        content=SnapshotContent(
            base=base.snapshot,
            kept=FileEntries(merge(unchanged, sorted(others, key=path_of), key=path_of)),
            files=sorted(sent, key=lambda file: (folder_of(file.path), file.path)),
            instead=instead,
        ),
        looks=looks,
        not_stored=tuple(_lines(not_stored)),
        is_news=bool(sent) or looks.keys() != base.files.keys() or links != base.links,
    )


def _lines(not_stored: Mapping[str, str]) -> Iterator[str]:
    for path, reason in sorted(not_stored.items())[:_MOST_LINES]:
        yield printable(f"{path}: {reason}")
    if len(not_stored) > _MOST_LINES:
        yield f"and {len(not_stored) - _MOST_LINES} other files"


def _links_to_keep(
    scan: OutputScan, base: MirrorBase, held: Collection[str], not_stored: dict[str, str]
) -> Iterator[tuple[str, str]]:
    """Yield the links of the snapshot. One that leads to what is left out keeps its last target, if it has one."""
    yield from ((path, target) for path, target in base.links.items() if scan.is_unknown(path))
    for path, target in scan.links.items():
        reason = _bad_link(path, target)
        if not reason and _leads_to(path, target, scan.files) and not _leads_to(path, target, held):
            reason = "what it leads to is not stored"
        if not reason:
            yield path, target
            continue
        not_stored[path] = reason
        if path in base.links and _leads_to(path, base.links[path], held):
            yield path, base.links[path]


def _leads_to(path: str, target: str, files: Collection[str]) -> bool:
    """Whether a link leads to one of the files, or to a folder above one."""
    names = folder_of(path).split("/")
    for name in target.split("/"):
        if name == "..":
            names.pop()
        elif name not in ("", "."):
            names.append(name)
    place = "/".join(names)
    return place in files or any(file.startswith(f"{place}/") for file in files)


def _bad_link(path: str, target: str) -> str:
    try:
        check_link(path, target)
    except RequestError as error:
        return str(error)
    return bad_name(path)


def _method(path: str, seen: Fingerprint, decision: Decision, pinned_before: Mapping[str, Fingerprint]) -> PinMethod:
    if path in decision.growing:
        return PinMethod.COPY_AS_IS
    before = pinned_before.get(path)
    is_rewritten = path in decision.copied or (before is not None and before.inode == seen.inode)
    return PinMethod.COPY if is_rewritten else PinMethod.LINK


def _within(wanted: list[SourceFile], budget_bytes: int | None) -> tuple[list[SourceFile], list[SourceFile]]:
    """Return the files to send, and those whose copies do not fit, with their groups. The newest files go first."""
    sent: list[SourceFile] = []
    too_large: list[SourceFile] = []
    for file in sorted(wanted, key=lambda file: file.fingerprint.mtime_ns, reverse=True):
        needed_bytes = 0 if file.method is PinMethod.LINK else file.fingerprint.size_bytes
        if budget_bytes is not None and needed_bytes > budget_bytes:
            too_large.append(file)
            continue
        budget_bytes = None if budget_bytes is None else budget_bytes - needed_bytes
        sent.append(file)
    too_large_groups = {file.group for file in too_large} - {None}
    too_large += [file for file in sent if file.group in too_large_groups]
    return [file for file in sent if file.group not in too_large_groups], too_large
