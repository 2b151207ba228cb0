"""Corrects Bochs 3.0 so that Linux grants AMX to programs in it, for .ci/amx: python .ci/amx_bochs.py FOLDER_OF_ITS_SOURCES

Linux wants a register that can switch tiles off (XFD), so that a program asks before it uses them, and saves tiles when threads change.
"""

import re
import sys
from pathlib import Path

# file, what stands there (a regular expression), what takes its place
CORRECTIONS = [
    # XFD: announced, kept, and heeded
    ("cpuid.cc", r"leaf->eax \|= \(1<<3\);", r"\g<0> if (is_cpu_extension_supported(BX_ISA_AMX)) leaf->eax |= (1<<4);"),
    (
        "cpuid.cc",
        r"leaf->ecx = \(cpu->ia32_xss_suppmask & \(1 << subfunction\)\) != 0;",
        r"\g<0> if (subfunction == 18) leaf->ecx |= 4;",
    ),
    ("cpu.h", r"class BOCHSAPI BX_CPU_C\b", r"extern Bit64u xfd, xfd_error, tile_products;\n\g<0>"),
    ("proc_ctrl.cc", r"void BX_CPU_C::handleAvxModeChange\(void\)", r"Bit64u xfd = 0, xfd_error = 0;\n\g<0>"),
    (
        "proc_ctrl.cc",
        r"(get_OSXSAVE\(\) \|\|)(\s*\(~BX_CPU_THIS_PTR xcr0.val32 & \(BX_XCR0_XTILECFG_MASK)",
        r"\1 (xfd & (1<<18)) ||\2",
    ),
    (
        "proc_ctrl.cc",
        r"if \(~BX_CPU_THIS_PTR xcr0.val32 & \(BX_XCR0_XTILECFG_MASK \| BX_XCR0_XTILEDATA_MASK\)\)\s*exception\(BX_UD_EXCEPTION, 0\);",
        r"\g<0>\n  if (xfd & (1<<18)) { xfd_error = 1<<18; exception(BX_NM_EXCEPTION, 0); }",
    ),
    (
        "msr.cc",
        r"case BX_MSR_XSS:(?=\s*if)",
        r"case BX_MSR_IA32_XFD: val64 = xfd; break;\n    case BX_MSR_IA32_XFD_ERROR: val64 = xfd_error; break;\n    \g<0>",
    ),
    (
        "msr.cc",
        r"case BX_MSR_XSS:(?=\s*\{)",
        r"case BX_MSR_IA32_XFD: xfd = val_64; handleAvxModeChange(); break;\n    case BX_MSR_IA32_XFD_ERROR: xfd_error = val_64; break;\n    \g<0>",
    ),
    # tiles are saved with all of their rows, and with rows and bytes in their places
    ("xsave.cc", r"(tilecfg\.vmm16u\(8\+n\) *= BX_CPU_THIS_PTR amx->tilecfg\[n\]\.)rows", r"\1bytes_per_row"),
    ("xsave.cc", r"(tilecfg\.vmmubyte\(48\+n\) *= BX_CPU_THIS_PTR amx->tilecfg\[n\]\.)bytes_per_row", r"\1rows"),
    ("xsave.cc", r"row < BX_TILE_REGISTERS", "row < BX_TILE_MAX_ROWS"),
    ("xsave.cc", r"tile_use_tracker == 0", "tile_use_tracker != 0"),
    (
        "xsave.cc",
        r"(\n *if \(format & feature_mask\)\s*offset \+= xsave_restore\[feature\]\.len;)\s*\}",
        r"\n      }\1",
    ),
    # two registers of floats become one of bfloat16: its upper half is the first of them
    ("avx/avx512_bf16.cc", r"(bfloat16\(op1\.vmm32u\(n)(\)\);\s*if)", r"\1 - DWORD_ELEMENTS(len)\2"),
    # how many products of tiles were computed is said at the end
    ("avx/amx.cc", r"void [^\n]*BX_CPU_C::TDPBF16PS[^{]*\{", r"Bit64u tile_products = 0;\n\g<0> ++tile_products;"),
    (
        "init.cc",
        r"BX_CPU_C::~BX_CPU_C\(\)\s*\{",
        r'\g<0> fprintf(stderr, "tile products: %llu\\n", (unsigned long long) tile_products);',
    ),
]


def correct(folder: Path):
    for file, there, instead in CORRECTIONS:
        path = folder / "cpu" / file
        text, count = re.subn(there, instead, path.read_text())
        if count == 0:
            raise SystemExit(f"{path}: {there!r} was not found; these corrections are for Bochs 3.0")
        path.write_text(text)


if __name__ == "__main__":
    correct(Path(sys.argv[1]))
