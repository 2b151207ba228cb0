"""The system call filter, on both machines, by a reference interpreter; what it does in a kernel is test_sandbox's business."""

import pytest
from nemo_rl_cpp.environments.sandbox import seccomp
from reference import bpf

ALLOW, KILL, NOTIFY, NO_SUCH_CALL = 0x7FFF0000, 0x80000000, 0x7FC00000, 0x00050000 | 38
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# from the kernels' tables (asm/unistd_64.h and asm-generic/unistd.h)
FORBIDDEN = {
    "x86_64": {"socket": 41, "ptrace": 101, "mount": 165, "unshare": 272, "setns": 308, "bpf": 321, "memfd_create": 319, "io_uring_setup": 425},
    "aarch64": {"socket": 198, "ptrace": 117, "mount": 40, "unshare": 97, "setns": 268, "bpf": 280, "memfd_create": 279, "io_uring_setup": 425},
}
ALLOWED = {
    "x86_64": {"read": 0, "write": 1, "mmap": 9, "execve": 59, "exit_group": 231, "openat": 257, "getrandom": 318, "socketpair": 53},
    "aarch64": {"read": 63, "write": 64, "mmap": 222, "execve": 221, "exit_group": 94, "openat": 56, "getrandom": 278, "socketpair": 199},
}
CLONE = {"x86_64": 56, "aarch64": 220}


@pytest.mark.parametrize("machine", MACHINES)
def test_verdicts(machine):
    program = seccomp.filter_program(machine)

    def verdict(number, *arguments):
        return bpf.run(program, number, MACHINES[machine], arguments)

    for name, number in FORBIDDEN[machine].items():
        assert verdict(number) == NOTIFY, name
        assert seccomp.FORBIDDEN[name][machine == "aarch64"] == number
    for name, number in ALLOWED[machine].items():
        assert verdict(number) == ALLOW, name
    numbers = {pair[machine == "aarch64"] for pair in seccomp.FORBIDDEN.values()}
    assert len(numbers) == len(seccomp.FORBIDDEN)
    for number in range(600):
        expected = NOTIFY if number in numbers else NO_SUCH_CALL if number == 435 else ALLOW
        assert verdict(number) == expected, number
    assert verdict(CLONE[machine], 0x003D0F00) == ALLOW  # a thread
    assert verdict(CLONE[machine], 17) == ALLOW  # fork
    for flag in (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        assert verdict(CLONE[machine], flag | 17) == NOTIFY


@pytest.mark.parametrize("machine", MACHINES)
def test_other_architectures_are_killed(machine):
    program = seccomp.filter_program(machine)
    for architecture in (0x40000003, 0x40000028, *(MACHINES[name] for name in MACHINES if name != machine)):  # i386, arm, the other
        assert bpf.run(program, 0, architecture) == KILL


def test_x32_numbers_are_killed():
    assert bpf.run(seccomp.filter_program("x86_64"), 0x40000000 | 41, MACHINES["x86_64"]) == KILL
