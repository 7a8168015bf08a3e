"""How much of decoding an image is done under Python's lock: what threads of one process cannot do at the same time.

A library between Python and its extensions notes the processor time of a thread from where it gives the lock up to where it takes
it again. It is compiled first, which needs a C compiler. By Amdahl's law n threads do the work of at most 1 / (share under the
lock) cores. With processes (`pipelines.features.decoding_processes`), what the worker's own threads do for an image is left.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <time.h>
static __thread uint64_t without, since;
uint64_t lock_now(void) {
  struct timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return t.tv_sec * 1000000000ull + t.tv_nsec;
}
uint64_t lock_without(void) { return without; }
void *PyEval_SaveThread(void) {
  static void *(*real)(void);
  if (!real) real = (void *(*)(void))dlsym(RTLD_NEXT, "PyEval_SaveThread");
  void *state = real();
  since = lock_now();
  return state;
}
void PyEval_RestoreThread(void *state) {
  static void (*real)(void *);
  if (!real) real = (void (*)(void *))dlsym(RTLD_NEXT, "PyEval_RestoreThread");
  without += lock_now() - since;
  real(state);
}
"""
RUNS = 20
NAMES = ("resnet50-pool", "vgg19-10crop", "vgg19-10crop-caffe", "vgg19-grid", "resnet152-grid", "faster-rcnn-36")


def main() -> None:
    """Start this program again with the library, or measure if it is there."""
    if hasattr(ctypes.PyDLL(None), "lock_without"):
        measure()
        return
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise SystemExit("no C compiler: install one, or name it in CC")
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "lock.c", Path(folder) / "lock.so"
        source.write_text(_SOURCE, encoding="ascii")
        subprocess.run([compiler, "-shared", "-fPIC", "-O2", source, "-o", library, "-ldl"], check=True)
        subprocess.run([sys.executable, *sys.argv], check=True, env={**os.environ, "LD_PRELOAD": str(library)})


def measure() -> None:
    """Print the shares."""
    from bench_decoding import photographs
    from measuring import machine

    import extractors
    from pipelines.features.decoding_processes import DecodingProcesses
    from schemas.process.resources import keep_freed_memory

    keep_freed_memory()
    print(machine(), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        data = photographs(Path(folder))
        print(f"{len(data)} JPEGs, milliseconds of processor time of a thread for each; the least of {RUNS} runs")
        show("decoding", extractors.decode, data)
        for name in NAMES:
            extractor = extractors.load(name, weights="random:0", device="cpu")
            show(f"{name}, in a thread", lambda one, run=extractor.preprocess: run(extractors.decode(one)), data)
            if extractor.preprocessor is not None:
                show(f"{name}, by a process", DecodingProcesses(extractor.preprocessor, 1).pixels, data)


def show(what: str, run: Callable[[bytes], object], data: Sequence[bytes]) -> None:
    """Print the processor time of this thread for an image, and how much of it is under the lock."""
    library = ctypes.PyDLL(None)
    clocks = [library.lock_now, library.lock_without]
    for clock in clocks:
        clock.restype = ctypes.c_uint64
    times = []
    for _ in range(RUNS):
        before = [clock() for clock in clocks]
        for one in data:
            run(one)
        whole, without = (clock() - start for clock, start in zip(clocks, before, strict=True))
        times.append((whole, whole - without))
    whole, held = (1e-6 * value / len(data) for value in min(times))
    print(
        f"{what}: {whole:.2f}, of it {held:.2f} under the lock, {held / whole:.0%}: {whole / held:.1f} cores at most",
        flush=True,
    )


if __name__ == "__main__":
    main()
