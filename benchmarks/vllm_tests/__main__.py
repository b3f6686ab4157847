"""vLLM's own tests of its HTTP API, from its source distribution, against this server.

The tests run twice. First the models are random, so a case that passes does not depend on a model's answers. Some
failing cases expect certain answers. They run again with a model that was trained on these answers (`lessons.py`), and
are counted separately.

    python benchmarks/vllm_tests [--plain] [--sdist FILE] [--keep FOLDER] [PYTEST ARGUMENTS]

The source distribution is fetched with pip into a temporary folder, and so are pytest-asyncio and the packages that
vLLM's metadata needs. vLLM itself is not installed: `plugin.py` replaces the modules that vLLM's tests import. When a
test starts vLLM's server, `plugin.py` starts this server instead, with a small model (`model.py`).
docs/compatibility.md explains which cases apply, and why other cases fail. With `--keep`, FOLDER/outcomes.json has
every case by name.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, cast

HERE = Path(__file__).parent
VERSION = "0.33.0"
FILES = (
    "entrypoints/openai/chat_completion/test_chat.py",
    "entrypoints/openai/chat_completion/test_chat_completion.py",
    "entrypoints/openai/chat_completion/test_chat_echo.py",
    "entrypoints/openai/chat_completion/test_chat_logit_bias_validation.py",
    "entrypoints/openai/chat_completion/test_completion_with_function_calling.py",
    "entrypoints/openai/chat_completion/test_enable_force_include_usage.py",
    "entrypoints/openai/chat_completion/test_logprob_token_ids.py",
    "entrypoints/openai/chat_completion/test_root_path.py",
    "entrypoints/openai/completion/test_completion.py",
    "entrypoints/openai/completion/test_prompt_validation.py",
    "entrypoints/openai/completion/test_token_in_token_out.py",
    "entrypoints/openai/models/test_models.py",
    "entrypoints/openai/test_chunked_prompt.py",
    "entrypoints/openai/test_return_token_ids.py",
    "entrypoints/openai/test_return_tokens_as_ids.py",
    "entrypoints/serve/instrumentator/test_basic.py",
    "entrypoints/serve/lora/test_lora_adapters.py",
    "entrypoints/serve/tokenize/test_tokenization.py",
    "entrypoints/tool_parsers/test_hermes_tool_parser.py",
    "tool_use/test_chat_completions.py",
    "tool_use/test_parallel_tool_calls.py",
    "tool_use/test_tool_calls.py",
)
"""Tests of endpoints that both servers have."""
NEEDED = ("setuptools", "setuptools_scm", "setuptools_rust", "packaging", "requests", "pytest-asyncio")


def main() -> int:
    """Run the tests and print the results as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sdist", type=Path, help="a source distribution that is here already")
    parser.add_argument("--keep", type=Path, help="a folder for downloads, models and logs; default: a temporary one")
    parser.add_argument("--plain", action="store_true", help="with random models alone, which takes half the time")
    options, arguments = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="vllm-tests-") as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        tests = fetch(folder, options.sdist)
        return run(folder, tests, arguments, is_plain=options.plain)


def fetch(folder: Path, sdist: Path | None) -> Path:
    """Return the folder that holds vLLM's `tests`, and put the packages that are needed below `folder`."""
    packages = folder / "packages"
    if not packages.exists():
        pip("install", "--quiet", "--no-deps", "--target", str(packages), *NEEDED, "semantic_version", "vcs_versioning")
    if sdist is None:
        # pip looks at the metadata, which vLLM's setup.py makes; these variables prevent a build.
        flags = {"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": VERSION, "PYTHONPATH": str(packages)}
        where = ("--no-deps", "--no-binary", "vllm", "--no-build-isolation", "--dest", str(folder))
        pip("download", "--quiet", *where, f"vllm=={VERSION}", **flags)
        sdist = next(folder.glob("vllm-*.tar.gz"))
    with tarfile.open(sdist) as archive:
        members = [one for one in archive if is_needed(one.name)]
        archive.extractall(folder, members, filter="data")
    tests = next(folder.glob("vllm-*/tests"))
    for package in [tests, *(one for one in tests.rglob("*") if one.is_dir())]:
        (package / "__init__.py").touch()
    (tests / "conftest.py").unlink(missing_ok=True)  # this test file prepares vLLM's engine
    return tests


def is_needed(name: str) -> bool:
    """Is this a file of the tests, or a chat template that they name?"""
    return ("/tests/" in name and name.endswith(".py")) or ("/examples/" in name and name.endswith(".jinja"))


def pip(*arguments: str, **environment: str) -> None:
    """Run pip, and stop with its output if it fails."""
    subprocess.run([sys.executable, "-m", "pip", *arguments], check=True, env=os.environ | environment)


def run(folder: Path, tests: Path, arguments: list[str], *, is_plain: bool) -> int:
    """Run the tests with random models, then cases that expect certain answers with a trained model; return an exit
    code.
    """
    chosen = [argument for argument in arguments if not argument.startswith("-")]
    flags = [argument for argument in arguments if argument.startswith("-")]
    plain = run_once(folder, tests, [*flags, *(chosen or [str(tests / name) for name in FILES])], "plain")
    outcomes = dict(plain["outcomes"])
    again = [case for case, outcome in outcomes.items() if outcome == "failed" and case in plain["with_lessons"]]
    if again and not is_plain:
        taught = run_once(folder, tests, [*flags, *(str(tests.parent / case) for case in again)], "taught")["outcomes"]
        outcomes |= {case: "passed with lessons" for case in again if taught.get(case) == "passed"}
    (folder / "outcomes.json").write_text(json.dumps(outcomes, indent=1, sort_keys=True))
    failed = [case for case, outcome in sorted(outcomes.items()) if outcome == "failed"]
    print("\n".join(["do not pass:", *failed]))
    print(json.dumps(Counter(outcomes.values())))
    return 0


def run_once(folder: Path, tests: Path, cases: list[str], kind: str) -> dict[str, Any]:
    """Run cases with models of one kind; return the plugin's report."""
    path = os.pathsep.join([str(HERE), *sys.path, str(folder / "packages")])
    report = folder / f"report-{kind}.json"
    environment = os.environ | {
        "PYTHONPATH": path,
        "VLLM_TESTS_FOLDER": str(folder),
        "VLLM_TESTS_REPORT": str(report),
        "VLLM_TESTS_MODELS": kind,
    }
    plugins = ("-p", "plugin", "-p", "pytest_asyncio", "-p", "no:cacheprovider")
    options = [*plugins, "--rootdir", str(tests.parent), "-c", os.devnull]
    command = [sys.executable, "-m", "pytest", "-q", "--tb=line", *options, *cases]
    subprocess.run(command, cwd=tests.parent, env=environment, check=False)
    return cast(dict[str, Any], json.loads(report.read_text()))


if __name__ == "__main__":
    sys.exit(main())
