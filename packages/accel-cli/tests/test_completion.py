from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from accel_cli.main import COMMANDS, main
from accel_state.settings import OPTIONS

SHELLS = ("bash", "zsh", "fish", "tcsh")


@pytest.fixture
def script(capsys):
    def write(shell):
        assert main(["completion", shell]) == 0
        return capsys.readouterr().out

    return write


@pytest.mark.parametrize("shell", SHELLS)
def test_every_command_and_every_flag_of_launch_can_be_completed(script, shell):
    text = script(shell)
    assert [name for name in COMMANDS if name not in text] == []
    dashes = "" if shell in {"fish", "tcsh"} else "--"
    flags = [flag for option in OPTIONS for flag in option.flags if flag.startswith("--")]
    assert [flag for flag in flags if dashes + flag[2:] not in text] == []


@pytest.mark.parametrize("shell", SHELLS)
def test_what_the_launcher_takes_is_offered(script, shell):
    words = re.split(r"[^\w-]+", script(shell))
    assert {"bf16", "fp8", "selective"} <= {*words}


@pytest.mark.parametrize("shell", SHELLS)
def test_the_shell_itself_accepts_the_script(script, shell, tmp_path):
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    file = tmp_path / "completion"
    file.write_text(script(shell))
    done = subprocess.run([program, "-n", file], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def offered(script, *words):
    """What bash offers for the last word."""
    code = (
        f"{script}\nCOMP_WORDS=({' '.join(map(repr, words))}); COMP_CWORD={len(words) - 1}; _shtab_accel;"
        ' printf "%s\\n" "${COMPREPLY[@]}"'
    )
    program = shutil.which("bash")
    if program is None:
        pytest.skip("bash is not installed")
    return subprocess.run([program, "-c", code], capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["accel", "la"], ["launch"]),
        (["accel", "t"], ["test", "to-fsdp2", "tpu-config"]),
        (["accel", "launch", "--num_p"], ["--num_processes"]),
        (["accel", "launch", "--mixed_precision", "b"], ["bf16"]),
        (["accel", "completion", ""], ["bash", "zsh", "fish", "tcsh"]),
        (["accel", "env", "--js"], ["--json"]),
    ],
)
def test_bash_offers_what_can_be_written_there(script, words, wanted):
    assert offered(script("bash"), *words) == wanted


def test_bash_offers_files_where_a_script_is_expected(script, tmp_path, monkeypatch):
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    assert offered(script("bash"), "accel", "launch", "tr") == ["train.py"]
