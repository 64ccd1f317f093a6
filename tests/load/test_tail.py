"""Following a file through what happens to files."""

from __future__ import annotations

import os
import resource

import pytest

from k2tui.errors import K2Error
from k2tui.sources.tail import READ_B, Tail, read_from_end


def drain(tail: Tail) -> bytes:
    out = b""
    while data := tail.poll():
        out += data
    return out


def test_growth_truncation_rotation_and_recreation(tmp_path):
    log = tmp_path / "server.log"
    log.write_bytes(b"one\n")
    with Tail(log) as tail:
        assert drain(tail) == b"one\n"
        with log.open("ab") as fh:
            fh.write(b"two\n")
        assert drain(tail) == b"two\n"
        log.write_bytes(b"x\n")  # copytruncate
        assert drain(tail) == b"x\n"
        log.rename(tmp_path / "server.log.1")
        with (tmp_path / "server.log.1").open("ab") as fh:
            fh.write(b"late\n")  # the writer has not noticed yet
        assert drain(tail) == b"late\n"
        assert tail.is_missing
        log.write_bytes(b"new\n")
        assert drain(tail) == b"new\n"
        assert not tail.is_missing
        log.unlink()
        assert drain(tail) == b""
        log.write_bytes(b"again\n")
        assert drain(tail) == b"again\n"
        assert tail.generation >= 3


def test_waits_for_a_file_that_is_not_there_yet(tmp_path):
    with Tail(tmp_path / "later.log") as tail:
        assert tail.is_missing
        assert tail.poll() == b""
        (tmp_path / "later.log").write_bytes(b"hello\n")
        assert drain(tail) == b"hello\n"


def test_folder_and_no_permission_are_clear_errors(tmp_path):
    with pytest.raises(K2Error, match="is a folder"):
        Tail(tmp_path)
    with pytest.raises(K2Error, match="not a folder"):
        (tmp_path / "f").write_bytes(b"")
        Tail(tmp_path / "f" / "x")
    secret = tmp_path / "secret.log"
    secret.write_bytes(b"x")
    secret.chmod(0)
    if os.geteuid() != 0:
        with pytest.raises(K2Error, match="no permission"):
            Tail(secret)


def test_a_fifo_does_not_block(tmp_path):
    fifo = tmp_path / "pipe"
    os.mkfifo(fifo)
    with Tail(fifo) as tail:
        assert tail.poll() == b""
        fd = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
        os.write(fd, b"line\n")
        assert tail.poll() == b"line\n"
        os.close(fd)


def test_a_gigabyte_without_newline_is_read_in_bounded_pieces(tmp_path):
    log = tmp_path / "hole.log"
    with log.open("wb") as fh:
        fh.truncate(1 << 30)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with Tail(log) as tail:
        for _ in range(12):
            assert len(tail.poll()) <= READ_B
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024
    assert len(read_from_end(log, 1000)) == 1000


def test_read_from_end_begins_at_a_line(tmp_path):
    log = tmp_path / "a.log"
    log.write_bytes(b"".join(b"line %d\n" % n for n in range(1000)))
    data = read_from_end(log, 100)
    assert data.startswith(b"line ") and data.endswith(b"line 999\n") and len(data) <= 100
    with pytest.raises(K2Error, match="no such file"):
        read_from_end(tmp_path / "none", 10)
