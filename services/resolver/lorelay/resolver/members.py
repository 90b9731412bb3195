"""Files of a directory that strangers fill: opened by name, one by one, without following anything out of it.

Everything goes through one descriptor of the directory, and what was opened is asked (`fstat`), not the path: so a
rename, a symlink or a mount that appears between a check and its use changes nothing.  Linux.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from lorelay.resolver.reasons import Reason, show

MAX_NAMES = 10_000
"""Entries of a directory that are looked at; more than any adapter has."""


class MemberError(Exception):
    """A file that may not be used, with the reason."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(str(reason))
        self.reason = reason


class DirectoryError(Exception):
    """The directory cannot be opened, or is not where it was said to be.  The text stays in the log."""


class Members:
    """An open directory.  A context manager; every call blocks.

    Args:
        directory: Absolute, without `..`.
        trusted_root: A real path within which symlinks may lead: a resolver plugin's own area, where hub
            libraries keep files as symlinks to blobs.  None: no symlink at all.
    """

    def __init__(self, directory: Path, *, trusted_root: Path | None = None) -> None:
        self._trusted_root = trusted_root
        try:
            self._fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise DirectoryError(f"{directory}: {error.strerror}") from error
        opened = _path_of(self._fd)
        if opened != directory and not self._is_trusted(opened):
            os.close(self._fd)
            raise DirectoryError(f"{directory} leads to {opened} by a symbolic link")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the directory."""
        os.close(self._fd)

    def names(self) -> list[str]:
        """Return the names of its entries, sorted, at most `MAX_NAMES`."""
        found: list[str] = []
        with os.scandir(self._fd) as entries:
            for entry in entries:
                found.append(entry.name)
                if len(found) == MAX_NAMES:
                    break
        return sorted(found)

    def open(self, name: str) -> BinaryIO:
        """Open the file `name` for reading, unbuffered.

        Raises:
            MemberError: It is missing, no regular file, has several links, or leads away.
        """
        try:
            fd = self._open(name)
        except OSError as error:
            raise MemberError(Reason("unreadable_file", f"{show(name)} cannot be read: {error.strerror}.")) from error
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(fd)
            raise MemberError(Reason("not_regular_file", f"{show(name)} is not a regular file."))
        if status.st_nlink != 1:
            os.close(fd)
            raise MemberError(
                Reason("hard_link", f"{show(name)} has {status.st_nlink} hard links; expected 1: copy the file.")
            )
        return os.fdopen(fd, "rb", buffering=0)

    def _open(self, name: str) -> int:
        # O_NONBLOCK: opening a fifo must not wait for a writer.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        if not stat.S_ISLNK(os.stat(name, dir_fd=self._fd, follow_symlinks=False).st_mode):
            return os.open(name, flags, dir_fd=self._fd)
        target = Path(os.path.realpath(_path_of(self._fd) / name))
        if not self._is_trusted(target):
            raise MemberError(Reason("not_regular_file", f"{show(name)} is a symbolic link; expected a regular file."))
        fd = os.open(target, flags)
        if not self._is_trusted(_path_of(fd)):
            os.close(fd)
            raise MemberError(Reason("not_regular_file", f"{show(name)} leads out of its source."))
        return fd

    def _is_trusted(self, path: Path) -> bool:
        return self._trusted_root is not None and path.is_relative_to(self._trusted_root)


def _path_of(fd: int) -> Path:
    """Return where the kernel says that `fd` is."""
    return Path(f"/proc/self/fd/{fd}").readlink()
