"""A jail that a process enters by itself. In the jail the process has no network, and only the listed parts of the
filesystem.

The filesystem is closed by Landlock, which needs neither root nor a container.

A process lists the folders that it may open from now on, and restricts itself permanently; its children inherit the
restriction. The kernel refuses all other paths with EACCES, including `/proc` of other processes. Later kernels also
take away TCP (ABI 4), signals to processes outside and abstract Unix sockets (ABI 6). A descriptor that is already open
stays usable.

https://docs.kernel.org/userspace-api/landlock.html
"""

from __future__ import annotations

import ctypes
import os
import site
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from functools import cache
from pathlib import Path

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""Numbers of the system calls, the same on every architecture."""
_CREATE_RULESET_VERSION = 1
_RULE_PATH_BENEATH = 1
_PR_SET_NO_NEW_PRIVS = 38

# Bits of linux/landlock.h.
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _REMOVE_DIR, _REMOVE_FILE = (1 << bit for bit in range(6))
_MAKE_DIR, _MAKE_REG, _TRUNCATE = 1 << 7, 1 << 8, 1 << 14
_READ = _READ_FILE | _READ_DIR
_CODE = _READ | _EXECUTE
_WRITE = _READ | _WRITE_FILE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_REG | _TRUNCATE
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
"""The rights that a rule on a file, and not on a folder, may have."""
_ALL_FILESYSTEM = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1}
_SINCE_ABI_5 = (1 << 16) - 1
_BIND_AND_CONNECT_TCP = 0b11
_ABSTRACT_SOCKETS_AND_SIGNALS = 0b11

_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib")
_FACTS = (
    "/dev/urandom",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/proc/cpuinfo",
    "/proc/meminfo",
    "/proc/self",
    "/sys/devices/system/cpu",
    "/usr/share/zoneinfo",
)
"""Files from which libraries read facts about the machine. These files hold no secret of the server."""


CLONE_NEWUSER, CLONE_NEWNET = 0x1000_0000, 0x4000_0000


def leave_network() -> bool:
    """Move to a new network namespace without any interface. Return False if the kernel does not allow it.

    An unprivileged process needs a new user namespace for this, which many containers forbid. For root no user
    namespace is created, because in it root would lose the right to read files of other users, such as the model's
    files.
    """
    unshare = ctypes.CDLL(None, use_errno=True).unshare
    return bool(unshare(CLONE_NEWNET if os.geteuid() == 0 else CLONE_NEWUSER | CLONE_NEWNET) == 0)


@cache
def may_leave_network() -> bool:
    """Return whether `leave_network` would succeed, which a separate process tries."""
    return subprocess.run([sys.executable, "-I", __file__], check=False, capture_output=True).returncode == 0  # noqa: S603 - our own file


class _RulesetAttributes(ctypes.Structure):
    _fields_ = (
        ("handled_access_fs", ctypes.c_uint64),
        ("handled_access_net", ctypes.c_uint64),
        ("scoped", ctypes.c_uint64),
    )


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


_libc = ctypes.CDLL(None, use_errno=True)


def landlock_abi() -> int:
    """Return the version of the kernel's Landlock; 0 if the kernel does not have Landlock, or if it is switched off."""
    return max(0, int(_libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _CREATE_RULESET_VERSION)))


def enter_jail(readable: Iterable[str], writable: Iterable[str]) -> bool:
    """Restrict this process to Python's own files and these folders, permanently. Return False if the kernel cannot do
    this.

    Paths that do not exist are left out, because they cannot be opened anyway. The process should have one thread: its
    other threads would keep their rights.
    """
    abi = landlock_abi()
    if abi == 0:
        return False
    filesystem = _ALL_FILESYSTEM.get(abi, _SINCE_ABI_5)
    handled = _RulesetAttributes(
        filesystem, _BIND_AND_CONNECT_TCP if abi >= 4 else 0, _ABSTRACT_SOCKETS_AND_SIGNALS if abi >= 6 else 0
    )
    # An older kernel knows a shorter structure. It refuses a longer structure unless the additional bytes are zero,
    # which they are.
    ruleset = _call(_CREATE_RULESET, ctypes.byref(handled), ctypes.c_size_t(ctypes.sizeof(handled)), 0)
    try:
        for paths, rights in (
            (code_paths(), _CODE),
            (_FACTS, _READ),
            (("/dev/null",), _READ_FILE | _WRITE_FILE),
            (readable, _READ),
            (writable, _WRITE),
        ):
            for path in paths:
                _allow(ruleset, path, rights & filesystem)
        if _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS)")
        _call(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)
    return True


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        rule = _PathBeneath(rights if is_folder else rights & _OF_FILES, descriptor)
        _call(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, ctypes.byref(rule), 0)
    finally:
        os.close(descriptor)


def _call(number: int, *arguments: object) -> int:
    result = int(_libc.syscall(number, *arguments))
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"Landlock (system call {number}): {os.strerror(error)}")
    return result


@cache
def code_paths() -> tuple[str, ...]:
    """Return the paths that a process needs to start Python and to import: interpreter, libraries and packages.

    The other folders of sys.path are left out. If the server was started by `python -m`, one of these folders is its
    working folder, which may contain the database. The packages that are loaded from such a folder are included.
    """
    interpreter = {sys.executable, os.path.realpath(sys.executable), str(Path(sys.prefix) / "pyvenv.cfg")}
    installed = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    installed |= {str(Path(sys.base_prefix) / "lib"), *site.getsitepackages()}
    installed |= {path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")}  # of .pth files
    libraries = {*_LIBRARIES, *filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep))}
    return tuple(sorted({*interpreter, *installed, *libraries, *_loaded_packages()}))


def _loaded_packages() -> set[str]:
    """Return the folders of loaded top-level packages, and the files of modules that are not packages."""
    found = set[str]()
    for name, module in list(sys.modules.items()):
        if "." not in name and name != "__main__":
            found.update(map(str, getattr(module, "__path__", ())) or {getattr(module, "__file__", None) or ""})
    return found - {""}


if __name__ == "__main__":
    sys.exit(not leave_network())
