"""A wall clock that jumps when a test says so, for a process of its own; what counts time from its start goes on."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static int64_t ahead_s(void) {
    static const volatile int64_t * shared;
    const char * path = getenv("JUMPING_CLOCK");
    if (path == NULL) return 0;  // a process that is started without most variables, for templates
    if (shared == NULL) {
        int file = open(path, O_RDONLY);
        if (file < 0) abort();
        void * mapped = mmap(NULL, sizeof *shared, PROT_READ, MAP_SHARED, file, 0);
        if (mapped == MAP_FAILED) abort();
        shared = mapped;
    }
    return *shared;
}

int clock_gettime(clockid_t clock, struct timespec * now) {
    static int (*real)(clockid_t, struct timespec *);
    if (real == NULL) real = (int (*)(clockid_t, struct timespec *)) dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, now);
    if (!failed && clock == CLOCK_REALTIME) now->tv_sec += ahead_s();
    return failed;
}

int gettimeofday(struct timeval * restrict now, void * restrict zone) {
    struct timespec found;
    (void) zone;
    int failed = clock_gettime(CLOCK_REALTIME, &found);
    if (!failed && now != NULL) { now->tv_sec = found.tv_sec; now->tv_usec = found.tv_nsec / 1000; }
    return failed;
}

time_t time(time_t * now) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    if (now != NULL) *now = found.tv_sec;
    return found.tv_sec;
}
"""


class JumpingClock:
    """The clock of every process that is started with :attr:`variables`."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which(os.environ.get("CC", "cc"))
        if compiler is None:
            pytest.skip("no C compiler")
        self._file = folder / "clock"
        self.jump_to(0)
        source, library = folder / "clock.c", folder / "clock.so"
        source.write_text(_SOURCE)
        command = [compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"]
        subprocess.run(command, check=True, capture_output=True)
        self.variables = {"LD_PRELOAD": str(library), "JUMPING_CLOCK": str(self._file)}

    def jump_to(self, ahead_s: int) -> None:
        """Be so many seconds ahead of the true time from now on."""
        with self._file.open("r+b" if self._file.exists() else "w+b") as file:
            file.write(struct.pack("=q", ahead_s))
