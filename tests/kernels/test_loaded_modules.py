"""Modules of one name that threads load at the same time: each thread gets its own."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from triton.runtime import build

from gpu_worker.kernels.compile_ahead import loaded_one_by_one

HEADERS = Path(sysconfig.get_paths()["include"])
SOURCE = """\
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *args) {{ return PyLong_FromLong({number}); }}
static PyMethodDef methods[] = {{{{"launch", launch, METH_VARARGS, ""}}, {{NULL, NULL, 0, NULL}}}};
static struct PyModuleDef definition = {{PyModuleDef_HEAD_INIT, "__triton_launcher", NULL, -1, methods}};
PyMODINIT_FUNC PyInit___triton_launcher(void) {{ return PyModule_Create(&definition); }}
"""
"""As Triton 3.6 makes one for each kind of kernel."""
NUMBERS = range(4)


@pytest.mark.skipif(shutil.which("gcc") is None or not (HEADERS / "Python.h").exists(), reason="needs a C compiler")
def test_a_module_that_is_loaded_again_stays_what_it_was(tmp_path: Path) -> None:
    files = []
    for number in NUMBERS:
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "module.c").write_text(SOURCE.format(number=number))
        files.append(folder / f"__triton_launcher{sysconfig.get_config_var('EXT_SUFFIX')}")
        command = ["gcc", "-shared", "-fPIC", f"-I{HEADERS}", str(folder / "module.c"), "-o", str(files[-1])]
        subprocess.run(command, check=True)

    def loaded(number: int) -> tuple[int, object]:
        return number, build._load_module_from_path("__triton_launcher", str(files[number]))

    with loaded_one_by_one(), ThreadPoolExecutor(8) as pool:
        modules = list(pool.map(loaded, [*NUMBERS] * 50))
    assert {(number, module.launch()) for number, module in modules} == {(number, number) for number in NUMBERS}
