"""The compiled kernels of exact leak scores and of noise: built where there is a C compiler, left out where there is none.

All else is in pyproject.toml. The files are plain C that ctypes loads, so they need neither Python's nor torch's headers.
They are compiled once for each set of instructions, and the best that a processor has is taken when it is loaded: what is
built on one machine runs on another.
"""

import platform

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel

# variant -> what the compiler may use; the names are those of gradveil/imports.py
FLAGS = {
    "avx512": ["-mavx512f", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma"],
    "avx2": ["-mavx2", "-mfma"],
    "plain": [],
}
HOME = "src/gradveil/representation"
variants = FLAGS if platform.machine().lower() in ("x86_64", "amd64") else ["plain"]


class PlainC(bdist_wheel):
    """The compiled files know nothing of Python: one wheel for all its versions."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tag with the platform alone."""
        return "py3", "none", super().get_tag()[2]


setup(
    cmdclass={"bdist_wheel": PlainC},
    ext_modules=[
        Extension(
            f"gradveil.representation._cpu_kernel_{variant}",
            sources=[f"{HOME}/cpu_kernel.c", f"{HOME}/gram.c"],
            depends=[f"{HOME}/cpu_kernel.h"],
            extra_compile_args=["-O3", "-std=gnu11", "-Wno-psabi", *FLAGS[variant]],
            libraries=["m"],
            optional=True,
        )
        for variant in variants
    ]
    + [
        Extension(
            f"gradveil.privacy._gaussian_{variant}",
            sources=["src/gradveil/privacy/gaussian.c"],
            # one rounding more or less is inside the error that is proved; what may raise flags keeps loops from vectors
            extra_compile_args=["-O3", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math", *FLAGS[variant]],
            libraries=["m"],
            optional=True,
        )
        for variant in variants
    ],
)
