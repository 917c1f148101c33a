"""The compiled kernel of exact leak scores: built where there is a C compiler, left out where there is none.

All else is in pyproject.toml. The file is plain C that ctypes loads, so it needs neither Python's nor torch's headers.
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "gradveil.scores.fast._cpu_kernel",
            sources=["src/gradveil/scores/fast/cpu_kernel.c", "src/gradveil/scores/fast/gram.c"],
            depends=["src/gradveil/scores/fast/cpu_kernel.h"],
            extra_compile_args=["-O3", "-march=native", "-std=gnu11"],
            libraries=["m"],
            optional=True,
        )
    ]
)
