"""The native module's part of the build; everything else is in pyproject.toml."""

import os
import shlex
from glob import glob

from setuptools import Extension, setup

# Without a compiler the package installs all the same, and does without. SPMD_DISCO_BUILD=native
# makes a failure to build it an error, and SPMD_DISCO_BUILD=python leaves it out.
build = os.environ.get("SPMD_DISCO_BUILD", "")
if build not in ("", "native", "python"):
    raise SystemExit(f"SPMD_DISCO_BUILD={build!r}: set it to native or python, or not at all")

native = Extension(
    "spmd_disco.native._native",
    sources=sorted(glob("spmd_disco/native/src/*.c")),
    depends=sorted(glob("spmd_disco/native/src/*.h")),
    extra_compile_args=[
        "-std=gnu11",
        "-O3",
        "-fvisibility=hidden",
        "-Wall",
        "-Wextra",
        "-Wno-unused-parameter",
        "-Wno-missing-field-initializers",
        "-Wno-cast-function-type",
        # Once more at the end: for a debugger, CFLAGS="-O0 -g3" must beat what is above.
        *shlex.split(os.environ.get("CFLAGS", "")),
    ],
    libraries=["rt"],  # for shm_open, before glibc 2.34
    optional=build != "native",
)

setup(ext_modules=[] if build == "python" else [native])
