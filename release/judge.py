"""What must be true of every wheel that is published, read from the file itself: its name, its members, its libraries.

`faults` returns what is wrong as sentences. It imports nothing from the wheel, so it judges one for another CPU, too.
"""

from __future__ import annotations

import re
import zipfile
from io import BytesIO
from pathlib import Path, PurePosixPath

from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection

# An extension is loaded into a process that has loaded others: it may need the system's libraries, and no OpenMP.
SYSTEM_LIBRARIES = re.compile(r"(lib(stdc\+\+|gcc_s|c|m|pthread|dl|rt)|ld-linux.*)\.so\.\d+")
SOURCES = {".a", ".c", ".cpp", ".h", ".hpp", ".inl", ".o", ".pyc"}
MACHINES = {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}
# A path from the root to a file of a program. What a library opens on Linux (cgroups, libraries) ends otherwise.
BUILDERS_PATH = re.compile(rb"(?<![\w./-])/(?:[\w.+-]+/)+[\w.+-]+\.(?:cpp|cc|c|h|hpp|inc|py)\b")


def extensions(wheel: Path) -> dict[str, bytes]:
    """The libraries in a wheel, by file name."""
    with zipfile.ZipFile(wheel) as members:
        return {PurePosixPath(x).name: members.read(x) for x in members.namelist() if x.endswith(".so")}


def glibc(library: bytes) -> tuple[int, int]:
    """The newest version of glibc that a library asks for."""
    asked = [(0, 0)]
    for section in ELFFile(BytesIO(library)).iter_sections():
        if isinstance(section, GNUVerNeedSection):
            for _, versions in section.iter_versions():
                found = (re.fullmatch(r"GLIBC_(\d+)\.(\d+)(\.\d+)?", version.name) for version in versions)
                asked += [(int(x[1]), int(x[2])) for x in found if x]
    return max(asked)


def library_faults(name: str, library: bytes, machine: str, newest: tuple[int, int]) -> list[str]:
    elf = ELFFile(BytesIO(library))
    faults = []
    if elf["e_machine"] != MACHINES[machine]:
        faults.append(f"is built for {elf['e_machine']}, not for {machine}")
    left = [x.name for x in elf.iter_sections() if x.name == ".symtab" or x.name.startswith(".debug")]
    if left:
        faults.append(f"is not stripped: {', '.join(left)}")
    paths = sorted({x.decode() for x in BUILDERS_PATH.findall(library)})
    if paths:
        faults.append(f"names files of the machine that built it: {', '.join(paths[:3])}")
    dynamic = elf.get_section_by_name(".dynamic")
    foreign = [x.needed for x in dynamic.iter_tags("DT_NEEDED") if not SYSTEM_LIBRARIES.fullmatch(x.needed)]
    if foreign:
        faults.append(f"needs {', '.join(foreign)}")
    if any(x.entry.d_tag in ("DT_RPATH", "DT_RUNPATH") for x in dynamic.iter_tags()):
        faults.append("has a search path for libraries")
    if glibc(library) > newest:
        faults.append(f"asks for glibc {glibc(library)}, and the wheel promises {newest}")
    symbols = elf.get_section_by_name(".dynsym").iter_symbols()
    defined = [x.name for x in symbols if x["st_shndx"] != "SHN_UNDEF" and x["st_info"]["bind"] != "STB_LOCAL"]
    module = name.split(".")[0]
    if f"PyInit_{module}" not in defined or any("levelhead" in x for x in defined):
        faults.append(f"must export PyInit_{module} and nothing of the core, exports {sorted(defined)[:5]}")
    return [f"{name} {x}" for x in faults]


def faults(wheel: Path, *, jax: bool) -> list[str]:
    """What is wrong with a wheel for Linux. `jax`: whether it must have the extension for JAX."""
    found = re.fullmatch(r"levelhead-[^-]+-cp3\d+-(?:abi3|cp3\d+t?)-(\S+)\.whl", wheel.name)
    platform = found and re.search(r"manylinux_(\d+)_(\d+)_(x86_64|aarch64)$", found[1])
    if not platform:
        return [f"the name {wheel.name} has no manylinux tag"]
    with zipfile.ZipFile(wheel) as members:
        names = members.namelist()
    wrong = [f"has {x}" for x in names if PurePosixPath(x).suffix in SOURCES or "__pycache__" in x]
    libraries = extensions(wheel)
    expected = {"_core", "_jax_ffi"} if jax else {"_core"}
    if {x.split(".")[0] for x in libraries} != expected:
        wrong.append(f"must have {sorted(expected)}, has {sorted(libraries)}")
    for name, library in libraries.items():
        wrong += library_faults(name, library, platform[3], (int(platform[1]), int(platform[2])))
    return [f"{wheel.name}: {x}" for x in wrong]
