"""Shell completion of `moecost`, as a shell asks for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
INSTALLED = BIN / "moecost"

TAB = """
source ~/.bash_completions/moecost.sh
complete -p moecost > /dev/null            # the shell knows whom to ask
COMP_WORDS=({words}) COMP_CWORD={place}
_moecost_completion moecost
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home folder whose bash has the completion installed, by the command itself."""
    if shutil.which("bash") is None or not INSTALLED.exists():
        pytest.skip("needs bash, and moecost as a command")
    folder = tmp_path_factory.mktemp("home")
    done = shell("moecost --install-completion; exit $?", folder)  # found out by its parent, so not by `bash -c` alone
    assert done.returncode == 0, done.stderr
    assert "bash completion installed" in done.stdout
    assert ".bash_completions/moecost.sh" in (folder / ".bashrc").read_text(encoding="utf-8")
    return folder


def shell(script: str, home: Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"HOME": str(home), "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(["bash", "-uc", script], env=env, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("words", "offered", "not_offered"),
    [
        ("moecost es", {"estimate"}, "sweep"),
        ("moecost estimate --gpu h200", {"h200-141gb-sxm"}, "a40"),
        ("moecost estimate --method q", {"qlora"}, "lora"),
        ("moecost estimate --seq", {"--sequence-length"}, "--software"),
    ],
)
def test_tab_completes(words: str, offered: set[str], not_offered: str, home: Path) -> None:
    done = shell(TAB.format(words=words, place=len(words.split()) - 1), home)
    assert done.returncode == 0, done.stderr
    found = set(done.stdout.split())
    assert offered <= found
    assert not_offered not in found
    assert done.stderr == ""


@pytest.mark.parametrize("name", ["bash", "zsh", "fish", "powershell"])
def test_the_script_of_each_shell_asks_moecost(name: str) -> None:
    env = os.environ | {"_MOECOST_COMPLETE": f"source_{name}"}
    done = subprocess.run(
        [sys.executable, "-m", "moecost"], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "_MOECOST_COMPLETE" in done.stdout
    assert f"complete_{name}" in done.stdout
