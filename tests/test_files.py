"""Files are written whole or not at all, and a cache folder never keeps a step from running."""

import errno
import json
import os
import stat
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
from oracles import mesh_of, slow_chips

import autoshard
from autoshard import CacheWarning, files
from autoshard.files import sweep, write_whole

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import faults  # a script of benchmarks/

OPTIONS = {"mesh": mesh_of({"x": 4, "y": 2}), "topology": slow_chips("xy")}
X = np.ones((16, 8), np.float32)


def double(x):
    return x * 2


class FullDisk:
    """`os` on a disk on which nothing more fits."""

    def __getattr__(self, name):
        return getattr(os, name)

    def fsync(self, descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def full_disk(monkeypatch):
    monkeypatch.setattr(files, "os", FullDisk())


@pytest.fixture
def umask():
    before = os.umask(0o027)
    yield
    os.umask(before)


SAVED = {
    "plan": lambda path: autoshard.plan(double, X, **OPTIONS).save(path),
    "topology": lambda path: slow_chips("xy").save(path),
}


@pytest.mark.parametrize("what", SAVED)
def test_a_full_disk_leaves_the_old_file(what, tmp_path, full_disk):
    path = tmp_path / "saved.json"
    path.write_text("old")
    with pytest.raises(OSError, match="No space left"):
        SAVED[what](path)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("what", SAVED)
def test_who_may_read_it_says_the_umask(what, tmp_path, umask):
    path = tmp_path / "saved.json"
    SAVED[what](path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    path.chmod(0o664)
    SAVED[what](path)  # whoever chose that keeps it
    assert stat.S_IMODE(path.stat().st_mode) == 0o664


def test_files_of_a_cache_are_for_the_group(tmp_path, umask):
    autoshard.plan(double, X, cache=tmp_path / "shared", **OPTIONS)
    (path,) = (tmp_path / "shared").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_link_stays_one(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    write_whole(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "new"


def test_what_is_no_regular_file_is_written_to():
    reader, writer = os.pipe()
    write_whole(f"/dev/fd/{writer}", "text")
    os.close(writer)
    with open(reader) as file:
        assert file.read() == "text"
    write_whole("/dev/null", "text")
    assert not os.path.isfile("/dev/null")


def left_over(folder, name, seconds):
    path = folder / name
    path.write_text("half")
    os.utime(path, (time.time() - seconds,) * 2)
    return path


@pytest.mark.parametrize("where", ["save", "cache"])
def test_what_processes_left_half_written_is_removed(where, tmp_path):
    if where == "save":
        path, name = tmp_path / "plan.json", "plan.json"
    else:
        autoshard.plan(double, X, cache=tmp_path, **OPTIONS)
        path, name = next(tmp_path.iterdir()), "0" * 64 + ".plan"
    old = left_over(tmp_path, f"{name}.0123abcd.part", 2 * files.ABANDONED)
    kept = [
        left_over(tmp_path, f"{name}.0123abce.part", files.ABANDONED / 2),  # somebody may be at it
        left_over(tmp_path, "mine.part", 2 * files.ABANDONED),
        left_over(tmp_path, f"{name}.0123abcd", 2 * files.ABANDONED),
    ]
    if where == "save":
        autoshard.plan(double, X, **OPTIONS).save(path)
    else:
        autoshard.plan(double, X, cache=tmp_path, memory="1GiB", **OPTIONS)
    assert not old.exists() and path.exists() and all(one.exists() for one in kept)


def test_sweeping_a_folder_that_is_gone():
    sweep("/nowhere/at/all", ".*", 0.0)


def raises(error):
    def refuse(*args, **keywords):
        raise error

    return refuse


class Refusing:
    """`os` in which some functions raise."""

    def __init__(self, error, *names):
        self.error, self.names = error, names

    def __getattr__(self, name):
        return raises(self.error) if name in self.names else getattr(os, name)


DENIED = PermissionError(errno.EACCES, "Permission denied")
FAULTS = {
    "of another user": lambda patch, path: patch.setattr(files, "os", Refusing(DENIED, "open")),
    "sticky": lambda patch, path: patch.setattr(files, "os", Refusing(DENIED, "replace")),
    "full": lambda patch, path: patch.setattr(files, "os", FullDisk()),
    "a plan that cannot be written": lambda patch, path: patch.setattr(
        autoshard.Plan, "dumps", raises(TypeError("keys must be str"))
    ),
    "nested too deep": lambda patch, path: patch.setattr(autoshard.Plan, "dumps", raises(RecursionError())),
    "read errors": lambda patch, path: patch.setattr("autoshard.cache.is_special", raises(OSError("stale handle"))),
}
FOLDERS = ["~nobody-of-this-name/plans", "\0", "/dev/null/plans", "/proc/plans", "x" * 5000]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_cache_that_fails_fails_no_step(fault, tmp_path, monkeypatch):
    FAULTS[fault](monkeypatch, tmp_path)
    with pytest.warns(CacheWarning):
        result = autoshard.autoshard(double, cache=tmp_path, **OPTIONS)(X)
    np.testing.assert_array_equal(result, 2 * X)
    monkeypatch.undo()
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_that_cannot_be(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CacheWarning)
        np.testing.assert_array_equal(autoshard.autoshard(double, cache=folder, **OPTIONS)(X), 2 * X)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names here")
def test_a_pipe_in_the_cache_is_not_waited_for(tmp_path):
    autoshard.plan(double, X, cache=tmp_path, **OPTIONS)
    (path,) = tmp_path.iterdir()
    path.unlink()
    os.mkfifo(path)
    with pytest.warns(CacheWarning, match="no file") as caught:
        autoshard.plan(double, X, cache=tmp_path, **OPTIONS)
    assert len(caught) == 2  # neither read nor written


def test_faults_lose_no_plan(tmp_path):
    """A sample of what `benchmarks/faults.py` injects."""
    found = list(faults.rows(faults.Faults(tmp_path), times=1))
    assert len(found) == 14 and not any(lost for *_, lost in found), found


def test_a_plan_that_is_lost_is_counted(tmp_path):
    def in_place(path, text):
        path.write_text("")
        os.fsync(-1)

    injected = faults.Faults(tmp_path, write=in_place)
    assert injected.killed() and injected.over_the_quota()


def test_errors_that_callers_do_not_wait_for_are_counted(tmp_path, monkeypatch):
    injected = faults.Faults(tmp_path)
    edited = injected.text.replace('"digest"', '"other"')
    assert not injected.ends_in_another_error(edited)
    monkeypatch.setattr(autoshard.Plan, "to_code", lambda plan: 1 / 0)
    assert injected.ends_in_another_error(without_digest(injected.text))
    monkeypatch.setattr(autoshard.cache, "_head", lambda *_: 1 / 0)
    assert injected.with_other_state("a")


def without_digest(text):
    document = json.loads(text)
    del document["digest"]
    return json.dumps(document)
