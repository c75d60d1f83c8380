"""Every command of the pages is right, and those that say so are run (:mod:`tests.packaging.documented`)."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hydra.errors import HydraException

from embodied_rl.cli import config_of
from embodied_rl.commands import COMMANDS
from embodied_rl.errors import UserError
from embodied_rl.models.registry import policy_class
from embodied_rl.params import parse_params
from tests.packaging import warm
from tests.packaging.documented import PAGES, ROOT, SHELL, Block, blocks, inline

ELSEWHERE = ("apt-get", "echo", "export", "ls", "printf", "python3.11", "source")
"""Programs that are not ours: nothing of theirs is checked."""
RUNNABLE = ("python", "embodied-rl", "ls", "printf")
"""All that a block which is run may call: nothing that installs."""
PRELUDE = """
set -euo pipefail
python() {
  if [[ $1 == train.py ]]; then
    shift
    [[ $1 != *=* ]] || set -- "$@" "${short[@]}"
    command "$PYTHON" -I -S "$WARM" "$WARM_SOCKET" "$@"
  else
    command "$PYTHON" "$@"
  fi
}
embodied-rl() { python train.py "$@"; }
"""
"""``python`` of the blocks: this one, and a training command gets its block's overrides and starts warm."""


def pages(kind: Any, quick: Sequence[str] | None = None) -> list[Any]:
    """The pages with such a block; all but ``quick`` are slow, unless that is None."""
    return [
        pytest.param(page, id=page.name, marks=[] if quick is None or page.name in quick else [pytest.mark.slow])
        for page in PAGES
        if any(kind(block) for block in blocks(page))
    ]


# Checked


@pytest.mark.parametrize("page", pages(lambda block: block.language in SHELL))
def test_commands_are_right(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A default that moved, a key that is gone or a file that was renamed shows here, at a tenth of a second each."""
    for block in [*blocks(page), *inline(page)]:
        if block.language in SHELL and not missing(block) and not block.walk:
            for words in block.commands():
                try:
                    check(block, words, monkeypatch)
                except (AssertionError, HydraException, UserError) as error:
                    pytest.fail(f"{page}:{block.line}: {shlex.join(words)}\n{error}", pytrace=False)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_block_is_lost(page: Path) -> None:
    fences = re.findall(r"^ *```", (ROOT / page).read_text(), flags=re.MULTILINE)
    assert len(fences) == 2 * len(blocks(page))


def test_commands_are_in_blocks() -> None:
    """A command that is only indented would escape all of this."""
    stray = [
        f"{page}: {line}"
        for page in PAGES
        for line in re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.M | re.S).splitlines()
        if re.match(r" {4,}(\$ )?(python|pip|make|embodied-rl|\.venv\S*/python) ", line)
    ]
    assert not stray


def check(block: Block, words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    program, *rest = words
    if re.fullmatch(r"(\.venv[-\w]*/bin/)?python", program):
        check_python(block, rest, monkeypatch)
    elif program == "embodied-rl":
        check_train(rest, block)
    elif program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
        assert rest[0] in targets, f"expected one of {', '.join(targets)}"
    elif program == "pip":
        check_pip(rest)
    elif program.startswith("scripts/"):
        assert (ROOT / program).is_file()
    else:
        assert program in ELSEWHERE, "a command of a kind that is checked nowhere"


def check_python(block: Block, words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    match words:
        case ["train.py", *rest] | ["-m", "embodied_rl", *rest] | ["-m", "pdb", "train.py", *rest]:
            check_train(rest, block)
        case ["-m", "pytest", *rest]:
            paths = [word for word in rest if word.startswith("tests/")]
            assert paths and all((ROOT / path).exists() for path in paths)
        case ["-m", module, *rest] if module.startswith("benchmarks"):
            check_arguments(module, rest, monkeypatch)
        case [script, *rest] if script.startswith("scripts/"):
            if "ArgumentParser" in (ROOT / script).read_text():
                check_arguments(str(ROOT / script), rest, monkeypatch)
        case ["-", *_]:
            assert block.run is not None, "code that is not run says nothing"
        case _:
            raise AssertionError("a command of a kind that is checked nowhere")


def check_train(words: Sequence[str], block: Block) -> None:
    """A subcommand exists; a run's configuration is composed and passes all rules. ``<folder>`` is the reader's own."""
    if words in (["--help"], ["--cfg", "job"]):
        return
    if "=" not in words[0] and words[0] != "...":
        assert words[0] in COMMANDS, f"expected one of {', '.join(COMMANDS)}"
    elif block.run is None or not any("=/tmp/" in word or "[/tmp/" in word for word in words):  # else made by the block
        concrete = [word for word in words if "..." not in word and not re.fullmatch(r"model\.lora\.path=<.+>", word)]
        config = config_of(*(re.sub(r"<(.+)>", r"/\1", word) for word in concrete))
        parse_params(policy_class(config.model.model_type).Params, config.model.params, "model.params")


def check_pip(words: Sequence[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for option, value in itertools.pairwise(words):
        assert option not in ("-r", "-c") or (ROOT / value).is_file(), value
    for word in words:
        if named := re.match(r"(?:\.|embodied[-_]rl)\[(.*)\]", word):
            assert set(named[1].split(",")) <= set(extras)


class _Parsed(Exception):
    """The arguments are right; what would follow is not wanted."""


def check_arguments(program: str, arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Start ``program``, a module or a script, and stop it where it has parsed its arguments."""
    parse = argparse.ArgumentParser.parse_known_args

    def parse_alone(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        parsed = parse(self, args, namespace)
        if args is None:  # not a parser of a subcommand, which is handed its arguments
            raise _Parsed
        return parsed

    def refuse(self: argparse.ArgumentParser, message: str) -> NoReturn:
        raise AssertionError(message)

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_known_args", parse_alone)
        patch.setattr(argparse.ArgumentParser, "error", refuse)
        patch.setattr(sys, "argv", [program, *arguments])
        start = runpy.run_path if program.endswith(".py") else runpy.run_module
        with pytest.raises(_Parsed):
            start(program, run_name="__main__")


# Run


@pytest.fixture(scope="module")
def warm_socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = warm.Server(str(tmp_path_factory.mktemp("warm") / "socket"))
    yield server.address
    server.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", pages(lambda block: block.run is not None, quick=("explain.md",)))
def test_commands_run(page: Path, tmp_path: Path, warm_socket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page's blocks are run one after the other: a later one may need what an earlier one left. ``/tmp`` and the
    working directory are ``tmp_path``."""
    monkeypatch.setenv("WARM", warm.__file__)
    monkeypatch.setenv("WARM_SOCKET", warm_socket)
    for block in blocks(page):
        if block.run is None or missing(block):
            continue
        text = block.text.replace("/tmp/", f"{tmp_path}/")
        if block.language == "python":
            (tmp_path / "example.py").write_text(text)
            shell("python example.py", block, tmp_path)
            continue
        if stray := [words[0] for words in block.commands() if Path(words[0]).name not in RUNNABLE]:
            raise AssertionError(f"{page}:{block.line}: got {stray}, expected only {', '.join(RUNNABLE)}")
        if block.language == "bash":
            shell(re.sub(r"^\.venv[-\w]*/bin/python", "python", text, flags=re.MULTILINE), block, tmp_path)
            continue
        for command, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", text, flags=re.MULTILINE):
            said = shell(command, block, tmp_path, succeeds=not shown.startswith("error: "))
            expected = re.escape("".join(shown.split())).replace(r"\.\.\.", ".*")  # however the terminal wraps it
            assert re.search(expected, "".join(said.split())), f"{page}:{block.line}: {command}\n{said}"


def shell(text: str, block: Block, directory: Path, *, succeeds: bool = True) -> str:
    """What the block's commands print."""
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-c", f"{PRELUDE}short=({block.run})\n{text}"],
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert (done.returncode == 0) == succeeds, f"{block.page}:{block.line}: status {done.returncode}\n{done.stdout}"
    return done.stdout


def missing(block: Block) -> list[str]:
    """Those of the modules that the block needs which are not installed."""
    return [name for name in block.needs if importlib.util.find_spec(name) is None]
