"""Follows the output directories from look to look, and decides when a snapshot is due and which files are fit for it.

Completeness belongs to each file (`file_states`), and files that were written together go together or keep their last
stored version (`write_groups`). What stands alone neither delays a group nor is part of one. Times are seconds of a
monotonic clock, and a look is one scan. See docs/design/0027.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from keepstep_agent.core.mirror.file_states import QUIET_SECONDS, Evidence, FileState, Proof, TrackedFile, is_proven
from keepstep_agent.core.mirror.output_scan import DATABASE_SUFFIXES, OutputScan, bad_name, is_log
from keepstep_agent.core.mirror.write_groups import (
    LATE_SECONDS,
    Kinds,
    Write,
    WriteGroup,
    groups,
    is_complete,
    related_kinds,
)
from keepstep_agent.core.model import Fingerprint

DUE_SECONDS: Final = 5.0
"""A snapshot is due so long after the first change, even if changes go on."""
_SETTLED_SECONDS: Final = QUIET_SECONDS + LATE_SECONDS
_PASSING_SECONDS: Final = 0.5
"""A file that was deleted so shortly after it was written was a lock or a temporary one, and no part of a save."""
_REMEMBERED_SECONDS: Final = 60.0
_STATUS_BYTES: Final = 64 * 1024
_STATUS_SECONDS: Final = 10.0
"""A file that is no longer than this and was written to for so long without a rest shows how its program fares, if no
other file is written like it."""
_MOST_WRITES: Final = 20_000
_MOST_GROUPS: Final = 64

_WRITTEN: Final = "it was being written to"
_TOGETHER: Final = "{} was written together with it, and is not complete"
_INCOMPLETE: Final = "files that belong to it may be missing"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramEnd:
    """The program has ended. `failed_at`: when a signal or an error ended it; None if it ended well.

    `until`: what was written after that moment is complete, because processes that outlived it ended well.
    """

    failed_at: float | None = None
    until: float = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What a look means.

    Attributes:
        due: A snapshot is due: something that no snapshot holds is fit for one.
        restless: Something has changed that no snapshot holds, and time alone may make it fit: look again soon.
        fit: Changed files that are fit for a snapshot, besides logs.
        left_out: Why a changed file is not fit for a snapshot, by path.
        together: The number of its group, by path: of one group all files are pinned or none.
        growing: Files that may be written to while they are copied.
        copied: Files whose program writes into the same inode again.
        deleted: Paths that were deleted so shortly before that what replaces them may be still to come.
        waiting_since: When the first change since the last snapshot was made that none holds; None if there is none.
    """

    due: bool = False
    restless: bool = False
    fit: frozenset[str] = frozenset()
    left_out: Mapping[str, str] = field(default_factory=dict)
    together: Mapping[str, int] = field(default_factory=dict)
    growing: frozenset[str] = frozenset()
    copied: frozenset[str] = frozenset()
    deleted: frozenset[str] = frozenset()
    waiting_since: float | None = None


class OutputHistory:
    """The history of the output directories of one volume since this agent began.

    For each look, examine the files of `to_examine`, then call `note`; then `decide` as often as you like. Call
    `taken` for each snapshot.
    """

    def __init__(
        self,
        known: Mapping[str, Fingerprint],
        earlier: Iterable[Kinds] = (),
        *,
        log_inodes: frozenset[int] = frozenset(),
    ) -> None:
        """`known`: what the directories looked like in the newest snapshot. `earlier`: the groups that it was of.

        `log_inodes`: files that are logs whatever they are called.
        """
        self._log_inodes = log_inodes
        self._scan = OutputScan(files=known)
        self._looked_at = float("-inf")
        self._files: dict[str, TrackedFile] = {}
        # The last write of each file, and those before.
        self._last_writes: dict[str, Write] = {}
        self._past_writes: deque[Write] = deque(maxlen=_MOST_WRITES)
        self._earlier: deque[Kinds] = deque(earlier, maxlen=_MOST_GROUPS)
        # When each file that no snapshot holds was changed first, and when the first was since the last snapshot.
        self._waiting: dict[str, float] = {}
        self._waiting_since: float | None = None
        self._links_changed_at = float("-inf")
        # The file that shows how the program fares, if there is one.
        self._status = ""
        # What was found unstored of which look: most looks show what the one before did, of thousands of files.
        self._compared: tuple[Mapping[str, Fingerprint], Mapping[str, Fingerprint]] = ({}, {})
        self._unstored: Sequence[str] = ()

    def to_examine(self, scan: OutputScan, stored: Mapping[str, Fingerprint]) -> dict[str, bool]:
        """Return the files to examine after a look, and whether each has become longer.

        `stored`: what the files look like that a snapshot holds, or is being sent with. It is replaced, never changed.
        """
        found: dict[str, bool] = {}
        for path in self._not_in(stored, scan.files):
            seen = scan.files[path]
            if self._is_log(path, seen):
                continue
            file, before = self._files.get(path), self._scan.files.get(path)
            if file is not None and file.seen == seen and file.is_settled:
                continue
            grew = before is not None and before.inode == seen.inode and before.size_bytes < seen.size_bytes
            found[path] = grew or (file is not None and file.change is FileState.GROWING)
        return found

    def note(
        self,
        scan: OutputScan,
        evidence: Mapping[str, Evidence],
        *,
        at: float,
        unix_at: float,
        lives: bool,
        all_live_since: float = math.inf,
    ) -> None:
        """Take note of a look and of what the examination has shown. `lives`: the program was alive after it.

        `all_live_since`: no process that was one of the program's then, or since, had ended after it.
        """
        before = self._scan.files
        changed = self._differing(before, scan.files)
        gone = before.keys() - scan.files.keys()
        names_before = {before[path].inode: path for path in gone} if changed else {}
        # By all of their looks: filesystems give the inode of a deleted file to the next one.
        moved = {
            path: was
            for path in changed
            if (was := names_before.get(scan.files[path].inode)) is not None and before[was] == scan.files[path]
        }
        moved_folders = {_moved_folder(path, was) for path, was in moved.items()} - {""}
        for path in changed:
            seen = scan.files[path]
            # By the file's mtime, which its program may set: not before the last look, which did not show the change.
            written_at = min(max(self._looked_at, seen.mtime_ns / 1e9 - unix_at + at), at)
            # Of a folder that was renamed no look may have shown all files before.
            is_new = path not in before
            renamed = path in scan.settled or (is_new and any(path.startswith(folder) for folder in moved_folders))
            renamed = renamed or path in moved
            self._note_change(path, seen, written_at, renamed=renamed, was=moved.get(path, ""))
        sources = frozenset(moved.values())
        for path in gone:
            file = self._files.pop(path, None)
            is_passing = file is not None and path in self._waiting and at - file.written_at < _PASSING_SECONDS
            if path in sources or is_passing or (file is not None and self._stands_alone(path, file, at)):
                self._last_writes.pop(path, None)
        if self._looked_at > float("-inf") and self._scan.links != scan.links:
            self._links_changed_at = at
        for path, shown in evidence.items():
            if (file := self._files.get(path)) is not None and file.seen == scan.files.get(path):
                file.examined(shown, at=at, lives=lives, all_live_since=all_live_since)
        self._scan, self._looked_at = scan, at
        # One that is restless for half as long may be a part of the same saves.
        restless = [path for path, file in self._files.items() if file.restless_seconds >= _STATUS_SECONDS / 2]
        is_status = len(restless) == 1 and (
            self._files[restless[0]].restless_seconds >= _STATUS_SECONDS
            and self._files[restless[0]].seen.size_bytes <= _STATUS_BYTES
        )
        self._status = restless[0] if is_status else ""

    def decide(
        self, stored: Mapping[str, Fingerprint], links: Mapping[str, str], end: ProgramEnd | None = None
    ) -> Decision:
        """Say what the last look means.

        `stored`: as for `to_examine`. `links`: those of the look that the newest snapshot was planned from.
        """
        at, files = self._looked_at, self._scan.files
        unstored = self._not_in(stored, files)
        # Whoever deletes a directory as a whole has done with it, or wipes the disk. What cannot be read may be there.
        deleted = {path for path in stored.keys() - files.keys() if not self._scan.is_unknown(path)}
        for path in unstored:
            if path not in self._files:
                # It was stored, or being sent, and is no more.
                self._files[path] = TrackedFile(
                    seen=files[path],
                    written_at=at - QUIET_SECONDS,
                    change=FileState.NEW,
                    is_log=self._is_log(path, files[path]),
                )
        self._forget(frozenset(unstored), at)
        self._waiting = {
            path: self._waiting.get(path, self._files[path].written_at if path in files else at)
            for path in (*unstored, *deleted)
        }
        left_out, together = self._judge(unstored, at, end)
        for path in unstored:
            if path not in left_out and (reason := bad_name(path)):
                left_out[path] = reason
        growing = frozenset(path for path in unstored if self._files[path].is_log)
        counted = unstored if growing.issuperset(files) else [path for path in unstored if path not in growing]
        have_links_changed = {
            path: to for path, to in links.items() if not self._scan.is_unknown(path)
        } != self._scan.links
        # When what no snapshot holds was changed first, and last.
        changes = [self._links_changed_at] * have_links_changed
        deletions = [self._waiting[path] for path in deleted]
        first_at = min((*changes, *deletions, *(self._waiting[path] for path in counted)), default=None)
        last_at = max((*changes, *deletions, *(self._files[path].written_at for path in counted)), default=None)
        is_quiet = last_at is not None and at - last_at >= QUIET_SECONDS
        cut_at = at if end is None else end.failed_at
        if first_at is None or self._waiting_since is None:
            self._waiting_since = first_at
        is_time = is_quiet or (self._waiting_since is not None and at - self._waiting_since >= DUE_SECONDS)
        fit = frozenset(path for path in counted if path not in left_out)
        # As long as something is left out, what is gone stays in the snapshot.
        is_news = bool(fit) or have_links_changed or (first_at is not None and not left_out)
        return Decision(
            due=is_time and is_news,
            restless=last_at is not None and at - last_at < _SETTLED_SECONDS,
            fit=fit,
            left_out=left_out,
            together=together,
            growing=growing,
            copied=frozenset(path for path in unstored if self._files[path].shares_its_inode),
            deleted=frozenset(
                path for path in deleted if cut_at is not None and cut_at - self._waiting[path] < QUIET_SECONDS
            ),
            waiting_since=self._waiting_since,
        )

    def taken(self) -> None:
        """A snapshot of what `decide` said was taken."""
        self._waiting_since = None

    def _not_in(self, stored: Mapping[str, Fingerprint], files: Mapping[str, Fingerprint]) -> Sequence[str]:
        """Return the files that do not look as in `stored`."""
        known, seen = self._compared
        # Dictionaries of the same values are compared fast.
        if stored is not known or files != seen:
            self._compared, self._unstored = (stored, files), self._differing(stored, files)
        return self._unstored

    @staticmethod
    def _differing(known: Mapping[str, Fingerprint], files: Mapping[str, Fingerprint]) -> Sequence[str]:
        return [path for path, seen in files.items() if known.get(path) != seen] if known != files else []

    def _note_change(self, path: str, seen: Fingerprint, at: float, *, renamed: bool, was: str) -> None:
        """`was`: the name that the file had before, if it was renamed."""
        before, file = self._scan.files.get(path), self._files.get(path)
        was_at_rest = file is None or file.is_whole(self._looked_at)
        if file is None:
            state = FileState.RENAMED if renamed else FileState.NEW
            file = TrackedFile(seen=before or seen, written_at=at, change=state, is_log=self._is_log(path, seen))
            self._files[path] = file
        if before is not None:
            file.changed(seen, at=at, renamed=renamed, was_at_rest=was_at_rest)
            file.is_log = file.is_log or self._is_log(path, seen)
        last = self._last_writes.pop(path, None)
        if file.is_log:
            return
        if last is not None and was_at_rest:
            self._past_writes.append(last)
        # It may have begun just after the last look.
        first_seen_at = min(at, self._looked_at) if self._looked_at > float("-inf") else at
        begun_at = first_seen_at if last is None or was_at_rest else last.begun_at
        if was in self._last_writes:
            begun_at = self._last_writes[was].begun_at
        self._last_writes[path] = Write(path=path, begun_at=begun_at, ended_at=at)

    def _judge(
        self, unstored: Sequence[str], at: float, end: ProgramEnd | None
    ) -> tuple[dict[str, str], dict[str, int]]:
        """Return why files are not fit, and which go together."""
        files = self._files
        if end is not None and end.failed_at is None:
            return {path: files[path].reason for path in unstored if files[path].proof is Proof.BROKEN}, {}
        cut_at = at if end is None or end.failed_at is None else min(at, end.failed_at)
        until = float("inf") if end is None else end.until
        left_out = {
            path: files[path].reason or _WRITTEN
            for path in unstored
            if files[path].proof is Proof.BROKEN or not (files[path].written_at > until or files[path].is_whole(cut_at))
        }
        together: dict[str, int] = {}
        databases: dict[str, int] = {}
        for path in unstored:
            if files[path].proof is Proof.ANY_INSTANT:
                together[path] = databases.setdefault(database_of(path), -1 - len(databases))
        grouped = frozenset(path for path in unstored if not self._stands_alone(path, files[path], cut_at))
        if not grouped:
            return left_out, together
        for number, (group, before, next_at, paths) in enumerate(self._groups(grouped)):
            together.update(dict.fromkeys(paths, number))
            unfit = next((path for path in sorted(paths) if path in left_out), None)
            is_over = group.ended_at > until or is_complete(
                group,
                before,
                next_at=next_at,
                at=cut_at,
                is_renamed=all(files[path].state(cut_at) is FileState.RENAMED for path in paths),
                is_proven=end is not None
                and all(is_proven(files[path].state(cut_at), files[path].proof) for path in paths),
            )
            if unfit is not None or not is_over:
                reason = _INCOMPLETE if unfit is None else _TOGETHER.format(unfit)
                for path in paths:
                    left_out.setdefault(path, reason)
        return left_out, together

    def _groups(
        self, grouped: frozenset[str]
    ) -> Iterator[tuple[WriteGroup, Kinds | None, float | None, frozenset[str]]]:
        """Yield groups with related kinds, when the next one began, and their files among `grouped`.

        What is left of a group of which a file was written again goes with that file's new group.
        """
        writes = [write for write in (*self._past_writes, *self._last_writes.values()) if self._counts(write.path)]
        found = groups(writes)
        last = {path: number for number, group in enumerate(found) for path in group.paths}
        goes_with = list(range(len(found)))
        for number in reversed(range(len(found))):
            if any(last[path] == number for path in found[number].paths & grouped):
                goes_with[number] = goes_with[max(last[path] for path in found[number].paths)]
        earlier = list(self._earlier)
        for number, group in enumerate(found):
            paths = frozenset(path for path in grouped if path in last and goes_with[last[path]] == number)
            next_at = found[number + 1].begun_at if number + 1 < len(found) else None
            if paths:
                yield group, related_kinds(group, earlier, found[number + 1 :]), next_at, paths
            earlier.append(group.kinds)

    def _is_log(self, path: str, seen: Fingerprint) -> bool:
        return is_log(path) or seen.inode in self._log_inodes

    def _counts(self, path: str) -> bool:
        """Whether a write belongs to a group: not that of a file that turned out to stand alone."""
        file = self._files.get(path)
        return file is None or not self._stands_alone(path, file, self._looked_at)

    def _stands_alone(self, path: str, file: TrackedFile, at: float) -> bool:
        return path == self._status or file.stands_alone(at)

    def _forget(self, unstored: frozenset[str], at: float) -> None:
        """Forget what is stored, but for the kinds of its groups and for files that are written in place."""
        for path in self._files.keys() - unstored:
            if self._files[path].change in (FileState.NEW, FileState.RENAMED) and not self._files[path].is_log:
                del self._files[path]
        writes = (*self._past_writes, *self._last_writes.values())
        if not writes or at - min(write.ended_at for write in writes) < _REMEMBERED_SECONDS:
            return
        for group in groups(writes):
            if at - group.ended_at < _REMEMBERED_SECONDS or not unstored.isdisjoint(group.paths):
                continue
            if self._counts(min(group.paths)):
                self._earlier.append(group.kinds)

            def is_kept(write: Write, group: WriteGroup = group) -> bool:
                return write.path not in group.paths or not group.begun_at <= write.ended_at <= group.ended_at

            self._past_writes = deque(filter(is_kept, self._past_writes), maxlen=_MOST_WRITES)
            self._last_writes = {path: write for path, write in self._last_writes.items() if is_kept(write)}


def _moved_folder(path: str, was: str) -> str:
    """Return the folder, with a slash, that was renamed, if a file in it has another path now; "" if the file was."""
    names, names_before = path.split("/"), was.split("/")
    while names and names_before and names[-1] == names_before[-1]:
        names.pop()
        names_before.pop()
    return f"{'/'.join(names)}/" if names and len(names) < len(path.split("/")) else ""


def database_of(path: str) -> str:
    """Return the file that the parts of a database belong to: SQLite's log and journal, LMDB's lock."""
    for suffix in DATABASE_SUFFIXES:
        path = path.removesuffix(suffix)
    folder, slash, name = path.rpartition("/")
    return f"{folder}{slash}data.mdb" if name == "lock.mdb" else path
