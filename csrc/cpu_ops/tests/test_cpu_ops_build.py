"""The compiled files: no instruction set leaks out of its file, and NEON is right where an emulator can run it."""

import platform
import re
import shutil
import subprocess

import numpy as np
import pytest
import torch

from polyscale.discovery import load
from polyscale_cpu_ops.library import MODULE

X86 = platform.machine().lower() == "x86_64"
KERNELS = {"scalar.cpp", "avx2.cpp", "avx512.cpp", "neon.cpp"}


def run(*command):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    """Object files of this machine, by source, but for the binding."""
    if shutil.which("nm") is None or shutil.which("objdump") is None:
        pytest.skip("nm and objdump are not installed")
    chain = load("accelerator", "cpu").toolchain()
    if chain is None:
        pytest.skip("there is no C++ compiler")
    folder = tmp_path_factory.mktemp("objects")
    found = {}
    for source in MODULE.sources:
        if source.path == "binding.cpp" or (source.machines and platform.machine().lower() not in source.machines):
            continue
        found[source.path] = folder / f"{source.path}.o"
        flags = (*chain.flags, *MODULE.flags, *source.flags)
        run(chain.compiler, *flags, "-c", MODULE.folder / source.path, "-o", found[source.path])
    return found


@pytest.mark.long
def test_a_file_of_an_instruction_set_gives_away_its_table_only(objects):
    for source in KERNELS & set(objects):
        symbols = [line.split() for line in run("nm", objects[source]).splitlines()]
        given = {name for *_, kind, name in symbols if kind not in "tTrbdU" or kind == "T"}
        assert given == {f"polyscale_kernels_{source.partition('.')[0]}"}, source
        assert {name for *_, kind, name in symbols if kind == "U"} <= {"memcpy", "memset", "_GLOBAL_OFFSET_TABLE_"}


@pytest.mark.skipif(not X86, reason="about x86")
def test_the_baseline_has_no_newer_instructions(objects):
    for source in ("scalar.cpp", "dispatch.cpp", "threads.cpp"):
        assert not re.findall(r"%[yz]mm|\tv\w+ps", run("objdump", "-d", objects[source])), source
    assert "%ymm" in run("objdump", "-d", objects["avx2.cpp"])
    assert "%zmm" not in run("objdump", "-d", objects["avx2.cpp"])
    assert "%zmm" in run("objdump", "-d", objects["avx512.cpp"])


def test_headers_of_torch_are_not_included():
    for path in MODULE.folder.iterdir():
        included = re.findall(r"#include [<\"](.+?)[>\"]", path.read_text())
        assert not [name for name in included if re.match(r"torch|ATen|c10", name)], path


@pytest.mark.skipif(not X86, reason="where it runs natively, the other tests have run it")
def test_neon_in_an_emulator(tmp_path):
    compiler, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
    if compiler is None or emulator is None:
        pytest.skip("needs g++-aarch64-linux-gnu and qemu-user")
    check = tmp_path / "check"
    sources = [MODULE.folder / "neon.cpp", __file__.replace("test_cpu_ops_build.py", "table_check.cpp")]
    defined = "-DTABLE=polyscale_kernels_neon"
    run(compiler, "-static", f"-I{MODULE.folder}", *MODULE.flags, defined, *sources, "-o", check)
    count = 1003
    generator = torch.Generator().manual_seed(0)
    param, exp_avg, grad = (torch.randn(count, generator=generator) for _ in range(3))
    exp_avg_sq = torch.rand(count, generator=generator)
    grad[:8] = torch.tensor([0.0, -0.0, 1e-8, 6e-8, 65519.0, 65520.0, -1e18, 1e-40])
    (tmp_path / "in").write_bytes(torch.cat([param, exp_avg, exp_avg_sq, grad]).numpy().tobytes())
    run(emulator, check, count, tmp_path / "in", tmp_path / "out")
    out = (tmp_path / "out").read_bytes()

    def take(dtype, size=count):
        nonlocal out
        length = np.dtype(dtype).itemsize * size
        found, out = np.frombuffer(out[:length], dtype), out[length:]
        return found

    p, m, v, g = (each.double().numpy() for each in (param, exp_avg, exp_avg_sq, grad))
    g = g * 0.5
    m = m + 0.1 * (g - m)
    v = v + 0.001 * (g * g - v)
    p = p - 1e-3 * p - 0.0369 * m / (np.sqrt(v) * 18.27 + 1e-8)
    for right in (p, m, v):
        np.testing.assert_allclose(take(np.float32), right, rtol=3e-6, atol=1e-7)
    squares = [(grad.double() ** 2).sum().item()]
    for dtype in (torch.bfloat16, torch.float16):
        narrow = grad.to(dtype)
        assert (take(np.int16) == narrow.view(torch.int16).numpy()).all()
        assert (take(np.float32) == narrow.float().numpy()).all()
        squares.append((narrow.double() ** 2).sum().item())
    np.testing.assert_allclose(take(np.float64, 3), squares, rtol=1e-12)
    assert (take(np.float32) == np.float32(0.3)).all()
    assert out == b""
