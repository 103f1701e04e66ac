"""Who may write to a file besides its owner and root: by its mode, its group, an access control list, and its mount."""

from __future__ import annotations

import errno
import functools
import grp
import os
import pwd
import stat

from commwatch.wire import files
from commwatch.wire.handlers import raised_by_handler


def others_may_write(fd: int, about: os.stat_result) -> bool:
    """Return whether users other than the owner of a file and root may write to it."""
    if not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return False
    # Kubernetes mounts ConfigMaps and Secrets as folders of root with mode 0777, read-only.
    if about.st_uid == 0 and os.fstatvfs(fd).f_flag & os.ST_RDONLY:
        return False
    return bool(about.st_mode & stat.S_IWOTH) or not _is_private(fd, about)


def _is_private(fd: int, about: os.stat_result) -> bool:
    """Return whether the group of a file is its owner's private group: it has the owner's name, and no other member."""
    try:
        owner, group = pwd.getpwuid(about.st_uid), grp.getgrgid(about.st_gid)
    except KeyError:
        return False
    alone = owner.pw_gid == group.gr_gid and owner.pw_name == group.gr_name and {*group.gr_mem} <= {owner.pw_name}
    return alone and not _has_access_list(fd)


def _has_access_list(fd: int) -> bool:
    """Return whether an access control list gives rights to further users; the bits of the group are then the most that it gives."""
    try:
        return bool(os.getxattr(f"/proc/self/fd/{fd}", "system.posix_acl_access"))
    except OSError as error:
        if raised_by_handler(error):
            raise
        return error.errno not in (errno.ENODATA, errno.EOPNOTSUPP)


@functools.cache
def unmapped_uid() -> int | None:
    """Return the uid that stands for the users of the host in a user namespace without the host's root; ``None``: this is no such namespace.

    There the folders above a user's own ones are of that uid. The file itself must be of a trusted user, who can see its true owner.
    """
    mapped = (files.text("/proc/self/uid_map") or "").split()
    return None if mapped in ([], ["0", "0", str((1 << 32) - 1)]) else files.number("/proc/sys/kernel/overflowuid")
