# The toolchain of `make wheels`: clang from the package `ziglang`, which brings the C library of every Linux target. So one
# machine builds for x86_64 and aarch64, for an old glibc, and libc++ is inside the extension.
# In the environment: LEVELHEAD_ZIG, the compiler's path; LEVELHEAD_TARGET, what it builds for (aarch64-linux-gnu.2.17).
# Folders leave no trace: debug information is stripped, and nothing uses __FILE__ (release/judge.py looks for paths).
set(CMAKE_SYSTEM_NAME Linux)
string(REGEX MATCH "^[^-]+" CMAKE_SYSTEM_PROCESSOR "$ENV{LEVELHEAD_TARGET}")
set(CMAKE_CXX_COMPILER "$ENV{LEVELHEAD_ZIG}" c++ -target "$ENV{LEVELHEAD_TARGET}")
# `zig ar` is two words, and CMAKE_AR may be one only.
set(CMAKE_CXX_ARCHIVE_CREATE "$ENV{LEVELHEAD_ZIG} ar qc <TARGET> <OBJECTS>")
set(CMAKE_CXX_ARCHIVE_FINISH "")
set(CMAKE_CXX_SCAN_FOR_MODULES OFF)  # there are none, and the scanner is not in the package
