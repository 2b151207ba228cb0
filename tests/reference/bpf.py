"""An interpreter of seccomp filters, with the BPF instructions that filters use."""

import struct


def run(program: bytes, number: int, architecture: int, arguments: tuple[int, ...] = ()) -> int:
    """Return the filter's verdict on a system call. Raise AssertionError or KeyError for a jump out of the program or
    an unknown instruction."""
    data = struct.pack("=iIQ6Q", number, architecture, 0, *(*arguments, 0, 0, 0, 0, 0, 0)[:6])
    code = list(struct.iter_unpack("=HBBI", program))
    accumulator, at = 0, 0
    while True:
        operation, if_true, if_false, value = code[at]
        at += 1
        if operation == 0x06:  # return
            return value
        if operation == 0x20:  # load 32 bits
            accumulator = struct.unpack_from("=I", data, value)[0]
            continue
        tests = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}
        at += if_true if tests[operation] else if_false
        assert at < len(code)
