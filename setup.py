"""Build of the compiled core; all else is in pyproject.toml.

The core links libzstd if its header and library are here, statically if the archive can go into a shared object. Only a
test of the compiler can tell, and pyproject.toml cannot ask for one.
"""

from __future__ import annotations

import tempfile
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError

SOURCE = "tensorcas_mlflow/native/src"
USES_ZSTD = """
#include <zstd.h>
#include <zstd_errors.h>
#if ZSTD_VERSION_NUMBER < 10400
#error "ZSTD_compress2 is older"
#endif
unsigned version(void) { return ZSTD_versionNumber() + (ZSTD_createCCtx() != 0) + (ZSTD_createDCtx() != 0); }
"""
WAYS_TO_LINK = (["-Wl,--exclude-libs,ALL", "-l:libzstd.a"], ["-lzstd"])


class BuildCore(build_ext):
    """Compiler of the extension, with libzstd where it can be linked."""

    def run(self) -> None:
        """Build the extension, or say what is missing."""
        try:
            super().run()
        except (CompileError, LinkError) as error:
            raise SystemExit(
                f"tensorcas-mlflow needs a C compiler and Python's headers to build its core ({error}): install them "
                "(Debian: `apt install gcc libzstd-dev python3-dev`, macOS: `xcode-select --install`), "
                "or install a wheel"
            ) from error

    def build_extension(self, ext: Extension) -> None:
        """Build the extension."""
        for arguments in WAYS_TO_LINK:
            if self._links(arguments):
                ext.define_macros.append(("TC_HAS_ZSTD", "1"))
                ext.extra_link_args += arguments
                break
        else:
            self.announce("libzstd is not here: the package zstandard does its work, more slowly", level=3)
        super().build_extension(ext)

    def _links(self, arguments: list[str]) -> bool:
        """Tell whether a shared object with these arguments can be made."""
        with tempfile.TemporaryDirectory() as folder:
            probe = Path(folder, "probe.c")
            probe.write_text(USES_ZSTD)
            try:
                objects = self.compiler.compile([str(probe)], output_dir=folder, extra_postargs=["-fPIC"])
                whole = [*arguments, "-Wl,--no-undefined"]
                self.compiler.link_shared_object(objects, str(Path(folder, "probe.so")), extra_postargs=whole)
            except (CompileError, LinkError):
                return False
        return True


core = Extension(
    "tensorcas_mlflow.native._core",
    sources=sorted(glob(f"{SOURCE}/*.c")),
    depends=sorted(glob(f"{SOURCE}/*.h")),
    extra_compile_args=["-O3", "-pthread"],
    extra_link_args=["-pthread"],
    py_limited_api=True,
)

setup(ext_modules=[core], cmdclass={"build_ext": BuildCore})
