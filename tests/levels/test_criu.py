"""The CRIU level where it may not, cannot, or has to do without process ids of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from chains_of_programs import LocalChain, environment, write_program

from hpc_ckpt import events, lease
from hpc_ckpt.errors import EXIT_COMPLETE, EXIT_FAILED, EXIT_SAVED
from hpc_ckpt.events import EventLog
from hpc_ckpt.levels import criu as room
from hpc_ckpt.levels import openfiles, rollback
from hpc_ckpt.levels.base import NotNow, SaveFailed, Work
from hpc_ckpt.levels.criu import Criu
from hpc_ckpt.levels.criu_tool import Tool, find, kernel_version
from hpc_ckpt.levels.restarts import Restarts
from hpc_ckpt.levels.sockets import Tcp
from hpc_ckpt.levels.stewardship import Steward
from hpc_ckpt.making import prepare
from hpc_ckpt.policy.interval import EveryTime
from hpc_ckpt.rundir import RunDir
from hpc_ckpt.settings import Settings

WITHOUT = ["setpriv", "--bounding-set=-sys_admin,-checkpoint_restore"]
"""Root without what CRIU needs: a real refusal, and the files can still be read."""
REFUSES_TO_DUMP = '#!/bin/bash\n[ "$1" = dump ] && exit 1\nexec {criu}/criu "$@"\n'


@pytest.fixture
def chain(tmp_path: Path, criu: Path) -> Iterator[LocalChain]:
    running = LocalChain(tmp_path, criu)
    yield running
    running.close()


def test_criu_asked_for_by_name_and_not_permitted_is_refused(chain: LocalChain) -> None:
    command = write_program(chain.place, "c", 5)
    assert 2 == chain.run(command, link_s=60, before=WITHOUT), chain.story()
    said = " ".join((chain.place / "said").read_text().split())
    assert "level: criu: not usable" in said and "CAP_CHECKPOINT_RESTORE" in said


def test_criu_not_permitted_is_said_at_the_submission(chain: LocalChain) -> None:
    command = write_program(chain.place, "c", 5)
    assert 0 == chain.run(command, link_s=60, level="auto", before=WITHOUT), chain.story()
    said = (chain.place / "said").read_text()
    assert "criu: CRIU needs privileges" in said
    assert "this program is not saved at all" in " ".join(said.split())


def test_a_criu_whose_first_save_fails_gives_way(tmp_path: Path, criu: Path) -> None:
    """The program goes on to the end of the link; the next link does without."""
    (tmp_path / "bin").mkdir()
    wrapper = tmp_path / "bin" / "criu"
    wrapper.write_text(REFUSES_TO_DUMP.format(criu=criu))
    wrapper.chmod(0o755)
    chain = LocalChain(tmp_path, wrapper.parent)
    try:
        chain.start(write_program(tmp_path, "c", 120), link_s=60, save_s=0.5)
        chain.wait_for(lambda: chain.rundir.levels_file.exists() and "failed" in chain.levels())
        chain.rundir.give_notice(1, "test")
        assert 0 == chain.finish(), chain.story()
    finally:
        chain.close()
    assert {"1": "criu", "2": "plain"} == chain.levels()["chosen"]
    assert "criu dump: exit code 1" in chain.levels()["failed"]["criu"]


FULL = """#!/bin/bash
if [ "$1" = dump ] && [ ! -e {place}/room ]; then
    while [ $# -gt 0 ]; do
        case "$1" in --work-dir) place=$2 ;; --log-file) log=$2 ;; esac
        shift
    done
    echo "(00.1) Error (criu/image.c:1): Can't write: No space left on device" >"$place/$log"
    exit 1
fi
exec {criu}/criu "$@"
"""


def test_a_criu_without_space_is_told_tried_again_and_kept(tmp_path: Path, criu: Path) -> None:
    (tmp_path / "bin").mkdir()
    wrapper = tmp_path / "bin" / "criu"
    wrapper.write_text(FULL.format(criu=criu, place=tmp_path))
    wrapper.chmod(0o755)
    chain = LocalChain(tmp_path, wrapper.parent)
    try:
        chain.start(write_program(tmp_path, "c", 160), link_s=60, save_s=0.5)
        chain.wait_for(lambda: len(chain.events("save.failed")) >= 2)
        (tmp_path / "room").touch()
        chain.wait_for(lambda: chain.events("save.committed"))
        chain.rundir.give_notice(1, "test")
        assert 0 == chain.finish(), chain.story()
    finally:
        chain.close()
    assert {"1": "criu", "2": "criu"} == chain.levels()["chosen"]
    assert "failed" not in chain.levels()
    assert "No space left on device" in chain.rundir.log_file(1).read_text()


TCP_PY = """
import socket, time
server = socket.create_server(("127.0.0.1", 0))
here = socket.create_connection(server.getsockname())
there, _ = server.accept()
with open("result", "w") as file:
    for i in range(40):
        here.sendall(b"%03d" % i)
        file.write(there.recv(3).decode() + "\\n")
        file.flush()
        time.sleep(0.05)
"""


def test_connections_of_a_program_with_itself_go_on(chain: LocalChain, criu: Path) -> None:
    """Or, where this CRIU cannot do so on this kernel, it says so and gives way."""
    work = Work(argv=("true",), cwd=chain.place, environ=environment(criu))
    tool = find({"path": str(criu / "criu")}, work)
    assert isinstance(tool, Tool)
    refused = tool.refuses(Tcp.WITHIN, kernel_version())
    (chain.place / "tcp.py").write_text(TCP_PY)
    chain.start([sys.executable, "tcp.py"], link_s=60)
    result = chain.place / "result"
    chain.wait_for(lambda: result.exists() and result.read_text().count("\n") > 9)
    chain.rundir.give_notice(1, "test")
    assert 0 == chain.finish(), chain.story()
    assert [f"{i:03}" for i in range(40)] == result.read_text().split()
    assert ("plain" if refused else "criu") == chain.levels()["chosen"]["2"]
    assert refused is None or refused in chain.levels()["failed"]["criu"]


class Links:
    """Links of one chain in this process, without process ids of its own for the program."""

    def __init__(self, place: Path, criu: Path) -> None:
        self.place = place
        self.rundir = RunDir(place / "run")
        prepare(self.rundir)
        self.restarts = Restarts(self.rundir)
        self._environment = environment(criu)
        self.said = ""

    def run(self, command: list[str], *, notice: bool = False) -> int:
        held = lease.acquire_standalone(self.rundir)
        held.release()
        work = Work(
            argv=tuple(command), cwd=self.place, environ=self._environment, kept=self.rundir.logs
        )
        log = EventLog(self.rundir.events_file(held.generation, "here"))
        policy = Settings(policy=EveryTime(600))
        steward = Steward(self.rundir, held.generation, work, [Criu()], policy, log)
        if notice:
            give = threading.Timer(1.0, lambda: self.rundir.give_notice(held.generation, "test"))
            give.start()
        try:
            return steward.run()
        finally:
            log.close()
            outcome = self.rundir.outcome(held.generation)
            self.said = outcome.reason if outcome else ""


@pytest.fixture
def links(tmp_path: Path, criu: Path, monkeypatch: pytest.MonkeyPatch) -> Links:
    monkeypatch.setattr(room, "may_make_namespaces", lambda: False)
    return Links(tmp_path, criu)


def facts(links: Links) -> dict[str, object]:
    restart = links.restarts.open(links.restarts.keys()[-1])
    return dict(restart.facts)


def test_without_process_ids_of_its_own_the_same_are_used_again(links: Links) -> None:
    command = write_program(links.place, "c", 60)
    assert EXIT_SAVED == links.run(command, notice=True)
    assert facts(links)["namespace"] is False
    assert EXIT_COMPLETE == links.run(command)
    assert 60 == (links.place / "result").read_text().count("\n")


def test_a_process_id_that_is_taken_is_named(links: Links) -> None:
    command = write_program(links.place, "c", 60)
    assert EXIT_SAVED == links.run(command, notice=True)
    wanted = int(str(facts(links)["pid"]))
    with taken(wanted):
        assert EXIT_FAILED == links.run(command)
    assert f"process id {wanted} is taken by another process on this node" in links.said


def test_with_a_process_id_taken_every_restart_and_file_stays_for_the_next_link(
    links: Links,
) -> None:
    command = write_program(links.place, "c", 120)
    assert EXIT_SAVED == links.run(command, notice=True)
    assert EXIT_SAVED == links.run(command, notice=True)
    result = links.place / "result"
    with result.open("a") as stream:
        stream.write("of a link that was killed\n")
    before = result.read_bytes()
    with taken(int(str(facts(links)["pid"]))):
        assert EXIT_FAILED == links.run(command)
    assert before == result.read_bytes()
    assert (1, 2) == (links.said.count("is taken by another"), len(links.restarts.keys()))
    assert EXIT_COMPLETE == links.run(command)
    assert 120 == result.read_text().count("\n")
    assert not (links.rundir.logs / "criu-taken-away").exists()


def test_what_a_killed_link_took_away_is_put_back_first(links: Links) -> None:
    """Cut to the size of an older restart, and killed before that ran."""
    command = write_program(links.place, "c", 120)
    for _ in range(2):
        assert EXIT_SAVED == links.run(command, notice=True)
    older = links.restarts.open(links.restarts.keys()[0]).path
    rollback.roll_back(older, rollback.read(older), links.rundir.logs / "criu-taken-away")
    assert EXIT_COMPLETE == links.run(command)
    told = events.read(links.rundir.events_file(3, "here"))
    restored = [one["checkpoint"] for one in told if one["event"] == "restored"]
    assert [links.restarts.keys()[1].directory_name] == restored
    assert 120 == (links.place / "result").read_text().count("\n")


@pytest.mark.skipif(os.geteuid() != 0, reason="a small file system can only be mounted by root")
def test_a_disk_that_is_really_full_is_no_reason_to_give_criu_up(links: Links) -> None:
    command = write_program(links.place, "c", 80)
    small = links.restarts.place
    small.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", small], check=True)
    try:
        assert EXIT_SAVED == links.run(command, notice=True)
        assert "nothing could be saved: criu dump" in links.said
    finally:
        subprocess.run(["umount", small], check=True)
    assert EXIT_SAVED == links.run(command, notice=True)
    assert 1 == len(links.restarts.keys())
    assert EXIT_COMPLETE == links.run(command)


class taken:
    """A process with that id."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def __enter__(self) -> None:
        for _ in range(50):
            Path("/proc/sys/kernel/ns_last_pid").write_text(str(self._pid - 1))
            self._child = subprocess.Popen(["sleep", "100"])
            if self._child.pid == self._pid:
                return
            self.__exit__()
        raise RuntimeError(f"could not get the process id {self._pid}")

    def __exit__(self, *_: object) -> None:
        self._child.send_signal(signal.SIGKILL)
        self._child.wait()


def test_what_was_saved_with_ids_of_its_own_needs_them(
    links: Links, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said, and not tried: the ids of a name space are those of others outside of it."""
    command = write_program(links.place, "c", 1000)
    monkeypatch.setattr(room, "may_make_namespaces", lambda: True)
    assert EXIT_SAVED == links.run(command, notice=True)
    assert facts(links)["namespace"] is True
    monkeypatch.setattr(room, "may_make_namespaces", lambda: False)
    assert EXIT_FAILED == links.run(command)
    outcome = links.rundir.outcome(2)
    assert outcome is not None and "process ids of its own" in outcome.reason
    assert "failed" not in links.rundir.levels_file.read_text()  # another node may give them


@pytest.mark.parametrize("own_ids", [True, False])
def test_a_helper_that_has_lost_its_parent_is_named_and_nothing_is_saved(
    links: Links, monkeypatch: pytest.MonkeyPatch, own_ids: bool
) -> None:
    """It runs beside the program, not below it: a restart would be without it, silently."""
    monkeypatch.setattr(room, "may_make_namespaces", lambda: own_ids)
    monkeypatch.setattr(room, "BESIDE_S", 0.5)
    (program, *rest) = write_program(links.place, "c", 1000)
    script = f"(sleep 1000 &); exec {program} {' '.join(rest)}"
    assert EXIT_SAVED == links.run(["bash", "-c", script], notice=True)
    assert [] == links.restarts.keys()
    assert "nothing could be saved" in links.said
    failed = json.loads(links.rundir.levels_file.read_text())["failed"]["criu"]
    assert re.search(r"out of CRIU's reach: sleep \(\d+\); have the program wait", failed)


@pytest.mark.parametrize("own_ids", [True, False])
def test_a_helper_that_is_about_to_end_is_waited_for(
    links: Links, monkeypatch: pytest.MonkeyPatch, own_ids: bool
) -> None:
    monkeypatch.setattr(room, "may_make_namespaces", lambda: own_ids)
    (program, *rest) = write_program(links.place, "c", 1000)
    script = f"(sleep 3 &); {program} {' '.join(rest)} & wait"
    assert EXIT_SAVED == links.run(["bash", "-c", script], notice=True)
    assert 1 == len(links.restarts.keys())


def test_a_file_written_in_place_is_put_back(links: Links) -> None:
    """A table that is overwritten at its beginning: its size says nothing."""
    program = links.place / "table.py"
    program.write_text(
        "import time\n"
        "with open('table', 'w+') as file:\n"
        "    for i in range(100, 140):\n"
        "        file.seek(0); file.write(str(i)); file.flush(); time.sleep(0.05)\n"
        "        file.seek(0); assert file.read() == str(i)\n"
    )
    command = [sys.executable, program.name]
    assert EXIT_SAVED == links.run(command, notice=True)
    (links.place / "table").write_text("???")
    assert EXIT_COMPLETE == links.run(command)
    assert "139" == (links.place / "table").read_text()


def test_nothing_of_it_stays_in_the_temporary_directory(
    links: Links, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    links.run(write_program(links.place, "c", 3))
    assert [] == list((tmp_path / "tmp").iterdir())


@pytest.mark.parametrize(
    ("said", "kind"),
    [(openfiles.TOO_SLOW, NotNow), (openfiles.TOO_LARGE, SaveFailed), ("full", SaveFailed)],
)
def test_files_in_place_that_take_too_long_to_copy_say_nothing_against_criu(
    tmp_path: Path, said: str, kind: type[Exception]
) -> None:
    """The next save may have more time; a file that is too large stays so."""
    (tmp_path / "dump.said").write_text(f"hpc-ckpt:  /data/table: {said}\n")
    assert kind is type(room._refused(tmp_path / "dump.log", 1))


def test_copies_of_files_in_place_have_the_time_that_digests_do_not_need() -> None:
    """They come last: the images are written by then. At least half of it."""
    end = time.monotonic() + 1000
    assert end - 10 == room._copied_by(end, int(10 * room.LEAD_BYTES_A_S))
    assert end - room.LEAST_RESERVE_S == room._copied_by(end, 10**6)  # CRIU has to break off
    assert 490 < end - room._copied_by(end, 2**60) <= 500
