"""Run the steps that build the image without containers: in a folder that holds only what passes .dockerignore.

    python deploy/try/image_steps.py FOLDER        two minutes; needs PyPI, npm's registry and a C++ compiler

The steps are those of the Dockerfile's stage `build`, in order, with FOLDER/src as its working directory and FOLDER/opt
in place of /opt. Debian's packages are taken as installed. The server's own dependencies are not installed again: torch
and the others are those of the Python that runs this.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy/Dockerfile"


def main() -> None:
    """Build the context, run the steps, and check the result."""
    folder = Path(sys.argv[1]).absolute()
    made = run_build_stage(folder)
    print(f"the image's environment: {made}")


def run_build_stage(folder: Path) -> Path:
    """Run the stage `build` below `folder` and return its /opt/loramux. Raises CalledProcessError, AssertionError."""
    context = copy_context(ROOT, folder / "src")
    torch = importlib.util.find_spec("torch")
    assert torch is not None, "this Python has no torch: pip install -e ."
    assert torch.origin is not None
    shared = str(Path(torch.origin).parents[1])
    for instruction, text in instructions(DOCKERFILE, "build"):
        if instruction == "COPY":
            assert text == ". .", f"COPY {text}: not known here"
        if instruction != "RUN" or text.startswith("apt-get"):
            continue
        print(f"RUN {text}", flush=True)
        environment = os.environ | {"VARIANT": "cuda", "EXTRAS": "finance,otel", "TORCH": "", "TORCH_INDEX": ""}
        environment.pop("VIRTUAL_ENV", None)
        if text.startswith("cd / &&"):
            environment["PYTHONPATH"] = shared
        command = text.replace("/opt/", f"{folder}/opt/").replace("python -m venv", f"{sys.executable} -m venv")
        command = command.replace(" ./client ", " --no-deps ./client ")
        subprocess.run(["bash", "-euo", "pipefail", "-c", command], cwd=context, env=environment, check=True)
    return folder / "opt/loramux"


def copied_into_image(stage: str | None) -> list[str]:
    """Return the sources of the COPY instructions that take files of the context; None: those of the last stage."""
    found = [text for instruction, text in instructions(DOCKERFILE, stage) if instruction == "COPY"]
    return [source for text in found if not text.startswith("--from") for source in text.split()[:-1]]


def instructions(dockerfile: Path, stage: str | None) -> Iterator[tuple[str, str]]:
    """Yield the instructions of a stage, each with its text on one line; None: those of the last stage."""
    lines = [line for line in dockerfile.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    stages: dict[str | None, list[tuple[str, str]]] = {}
    current: list[tuple[str, str]] = []
    for line in joined.splitlines():
        instruction, _, text = line.partition(" ")
        if instruction == "FROM":
            name = text.split()[2] if " AS " in text else None
            current = stages.setdefault(name, [])
        elif line.strip():
            current.append((instruction, text.strip()))
    yield from stages[stage]


# Files that `docker build` sends: https://docs.docker.com/build/concepts/context/#dockerignore-files


def copy_context(root: Path, target: Path) -> Path:
    """Copy what .dockerignore lets through, and return `target`."""
    patterns = ignore_patterns((root / ".dockerignore").read_text())
    for file in files_of_context(root, patterns):
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / file, target / file)
    return target


def ignore_patterns(text: str) -> list[tuple[re.Pattern[str], bool]]:
    """Return each pattern of a .dockerignore; True if it leaves files out, False if it lets them through."""
    lines = [line.strip() for line in text.splitlines()]
    return [(_compiled(line.removeprefix("!")), not line.startswith("!")) for line in lines if line and line[0] != "#"]


def is_left_out(path: str, patterns: Sequence[tuple[re.Pattern[str], bool]]) -> bool:
    """Return True if the last pattern that matches the path, or a folder above it, leaves it out."""
    parts = path.split("/")
    above = ["/".join(parts[: end + 1]) for end in range(len(parts))]
    left_out = False
    for pattern, leaves_out in patterns:
        if any(pattern.fullmatch(one) for one in above):
            left_out = leaves_out
    return left_out


def files_of_context(root: Path, patterns: Sequence[tuple[re.Pattern[str], bool]]) -> Iterator[str]:
    """Yield the files that pass. No exception here leads back into a folder that is left out below the top level."""
    for entry in sorted(root.iterdir()):
        if entry.is_file() and not is_left_out(entry.name, patterns):
            yield entry.name
        elif entry.is_dir() and any(
            not leaves_out and pattern.fullmatch(entry.name) for pattern, leaves_out in patterns
        ):
            for folder, folders, files in os.walk(entry):
                here = Path(folder).relative_to(root)
                folders[:] = [name for name in folders if not is_left_out((here / name).as_posix(), patterns)]
                yield from (path for name in files if not is_left_out(path := (here / name).as_posix(), patterns))


def _compiled(pattern: str) -> re.Pattern[str]:
    translated = re.escape(pattern.strip("/")).replace(r"\*\*/", "(?:.*/)?").replace(r"\*\*", ".*")
    return re.compile(translated.replace(r"\*", "[^/]*").replace(r"\?", "[^/]"))


if __name__ == "__main__":
    main()
