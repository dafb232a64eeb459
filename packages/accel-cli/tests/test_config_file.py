"""Config files that somebody else wrote, or that are none."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from accel_cli.config_file import WRITTEN_BY, format_config, read, read_config
from accel_state.errors import SettingsError


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 100_000, "maximum recursion depth"),
        ("a: {b\n", "in line 2"),
        ("a: !!python/object/apply:os.system [id]", "could not determine a constructor"),
        ("a: 2001-99-99", "month must be"),
        ("{[a]: 1}", "unhashable"),
        ("a: \x00", "special characters"),
        (b"\xff\xfe\x00", "decode"),
    ],
)
def test_yaml_that_is_no_configuration_ends_in_a_sentence(text, reason, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SettingsError, match=reason) as caught:
        read(path)
    assert "c.yaml" in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_file_that_is_no_configuration_is_not_shown(tmp_path):
    path = tmp_path / "shadow"
    path.write_text("root:$6$secret$hash:19000:0:99999\n" * 500)
    with pytest.raises(SettingsError, match="holds one str: expected a table") as caught:
        read(path)
    assert "secret" not in str(caught.value)
    path.write_text("root:$6$secret$hash\n\troot: x: [secret\n")
    with pytest.raises(SettingsError, match="shadow") as caught:
        read(path)
    assert "secret" not in str(caught.value)


def test_a_file_of_other_keys_is_not_shown_either(tmp_path):
    path = tmp_path / "shadow"
    path.write_text("".join(f"user{i}:*:19000:0:99999:7:::\n" for i in range(500)))
    with pytest.raises(SettingsError) as caught:
        read_config(str(path), {})
    assert str(caught.value) == (
        f"{path} is not an accel config file: 500 of its 500 keys are unknown, such as "
        "'user0:*:19000:0:99999:7::'"
    )


def test_a_few_aliases_are_read(tmp_path):
    path = tmp_path / "c.yml"
    path.write_text("a: &a {x: 1}\nb: {<<: *a, y: 2}\n")
    assert read(path) == {"a": {"x": 1}, "b": {"x": 1, "y": 2}}


@pytest.mark.parametrize("line", ["num_procesess: 2", "mixed_precision: fp2"])
def test_what_a_newer_version_has_written_is_refused_with_both_versions(line, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(f"{WRITTEN_BY}999.1.0\n{line}\n")
    with pytest.raises(
        SettingsError, match=rf"was written by accel 999\.1\.0, and this is accel {version('accel-cli')}"
    ):
        read_config(str(path), {})
    for first in (
        "",
        f"{WRITTEN_BY}0.0.1\n",
        f"{WRITTEN_BY}of old\n",
        f"{WRITTEN_BY}{version('accel-cli')}\n",
    ):
        path.write_text(f"{first}{line}\n")
        with pytest.raises(SettingsError, match=line.partition(":")[0]) as caught:
            read_config(str(path), {})
        assert "this is accel" not in str(caught.value)


def test_a_file_says_which_version_has_written_it(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(format_config(path, {"num_processes": 2}))
    assert path.read_text().splitlines()[0] == f"{WRITTEN_BY}{version('accel-cli')}"
    assert read(path) == {"num_processes": 2}
