"""Files that are replaced as one: after a crash at any moment a reader finds all old ones or all new ones."""

import fcntl
import os

import pytest

from fluidx.files import atomic
from fluidx.files.atomic import MANIFEST, CheckpointError, Elsewhere, place_of, reading, write_atomically, write_in_order, write_together

CALLS = ("replace", "unlink", "fsync", "open")  # of the system, between which a process may end


def text(said):
    return lambda stream: stream.write(said)


def contents(folder, *names):
    """What a reader finds, by the manifest."""
    with reading(str(folder)) as manifest:
        found = {}
        for name in names:
            with open(place_of(str(folder), name, manifest), "rb") as stream:
                found[name] = stream.read()
        return found


def in_a_process_that_dies(job, number):
    """Do a job in a fork of this process that ends before its call of the system with this number: did it end there?"""
    child = os.fork()
    if not child:
        left = [number]

        def dying(call):
            def counted(*args, **kwargs):
                left[0] -= 1
                if left[0] < 0:
                    os._exit(77)
                return call(*args, **kwargs)

            return counted

        for name in CALLS:
            setattr(os, name, dying(getattr(os, name)))
        try:
            job()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 77


# -- one file -------------------------------------------------------------------------------------------------------------------


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path):
    path = tmp_path / "new folder" / "a"
    for said in (b"old", b"new"):
        write_atomically(str(path), text(said))
        assert path.read_bytes() == said and os.listdir(path.parent) == ["a"]


def test_a_write_that_fails_keeps_the_old_file(tmp_path):
    write_atomically(str(tmp_path / "a"), text(b"old"))

    def half(stream):
        stream.write(b"ne")
        raise KeyError("no more")

    with pytest.raises(KeyError):
        write_atomically(str(tmp_path / "a"), half)
    assert (tmp_path / "a").read_bytes() == b"old" and os.listdir(tmp_path) == ["a"]


def test_a_crash_leaves_the_old_file_or_the_new_one_and_the_next_write_removes_the_rest(tmp_path):
    path, seen, number = str(tmp_path / "a"), set(), 0
    while True:
        write_atomically(path, text(b"old"))
        assert os.listdir(tmp_path) == ["a"]
        died = in_a_process_that_dies(lambda: write_atomically(path, text(b"new")), number)
        with open(path, "rb") as stream:
            seen.add((died, stream.read()))
        if not died:
            break
        number += 1
    assert number >= 3 and seen == {(True, b"old"), (True, b"new"), (False, b"new")}


def test_a_file_that_another_writer_writes_is_not_removed(tmp_path):
    with open(tmp_path / f".a.{'0' * 16}.tmp", "xb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        write_atomically(str(tmp_path / "a"), text(b"mine"))
        assert sorted(os.listdir(tmp_path)) == [f".a.{'0' * 16}.tmp", "a"]
    write_atomically(str(tmp_path / "a"), text(b"mine"))  # the other one has ended
    assert os.listdir(tmp_path) == ["a"]


def test_a_path_that_no_system_takes_and_one_that_cannot_be_written(tmp_path):
    with pytest.raises(CheckpointError, match=r"'a\\x00b' has a NUL byte, which is not allowed in a path"):
        write_atomically("a\0b", text(b""))
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"cannot write {tmp_path}/file/a: "):
        write_atomically(str(tmp_path / "file" / "a"), text(b""))


# -- one after the other ----------------------------------------------------------------------------------------------------------


def both(folder, said):
    return {str(folder / name): text(said + name.encode()) for name in "ab"}


def test_a_crash_between_files_in_order_leaves_the_first_new_at_most(tmp_path):
    seen, number = set(), 0
    while True:
        write_in_order(both(tmp_path, b"old "))
        assert sorted(os.listdir(tmp_path)) == ["a", "b"]
        died = in_a_process_that_dies(lambda: write_in_order(both(tmp_path, b"new ")), number)
        seen.add((died, (tmp_path / "a").read_bytes(), (tmp_path / "b").read_bytes()))
        if not died:
            break
        number += 1
    crashed = {(True, b"old a", b"old b"), (True, b"new a", b"old b"), (True, b"new a", b"new b")}
    assert seen == crashed | {(False, b"new a", b"new b")}


def test_all_files_in_order_stay_old_if_one_fails(tmp_path):
    def none(stream):
        stream.write(b"ne")
        raise KeyError("no more")

    write_in_order(both(tmp_path, b"old "))
    with pytest.raises(KeyError):
        write_in_order({**both(tmp_path, b"new "), str(tmp_path / "b"): none})
    (tmp_path / "c").mkdir()
    with pytest.raises(CheckpointError, match=f"cannot write {tmp_path}/c: Is a directory"):
        write_in_order({**both(tmp_path, b"new "), str(tmp_path / "c"): text(b"")})
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "c"] and (tmp_path / "a").read_bytes() == b"old a"


# -- several together -----------------------------------------------------------------------------------------------------------

OLD, NEW = {"a": b"old a", "b": b"old b"}, {"a": b"new a", "b": b"new b"}


def write(folder, files, **more):
    write_together(str(folder), {name: text(said) for name, said in files.items()}, **more)


def test_a_crash_leaves_all_old_files_or_all_new_ones(tmp_path):
    """Where it dies differs from run to run by the threads that write; every place is met."""
    seen, number = set(), 0
    while True:
        folder = tmp_path / str(number)
        write(folder, OLD)
        died = in_a_process_that_dies(lambda folder=folder: write(folder, NEW), number)
        found = contents(folder, "a", "b")
        assert found in (OLD, NEW)
        seen.add((died, found["a"]))
        write(folder, {"c": b"c"})  # completes or undoes what was left
        assert sorted(os.listdir(folder)) == [MANIFEST, "a", "b", "c"] and contents(folder, "a", "b") == found
        if not died:
            break
        number += 1
    assert seen == {(True, b"old a"), (True, b"new a"), (False, b"new a")}


def test_earlier_files_stay_unless_the_new_ones_are_alone(tmp_path):
    write(tmp_path, OLD, about={"step": 1})
    write(tmp_path, {"b": b"new b"})
    assert contents(tmp_path, "a", "b") == {"a": b"old a", "b": b"new b"} and atomic.manifest_of(str(tmp_path)).about["step"] == 1
    write(tmp_path, {"c": b"c"}, alone=True)
    assert sorted(os.listdir(tmp_path)) == [MANIFEST, "c"] and "step" not in atomic.manifest_of(str(tmp_path)).about


def test_of_files_that_fail_none_is_left(tmp_path):
    write(tmp_path, OLD)

    def full(stream):
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match="cannot write .*: No space left on device"):
        write_together(str(tmp_path), {"a": text(b"new a"), "b": full})
    assert contents(tmp_path, "a", "b") == OLD and sorted(os.listdir(tmp_path)) == [MANIFEST, "a", "b"]


@pytest.mark.parametrize("damage, said", [
    (b"old", "it has 3 bytes, expected 5"),
    (b"old x", "its checksum is another one"),
])  # fmt: skip
def test_a_file_that_is_not_what_was_saved_is_refused(tmp_path, damage, said):
    write(tmp_path, OLD)
    (tmp_path / "a").write_bytes(damage)
    with pytest.raises(CheckpointError, match=f"{tmp_path}/a is not what was saved: {said}; it is damaged, or was put there"):
        contents(tmp_path, "a")


def test_a_manifest_that_is_damaged_or_of_a_later_version_is_refused(tmp_path):
    write(tmp_path, OLD)
    manifest = tmp_path / MANIFEST
    whole = manifest.read_text()
    for found, said in (
        (whole[:-5], f"{MANIFEST} is damaged: "),
        (whole.replace('"bytes": 5', '"bytes": 6', 1), f"{MANIFEST} is damaged: it does not have the checksum that was written with it"),
        ("[]", f"{MANIFEST} is not a manifest of fluidx"),
        (whole.replace('"version": 1', '"version": 2'), "has version 2, and this fluidx reads up to 1; read it with the one that wrote it"),
    ):
        manifest.write_text(found)
        with pytest.raises(CheckpointError, match=said):
            contents(tmp_path, "a")


def test_a_file_of_another_process_is_written_here_if_that_process_ends(tmp_path):
    closed = []

    def gone(path):
        with open(path, "xb") as stream:
            stream.write(b"ha")  # and it ends
        raise EOFError

    def there(path):
        return atomic.written(path, text(b"theirs"))

    asked = {"a": gone, "b": there}
    write_together(str(tmp_path), {n: Elsewhere(ask, text(b"mine"), lambda n=n: closed.append(n)) for n, ask in asked.items()})
    assert contents(tmp_path, "a", "b") == {"a": b"mine", "b": b"theirs"} and sorted(closed) == ["a", "b"]
