"""Connects two ranks in two network namespaces, which act as two machines, and then cuts the link between them.

    python tests/tools/network_namespaces.py

Creates two namespaces joined by a veth pair, runs a rank in each, lets the ranks add a number, takes the link down, and
tests whether both ranks report this within their deadline. Exit status: 0 if both do, 1 if not, 3 if this machine does
not permit namespaces (the reason is printed)."""

import argparse
import os
import subprocess
import sys
import time

DEADLINE = 10.0  # of one message between the ranks, in seconds
NAMES = (f"nrl-a-{os.getpid()}", f"nrl-b-{os.getpid()}")
ADDRESSES = ("10.231.77.1", "10.231.77.2")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=20, capture_output=True, text=True)


def make() -> None:
    """Create the namespaces and the link. Raise CalledProcessError or OSError if that is not permitted."""
    for name in NAMES:
        ip("netns", "add", name)
    ip("link", "add", "nrl0", "netns", NAMES[0], "type", "veth", "peer", "name", "nrl0", "netns", NAMES[1])
    for name, address in zip(NAMES, ADDRESSES):
        ip("-n", name, "address", "add", f"{address}/24", "dev", "nrl0")
        ip("-n", name, "link", "set", "nrl0", "up")
        ip("-n", name, "link", "set", "lo", "up")


def remove() -> None:
    for name in NAMES:
        subprocess.run(["ip", "netns", "delete", name], timeout=20, capture_output=True)


def member(rank: int, port: int) -> None:
    """Run one rank. It prints what it does, line by line, and waits for a line of input before each sum."""
    from nemo_rl_cpp.distributed.launch import rendezvous_store
    from nemo_rl_cpp.distributed.ranks import connect

    store = rendezvous_store(ADDRESSES[0], 60.0) if rank == 0 else None
    print(store.port if store is not None else port, flush=True)
    sys.stdin.readline()  # wait until both ranks have finished loading
    ranks = connect(rank, 2, ADDRESSES[0], store.port if store is not None else port, DEADLINE, ADDRESSES[rank])
    print(f"sum {ranks.sum(rank + 1.0)}", flush=True)
    sys.stdin.readline()
    began = time.monotonic()
    try:
        print(f"sum {ranks.sum(rank + 1.0)}", flush=True)
    except Exception as error:
        print(f"{type(error).__name__} after {time.monotonic() - began:.1f} s: {error}", flush=True)
    os._exit(0)  # no shutdown protocol, because the other rank would not answer


def start(rank: int, port: int = 0) -> subprocess.Popen:
    words = ["ip", "netns", "exec", NAMES[rank], sys.executable, __file__, "--member", str(rank), "--port", str(port)]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def go_on(members: list[subprocess.Popen]) -> None:
    for each in members:
        each.stdin.write("\n")
        each.stdin.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--member", type=int)
    parser.add_argument("--port", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.member is not None:
        member(arguments.member, arguments.port)
    members: list[subprocess.Popen] = []
    try:
        try:
            make()
        except (OSError, subprocess.SubprocessError) as error:
            print(f"no namespaces here: {getattr(error, 'stderr', None) or error}".strip())
            return 3
        members.append(start(0))
        port = int(members[0].stdout.readline())
        members.append(start(1, port))
        members[1].stdout.readline()
        go_on(members)
        sums = [each.stdout.readline().strip() for each in members]
        print(f"with the cable: {sums}")
        ip("-n", NAMES[0], "link", "set", "nrl0", "down")
        go_on(members)
        ends = [each.communicate(timeout=10 * DEADLINE)[0].strip() for each in members]
        print("without it:", *ends, sep="\n  ")
        named = [end.startswith(("TimedOut after", "PeerLost after")) and "rank" in end for end in ends]
        return 0 if sums == ["sum 3.0", "sum 3.0"] and all(named) else 1
    finally:
        for each in members:
            each.kill(), each.wait(20)
        remove()


if __name__ == "__main__":
    sys.exit(main())
