"""Builds the native half of the package, `accelz_sim._C`; everything else is in pyproject.toml."""

from pathlib import Path

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

ROOT = Path(__file__).parent

setup(
    ext_modules=[
        CppExtension(
            "accelz_sim._C",
            sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("csrc/*.cpp")),
            depends=sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("csrc/*.h")),
            extra_compile_args=["-std=c++20", "-O1", "-g0", "-Wall", "-DAT_PER_OPERATOR_HEADERS"],
        )
    ],
    cmdclass={"build_ext": BuildExtension},
)
