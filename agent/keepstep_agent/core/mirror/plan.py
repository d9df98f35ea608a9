"""Decides what a snapshot consists of: which files are sent, which are kept from earlier snapshots, which are left out.

Invariants: a file that is not whole, or lies in a folder that is held back, keeps its last stored version, and the plan
says so. As long as anything is left out, nothing that the base holds is given up, because the program may have deleted
it in favour of what is left out. What has not changed since the base is never sent, even under a new name. Files of
which only a copy can be pinned are taken newest first, as far as the volume has room.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from keepstep_agent.core.errors import RequestError, printable
from keepstep_agent.core.mirror.base import HeldFile, MirrorBase
from keepstep_agent.core.mirror.output_scan import OutputScan, folder_of, is_log, pattern_of
from keepstep_agent.core.model import FileEntry, Fingerprint, PinMethod, SnapshotContent, SourceFile
from keepstep_agent.core.stored.object_layout import check_file_path, check_link

_MOST_LINES: Final = 20


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


def changed_files(scan: OutputScan, base: MirrorBase) -> list[str]:
    """Return the paths of the files whose bytes the base does not hold."""
    held = {one.fingerprint for one in base.files.values()}
    return [path for path, seen in scan.files.items() if seen not in held and base.others.get(path) != seen]


def plan_snapshot(
    scan: OutputScan,
    base: MirrorBase,
    *,
    held_back: Collection[str] = (),
    growing: Collection[str] = (),
    broken: Mapping[str, str],
    pinned_before: Mapping[str, Fingerprint],
    budget_bytes: int | None,
) -> SnapshotPlan:
    """Plan a snapshot of what a look has shown.

    Args:
        held_back: Folders to leave as they are in the base.
        growing: Files that may be written to while they are copied, besides logs.
        broken: Why a changed file is not whole, by path.
        pinned_before: What the files of the last snapshots looked like, even of those that failed. A file that has
            changed and is still the same inode is rewritten in place, so it must be copied.
        budget_bytes: Room for copies; None: not known.
    """
    aliases = {held.fingerprint: held for held in base.files.values()}
    kept: list[FileEntry] = []
    looks: dict[str, Fingerprint] = {}
    not_stored = dict(scan.problems)
    wanted: list[SourceFile] = []
    for path, seen in scan.files.items():
        if base.others.get(path) == seen:
            continue
        held = base.files.get(path)
        if held is None or held.fingerprint != seen:
            reason = _why_not(path, held_back, broken)
            alias = aliases.get(seen)
            if alias is not None and not reason:
                held = HeldFile(fingerprint=seen, entry=replace(alias.entry, path=path, modified_ns=seen.mtime_ns))
            elif reason:
                not_stored[path] = reason
            else:
                method = _method(path, seen, growing, pinned_before)
                wanted.append(SourceFile(path=path, fingerprint=seen, method=method))
                continue
        if held is not None:
            kept.append(held.entry)
            looks[path] = held.fingerprint
    sent, too_large = _within(wanted, budget_bytes)
    for file in too_large:
        not_stored[file.path] = f"a copy of its {file.fingerprint.size_bytes:,} bytes does not fit on the volume"
        if file.path in base.files:
            kept.append(base.files[file.path].entry)
            looks[file.path] = base.files[file.path].fingerprint
    looks.update((file.path, file.fingerprint) for file in sent)
    if not_stored.keys() - scan.problems.keys():
        for path in sorted(base.files.keys() - scan.files.keys()):
            if not _is_in_the_way(path, looks):
                kept.append(base.files[path].entry)
                looks[path] = base.files[path].fingerprint
    for path, target in _links_to_keep(scan, base, looks, not_stored):
        kept.append(FileEntry(path=path, size_bytes=0, part_size_bytes=1, checksums=(), link=target))
    files = tuple(sorted(sent, key=lambda file: (folder_of(file.path), file.path)))
    names = {entry.path for entry in kept if not entry.link} | {file.path for file in files}
    renamed = any(entry.path not in base.files for entry in kept if not entry.link)
    return SnapshotPlan(
        content=SnapshotContent(
            base=base.snapshot, kept=tuple(sorted(kept, key=lambda entry: entry.path)), files=files
        ),
        looks=looks,
        not_stored=tuple(_lines(not_stored)),
        is_news=bool(files) or renamed or names != base.files.keys() or _links(kept) != base.links,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderKinds:
    """What a snapshot sent from one folder: how many files of each pattern, and the pattern of the one written last."""

    counts: Mapping[str, int]
    last: str


Together = Mapping[str, FolderKinds]
"""What the last snapshot sent from one folder, by the folder's pattern."""


def sent_together(files: Mapping[str, Fingerprint]) -> dict[str, FolderKinds]:
    """Return what was sent from one folder, by the folder's pattern; of several folders, what the newest had."""
    together: dict[str, FolderKinds] = {}
    for folder, paths in sorted(_by_folder(files).items(), key=lambda item: files[item[1][-1]].mtime_ns):
        kinds = [pattern_of(path) for path in paths]
        together[pattern_of(folder)] = FolderKinds(counts=Counter(kinds), last=kinds[-1])
    return together


def stored_together(base: MirrorBase) -> dict[str, FolderKinds]:
    """Return `sent_together` of the snapshots that the base's files were sent with, the latest of each folder."""
    sent: dict[tuple[str, str], dict[str, Fingerprint]] = {}
    for path, held in base.files.items():
        owner = held.entry.owner
        looks = sent.setdefault((pattern_of(folder_of(path)), owner.save if owner else ""), {})
        looks[path] = replace(held.fingerprint, mtime_ns=held.entry.modified_ns or held.fingerprint.mtime_ns)
    together: dict[str, FolderKinds] = {}
    for looks in sorted(sent.values(), key=lambda looks: max(seen.mtime_ns for seen in looks.values())):
        together |= sent_together(looks)
    return together


def unfinished_folders(
    changed: Mapping[str, Fingerprint], *, recent: Collection[str], whole: Collection[str], together: Together
) -> frozenset[str]:
    """Return the folders in which a program that was killed may have been writing a checkpoint.

    Args:
        changed: The files that no snapshot holds yet.
        recent: Those of them that were written just before the program's end.
        whole: Those of the recent ones whose format shows that they are complete.
        together: What was sent from such a folder before. While that is not known, no folder counts as finished.
    """
    found = incomplete_folders(changed, together) & {folder_of(path) for path in recent}
    found |= {folder_of(path) for path in recent if path not in whole}
    for folder, paths in _by_folder({path: changed[path] for path in recent}).items():
        before = together.get(pattern_of(folder))
        # A file of another kind than the last may be the first of another save, which rewrites the files of this one.
        if before is None or pattern_of(paths[-1]) != before.last:
            found |= {folder}
    return found


def incomplete_folders(changed: Mapping[str, Fingerprint], together: Together) -> frozenset[str]:
    """Return the folders with changed files that have fewer of a kind than were sent from such a folder before."""
    return frozenset(
        folder
        for folder, paths in _by_folder(changed).items()
        if (before := together.get(pattern_of(folder))) is not None and not _has_all(paths, before)
    )


def _has_all(paths: Sequence[str], before: FolderKinds) -> bool:
    found = Counter(map(pattern_of, paths))
    return all(found[kind] >= count for kind, count in before.counts.items())


def _by_folder(files: Mapping[str, Fingerprint]) -> dict[str, list[str]]:
    """Return the paths in each folder, the newest last."""
    folders: dict[str, list[str]] = {}
    for path in sorted(files, key=lambda path: files[path].mtime_ns):
        folders.setdefault(folder_of(path), []).append(path)
    return folders


def _lines(not_stored: Mapping[str, str]) -> Iterator[str]:
    for path, reason in sorted(not_stored.items())[:_MOST_LINES]:
        yield printable(f"{path}: {reason}")
    if len(not_stored) > _MOST_LINES:
        yield f"and {len(not_stored) - _MOST_LINES} other files"


def _why_not(path: str, held_back: Collection[str], broken: Mapping[str, str]) -> str:
    if not is_log(path) and folder_of(path) in held_back:
        return "its folder is being written to"
    try:
        check_file_path(path)
    except RequestError as error:
        return str(error)
    return broken.get(path, "")


def _is_in_the_way(path: str, others: Collection[str]) -> bool:
    """Whether a file cannot lie at `path`, because another one has taken it for a folder, or lies above it."""
    return any(other.startswith(f"{path}/") or path.startswith(f"{other}/") for other in others)


def _links_to_keep(
    scan: OutputScan, base: MirrorBase, held: Collection[str], not_stored: dict[str, str]
) -> Iterator[tuple[str, str]]:
    """Yield the links of the snapshot. One that leads to what is left out keeps its last target, if it has one."""
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
        check_file_path(path)
        check_link(path, target)
    except RequestError as error:
        return str(error)
    return ""


def _method(
    path: str, seen: Fingerprint, growing: Collection[str], pinned_before: Mapping[str, Fingerprint]
) -> PinMethod:
    if is_log(path) or path in growing:
        return PinMethod.COPY_AS_IS
    before = pinned_before.get(path)
    return PinMethod.COPY if before is not None and before.inode == seen.inode else PinMethod.LINK


def _within(wanted: list[SourceFile], budget_bytes: int | None) -> tuple[list[SourceFile], list[SourceFile]]:
    """Return the files to send, and those whose copies do not fit. The newest files go first."""
    sent: list[SourceFile] = []
    too_large: list[SourceFile] = []
    for file in sorted(wanted, key=lambda file: file.fingerprint.mtime_ns, reverse=True):
        needed_bytes = 0 if file.method is PinMethod.LINK else file.fingerprint.size_bytes
        if budget_bytes is not None and needed_bytes > budget_bytes:
            too_large.append(file)
            continue
        budget_bytes = None if budget_bytes is None else budget_bytes - needed_bytes
        sent.append(file)
    return sent, too_large


def _links(entries: Collection[FileEntry]) -> Mapping[str, str]:
    return {entry.path: entry.link for entry in entries if entry.link}
