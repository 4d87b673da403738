"""A stand-in for DMTCP's programs: no checkpoint is made, no process is brought back.

It imitates what was recorded of the real ones: command lines, port file, answers, exit codes,
the files of a checkpoint. A "restart" starts the command anew. $STAND_IN says what goes wrong.
"""

import json
import os
import selectors
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

MODE = os.environ.get("STAND_IN", "")
VERSION = os.environ.get("STAND_IN_VERSION", "5.0")
PROGRAMS = ("dmtcp_launch", "dmtcp_restart", "dmtcp_command", "dmtcp_coordinator", "mtcp_restart")
MAGIC = b"DMTCP_CHECKPOINT_IMAGE_v4.0\n"
KILLING = "NOTE at dmtcp_coordinator.cpp:383: killing all connected peers and quitting ..."
SLOW_S = float(os.environ.get("STAND_IN_SLOW_S", "4"))
BUSY = "Error, computation not in running state.  Either a checkpoint is\n currently happening"


def install(place: Path) -> Path:
    """A bin directory of them."""
    place.mkdir(parents=True)
    for name in PROGRAMS:
        path = place / name
        path.write_text(f'#!/bin/sh\nexec {sys.executable} -I {__file__} {name} "$@"\n')
        path.chmod(0o755)
    return place


def value(words: list[str], option: str) -> str:
    return words[words.index(option) + 1]


def note(program: str, words: list[str]) -> None:
    if "STAND_IN_NOTES" in os.environ:
        with Path(os.environ["STAND_IN_NOTES"]).open("a") as stream:
            stream.write(json.dumps([program, *words]) + "\n")


# ── the coordinator ───────────────────────────────────────────────────────────────────────
class Coordinator:
    def __init__(self, words: list[str]) -> None:
        self.port_file = Path(value(words, "--port-file"))
        self.clients: dict[socket.socket, dict[str, Any]] = {}
        self.server = socket.create_server(("127.0.0.1", 0))
        self.port_file.write_text(str(self.server.getsockname()[1]))
        self.asked = 0
        self.writer = 0

    def serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self.server, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self.server:
                        self.accept(selector)
                    else:
                        selector.unregister(key.fileobj)
                        del self.clients[key.fileobj]  # type: ignore[arg-type]
                        if not self.clients:
                            print("NOTE: last client exited, shutting down..")
                            self.leave()

    def accept(self, selector: selectors.BaseSelector) -> None:
        connection, _ = self.server.accept()
        told = json.loads(connection.makefile().readline())
        if told["do"] == "join":
            print("NOTE: Worker connected: progname=x", flush=True)
            self.clients[connection] = told
            selector.register(connection, selectors.EVENT_READ)
            return
        if told["do"] == "-q":
            print(KILLING, flush=True)  # before it does, as the real one
        if MODE == "slow" and told["do"] == "-bc" and not self.is_writing():
            self.write_slowly(connection)
        else:
            connection.sendall(json.dumps(self.answer(told["do"])).encode() + b"\n")
        connection.close()
        if told["do"] == "-q":
            self.leave()

    def answer(self, word: str) -> list[Any]:
        if word == "-s":
            running = "yes" if self.clients and not self.is_writing() else "no"
            return [0, f"Status...\n  NUM_PEERS={len(self.clients)}\n  RUNNING={running}\n", ""]
        if word == "-l":
            lines = [f"1, x[40000:{pid}]@here, 1-40000-1, RUNNING" for pid in self.pids()]
            return [0, "Client List:\n" + "\n".join(lines) + "\n", ""]
        if word == "-bc":
            return self.checkpoint()
        if word == "-kc":
            self.checkpoint()
        if MODE == "quit":  # its child is ended by it, and by nobody else before
            for client in self.clients.values():
                os.kill(client["pid"], signal.SIGTERM)
            return [0, "", ""]
        for pid in self.pids():
            os.kill(pid, signal.SIGKILL)
        return [0, "", ""]

    def pids(self) -> list[int]:
        found = [client["pid"] for client in self.clients.values()]
        if MODE != "stranger":
            found += [pid for pid, parent in children().items() if parent in found]
        return found

    def checkpoint(self) -> list[Any]:
        self.asked += 1
        if MODE == "busy" and self.asked < 3:
            return [2, "", BUSY]
        if self.is_writing():
            return [2, "", BUSY]
        if MODE == "hangs":
            time.sleep(1000)
        if MODE == "answers-early" and os.fork() != 0:
            return [0, "", ""]  # as 4.1 does; a child writes the images meanwhile
        if MODE == "answers-early":
            self.write_late()
        for client in self.clients.values():
            if MODE == "checkpoint-kills":
                os.kill(client["pid"], signal.SIGTERM)
                return [99, "", "ASSERT at coordinatorapi.cpp: coordinator closed the connection"]
            place = Path(client["images"])
            name = f"ckpt_x_1-{client['pid']}-1"
            (place / f"{name}.dmtcp.temp").write_bytes(MAGIC + json.dumps(client["argv"]).encode())
            if MODE == "still" or (MODE == "still-later" and self.asked > 1):
                time.sleep(0.5)  # the program, which would stand still, runs on
            (place / f"{name}.dmtcp.temp").rename(place / f"{name}.dmtcp")
            (place / f"{name}_files").mkdir(exist_ok=True)
            (place / f"{name}_files" / "gconv-modules.cache_0").write_text("x")
        return [0, "", ""]

    def write_late(self) -> None:
        for client in self.clients.values():
            image = Path(client["images"]) / f"ckpt_x_1-{client['pid']}-1.dmtcp"
            draft = image.with_suffix(".dmtcp.temp")
            draft.write_bytes(MAGIC + json.dumps(client["argv"]).encode())
            time.sleep(0.5)
            draft.rename(image)
        os._exit(0)

    def is_writing(self) -> bool:
        if self.writer != 0 and os.waitpid(self.writer, os.WNOHANG)[0] != 0:
            self.writer = 0
        return self.writer != 0

    def write_slowly(self, connection: socket.socket) -> None:
        """In a child, which answers when it is over. One that finds its files gone asserts."""
        self.writer = os.fork()
        if self.writer != 0:
            return
        for client in self.clients.values():
            image = Path(client["images"]) / f"ckpt_x_1-{client['pid']}-1.dmtcp"
            draft = image.with_suffix(".dmtcp.temp")
            draft.write_bytes(MAGIC + json.dumps(client["argv"]).encode())
            time.sleep(SLOW_S)
            try:
                draft.rename(image)
            except OSError:
                os.kill(client["pid"], signal.SIGTERM)
        connection.sendall(json.dumps([0, "", ""]).encode() + b"\n")
        os._exit(0)

    def leave(self) -> None:
        print(KILLING, flush=True)
        self.port_file.unlink(missing_ok=True)
        os._exit(0)


def children() -> dict[int, int]:
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            found[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    return found


# ── the others ────────────────────────────────────────────────────────────────────────────
def say(port: str, told: dict[str, Any]) -> socket.socket:
    try:
        connection = socket.create_connection(("127.0.0.1", int(port)), timeout=60)
    except OSError:
        print("Coordinator not found. Please check port and host.", file=sys.stderr)
        sys.exit(2 if told["do"] != "join" else 99)
    connection.sendall(json.dumps(told).encode() + b"\n")
    return connection


def command(words: list[str]) -> None:
    connection = say(value(words, "-p"), {"do": words[-1]})
    line = connection.makefile().readline()
    code, out, error = json.loads(line) if line else (99, "", "ASSERT")
    print(out, end="")
    print(error, file=sys.stderr, end="")
    sys.exit(code)


def become(words: list[str], images: str, argv: list[str]) -> None:
    """The connection stays open in the program: its end is seen."""
    told = {"do": "join", "pid": os.getpid(), "images": images, "argv": argv}
    connection = say(value(words, "-p"), told)
    os.set_inheritable(connection.fileno(), True)
    if MODE in ("quit", "checkpoint-kills", "slow"):
        child = os.spawnvp(os.P_NOWAIT, argv[0], argv)
        code = 0 if MODE == "quit" else 99

        def end(*_: object) -> None:
            os.kill(child, signal.SIGKILL)
            os._exit(code)

        signal.signal(signal.SIGTERM, end)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    os.execvp(argv[0], argv)


def launch(words: list[str]) -> None:
    if MODE == "launch-99":
        print("ASSERT at plugin/file/fileconnlist.cpp:771: false: path=vda", file=sys.stderr)
        sys.exit(99)
    if MODE == "launch-crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    if MODE == "launch-slow":
        time.sleep(3)
    if MODE == "launch-never":
        time.sleep(1000)
    images = value(words, "--ckptdir")
    last = next((w for w in ("--modify-env", "--quiet") if w in words), images)
    become(words, images, words[words.index(last) + 1 :])


def restart(words: list[str]) -> None:
    if MODE == "restart-spins":
        say(value(words, "-p"), {"do": "-s"})
        while True:
            pass
    if MODE == "restart-99":
        sys.exit(99)
    image = Path(words[-1])
    become(words, str(image.parent), json.loads(image.read_bytes()[len(MAGIC) :]))


def main() -> None:
    program, words = sys.argv[1], sys.argv[2:]
    if words == ["--version"]:
        print(f"{program} (DMTCP) {VERSION}\nLicense LGPLv3+: GNU LGPL")
        return
    note(program, words)
    if program == "dmtcp_coordinator":
        if MODE == "no-port":
            sys.exit("ASSERT: no port")
        Coordinator(words).serve()
    {"dmtcp_command": command, "dmtcp_launch": launch, "dmtcp_restart": restart}[program](words)


if __name__ == "__main__":
    main()
