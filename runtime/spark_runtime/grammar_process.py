"""llama.cpp's grammars in a process of their own: ``python -m spark_runtime.grammar_process MODEL.gguf IDS``.

A grammar comes from whoever sends a request, and llama.cpp's matcher can be made to overflow its stack, to abort, or to
take exponential time. Here none of this reaches the process that serves. It loads the model's vocabulary alone;
``IDS``, separated by commas, are the control tokens that have a text in answers.

It follows one grammar at a time. A request is a little-endian header (operation, argument, bytes of payload) and a
payload; the answer is a length and that many bytes, and the first one, empty, says that the vocabulary is loaded.
:class:`spark_runtime.grammar.GrammarHost` speaks the other side.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

import numpy as np

from spark_runtime.heap import trim_heaps
from spark_runtime.llama import bindings

__all__ = ["ACCEPT", "ALLOWED", "ALLOWS", "ANSWER", "CLOSE", "HEADER", "OPEN", "STEP_LIMIT_S", "main"]

HEADER = struct.Struct("<BII")
ANSWER = struct.Struct("<I")
OPEN, ALLOWS, ALLOWED, ACCEPT, CLOSE = range(5)
STEP_LIMIT_S = 10
"""A step that takes longer ends this process, even when nobody waits for it any more."""
_MEMORY_BYTES = 512 * 2**20
"""What grammars may take beyond the vocabulary."""
_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


class _Follower:
    def __init__(self, path: str, spelled: frozenset[int], errors: IO[bytes]) -> None:
        self._llama: Any = bindings()
        params = self._llama.llama_model_default_params()
        params.vocab_only = True
        self._model = self._llama.llama_model_load_from_file(os.fsencode(path), params)
        if not self._model:
            raise SystemExit(1)
        self._vocab = self._llama.llama_model_get_vocab(self._model)
        n_vocab = self._llama.llama_vocab_n_tokens(self._vocab)
        silent = [token not in spelled and self._is_silent(token) for token in range(n_vocab)]
        self._silent = np.array(silent, dtype=np.bool_)
        self._all = np.zeros(n_vocab, dtype=_CANDIDATE)
        self._one = np.zeros(1, dtype=_CANDIDATE)
        self._grammar: Any = None
        self._errors = errors

    def _is_silent(self, token: int) -> bool:
        """Control tokens have no text in an answer, though llama.cpp would match a grammar with their names."""
        llama, vocab = self._llama, self._vocab
        return bool(llama.llama_vocab_is_control(vocab, token) and not llama.llama_vocab_is_eog(vocab, token))

    def answer(self, operation: int, argument: int, payload: bytes) -> bytes:
        if operation == OPEN:
            return self._start(payload)
        grammar = self._grammar
        if operation == CLOSE:
            if grammar:
                self._llama.llama_sampler_free(grammar)
            self._grammar = None
            # A large one would leave it all to a process that then waits.
            trim_heaps()
            return b""
        if operation == ACCEPT:
            self._llama.llama_sampler_accept(grammar, argument)
            return b""
        if operation == ALLOWS:
            self._one["id"], self._one["logit"] = argument, 0
            self._apply(grammar, self._one)
            return bytes([bool(np.isfinite(self._one["logit"][0])) and not self._silent[argument]])
        self._all["id"], self._all["logit"] = np.arange(len(self._all)), 0
        self._apply(grammar, self._all)
        return np.packbits(np.isfinite(self._all["logit"]) & ~self._silent).tobytes()

    def _start(self, text: bytes) -> bytes:
        """Empty when the grammar was read, else why not."""
        self._errors.seek(0)
        self._errors.truncate()
        grammar = self._llama.llama_sampler_init_grammar(self._vocab, text, b"root")
        if grammar:
            self._grammar = grammar
            return b""
        self._errors.seek(0)
        said = self._errors.read(4096).decode(errors="replace").partition("\n")[0]
        return (said.partition("error parsing grammar: ")[2] or "no rule 'root', or left recursion").encode()

    def _apply(self, grammar: Any, candidates: Any) -> None:
        llama = self._llama
        data = ctypes.cast(candidates.ctypes.data, ctypes.POINTER(llama.llama_token_data))
        array = llama.llama_token_data_array(data=data, size=len(candidates), selected=-1, sorted=False)
        llama.llama_sampler_apply(grammar, ctypes.byref(array))


def main() -> None:
    """Answer until the other side closes."""
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    with tempfile.TemporaryFile() as errors:
        # llama.cpp prints reasons, and with them the grammar, which belongs in nobody's log.
        os.dup2(errors.fileno(), 1)
        os.dup2(errors.fileno(), 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        follower = _Follower(sys.argv[1], frozenset(map(int, filter(None, sys.argv[2].split(",")))), errors)
        in_use = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (in_use + _MEMORY_BYTES, in_use + _MEMORY_BYTES))
        answers.write(ANSWER.pack(0))
        answers.flush()
        while header := requests.read(HEADER.size):
            operation, argument, size = HEADER.unpack(header)
            payload = requests.read(size)
            signal.alarm(STEP_LIMIT_S)
            answer = follower.answer(operation, argument, payload)
            signal.alarm(0)
            answers.write(ANSWER.pack(len(answer)) + answer)
            answers.flush()


if __name__ == "__main__":
    main()
