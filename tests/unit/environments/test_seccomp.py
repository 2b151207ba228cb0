"""Tests of the system call filter for both processor architectures, with a reference interpreter of BPF."""

import pytest
from nemo_rl_cpp.environments.sandbox import kernel
from reference import bpf

ALLOW, KILL, NO_SUCH_CALL = 0x7FFF0000, 0x80000000, 0x00050000 | 38
NOT_SUPPORTED, TRY_AGAIN, DONE = 0x00050000 | 95, 0x00050000 | 11, 0x00050000
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# name -> (x86-64, arm64), from the kernels' tables (asm/unistd_64.h and asm-generic/unistd.h)
FORBIDDEN = {
    "socket": (41, 198), "ptrace": (101, 117), "mount": (165, 40), "unshare": (272, 97), "setns": (308, 268), "bpf": (321, 280),
    "memfd_create": (319, 279), "io_uring_setup": (425, 425), "mbind": (237, 235), "landlock_create_ruleset": (444, 444),
}  # fmt: skip
ALLOWED = {
    "read": (0, 63), "write": (1, 64), "mmap": (9, 222), "execve": (59, 221), "exit_group": (231, 94),
    "openat": (257, 56), "getrandom": (318, 278), "socketpair": (53, 199),
}  # fmt: skip
# sendfile, splice, tee, vmsplice, clone3
MISSING = {"x86_64": {40, 275, 276, 278, 435}, "aarch64": {71, 76, 77, 75, 435}}
# setxattr, lsetxattr, fsetxattr, setxattrat
UNSUPPORTED = {"x86_64": {188, 189, 190, 463}, "aarch64": {5, 6, 7, 463}}
FORKS = {"x86_64": {57, 58}, "aarch64": set()}  # fork, vfork
MMAP, FCNTL, PRCTL, SOCKETPAIR = (dict(zip(MACHINES, pair)) for pair in ((9, 222), (72, 25), (157, 167), (53, 199)))
# (call, arguments, verdict); MAP_SHARED 1, MAP_PRIVATE 2, MAP_SHARED_VALIDATE 3, MAP_ANONYMOUS 0x20; F_DUPFD 0, F_SETLK 6, F_SETPIPE_SZ 1031
BY_ARGUMENT = [
    (MMAP, (0, 4096, 3, 0x21), NOT_SUPPORTED), (MMAP, (0, 4096, 3, 0x23), NOT_SUPPORTED), (MMAP, (0, 4096, 3, 0x22), ALLOW),
    (MMAP, (0, 4096, 1, 0x01), ALLOW), (FCNTL, (3, 1031), KILL), (FCNTL, (3, 6), DONE), (FCNTL, (3, 38), DONE), (FCNTL, (3, 0), ALLOW),
    (FCNTL, (6, 4), ALLOW), (PRCTL, (22,), KILL), (PRCTL, (15,), ALLOW), (SOCKETPAIR, (1,), ALLOW), (SOCKETPAIR, (2,), KILL),
    (SOCKETPAIR, (30,), KILL),
]  # fmt: skip
CLONE = {"x86_64": 56, "aarch64": 220}


@pytest.mark.parametrize("machine", MACHINES)
def test_seccomp_filter_allows_denies_or_kills_each_system_call_as_listed(machine):
    program = kernel.filter_program(machine)

    def verdict(number, *arguments):
        return bpf.run(program, number, MACHINES[machine], arguments)

    column = machine == "aarch64"
    assert FORBIDDEN.items() <= kernel.FORBIDDEN.items()
    for name, pair in ALLOWED.items():
        assert verdict(pair[column]) == ALLOW, name
    numbers = {pair[column] for pair in kernel.FORBIDDEN.values()}
    assert len(numbers) == len(kernel.FORBIDDEN)
    for number in range(600):
        expected = NO_SUCH_CALL if number in MISSING[machine] else ALLOW
        expected = NOT_SUPPORTED if number in UNSUPPORTED[machine] else KILL if number in numbers else expected
        expected = TRY_AGAIN if number in FORKS[machine] or number == CLONE[machine] else expected
        assert verdict(number) == expected, number
    assert verdict(CLONE[machine], 0x003D0F00) == ALLOW  # a thread
    assert verdict(CLONE[machine], 17) == verdict(CLONE[machine], 0x4111) == TRY_AGAIN  # fork, vfork
    for flag in (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        assert verdict(CLONE[machine], flag | 17) == KILL


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("case", BY_ARGUMENT)
def test_seccomp_filter_decides_about_some_system_calls_by_their_arguments(machine, case):
    numbers, arguments, expected = case
    verdict = bpf.run(kernel.filter_program(machine), numbers[machine], MACHINES[machine], arguments)
    assert verdict == expected


@pytest.mark.parametrize("machine", MACHINES)
def test_sandboxed_program_is_killed_for_system_calls_of_other_architectures(machine):
    program = kernel.filter_program(machine)
    i386, arm, other = 0x40000003, 0x40000028, next(MACHINES[name] for name in MACHINES if name != machine)
    for architecture in (i386, arm, other):
        assert bpf.run(program, 0, architecture) == KILL


def test_sandboxed_program_is_killed_for_x32_system_calls():
    assert bpf.run(kernel.filter_program("x86_64"), 0x40000000 | 41, MACHINES["x86_64"]) == KILL
