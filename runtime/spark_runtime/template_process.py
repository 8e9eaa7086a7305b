"""Chat templates in a process of their own: ``template_process.py SECONDS BYTES``, which talks over its standard input.

A template comes with a model file, and nobody vouches for it. Jinja's sandbox keeps it from Python's inner life; what
the sandbox does not bound, time and memory, this process bounds by dying of them. It holds nothing but copies of what
it is sent, so a template may change lists and objects as Kimi K2's do: its own, and what it was given for this prompt.
``SECONDS`` are of processor time, and more for a longer conversation; ``BYTES`` are beyond this process itself.

A request is a length and a marshalled ``(template, source, constants, variables)``: ``source`` is only sent once, and
``variables`` of ``None`` only reads the template. The answer is a status, a length, and a text.
:class:`spark_runtime.templates.ChatTemplate` speaks the other side.
"""

from __future__ import annotations

import json
import marshal
import os
import resource
import signal
import struct
import sys
from collections import OrderedDict
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jinja2

__all__ = [
    "ANSWER", "MAX_ANSWER_BYTES", "REFUSED", "RENDERED", "REQUEST", "UNKNOWN", "UNREADABLE", "ProcessTemplates", "main"
]  # fmt: skip

REQUEST = struct.Struct("<I")
ANSWER = struct.Struct("<BI")
RENDERED, REFUSED, UNREADABLE, UNKNOWN = range(4)
MAX_ANSWER_BYTES = 256 * 2**20
MIN_ANSWER_BYTES = 4 * 2**20
_GROWTH = 16
"""Beyond the bytes above a prompt is not so many times as long as what it is made of: all of it would be tokenised."""
_S_PER_BYTE = 1e-6
"""A hundred times of what rendering takes."""
_MAX_TEMPLATES = 64
_MAX_REASON_CHARS = 1000


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own escapes for HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise ValueError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _environment() -> jinja2.Environment:
    """What templates are written for: the options, filters and functions of Hugging Face's Transformers."""
    # Whoever serves imports this module for its constants.
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """Training marks what an assistant said by this tag; in a prompt it says nothing."""

        tags = {"generation"}  # noqa: RUF012 - so declared by Jinja

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = jinja2.sandbox.SandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


class ProcessTemplates:
    """The templates that were sent, newest last."""

    def __init__(self) -> None:
        self._environment = _environment()
        self._known: OrderedDict[int, jinja2.Template] = OrderedDict()

    def answer(self, request: bytes) -> tuple[int, str]:
        """A status and its text: the prompt, or a reason."""
        number, source, constants, variables = marshal.loads(request)  # noqa: S302 - from the process that started this one
        try:
            template = self._template(number, source, constants)
        except Exception as error:
            return UNREADABLE, _reason(error)
        if template is None:
            return UNKNOWN, ""
        try:
            return RENDERED, "" if variables is None else template.render(variables)
        except Exception as error:
            return REFUSED, _reason(error)

    def _template(self, number: int, source: str | None, constants: Mapping[str, str]) -> jinja2.Template | None:
        if source is not None:
            self._known[number] = self._environment.from_string(source, globals=dict(constants))
            if len(self._known) > _MAX_TEMPLATES:
                self._known.popitem(last=False)
        return self._known.get(number)


def _reason(error: Exception) -> str:
    return (str(error) or type(error).__name__)[:_MAX_REASON_CHARS]


def _limit_memory(most_bytes: int) -> None:
    try:
        with open("/proc/self/statm") as file:  # noqa: PTH123 - pathlib is not needed otherwise
            in_use = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        pass  # no Linux: what is in use is not known, and processor time ends what takes too much
    else:
        resource.setrlimit(resource.RLIMIT_AS, (in_use + most_bytes, in_use + most_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def main() -> None:
    """Answer until the other side closes."""
    seconds, most_bytes = float(sys.argv[1]), int(sys.argv[2])
    requests, answers = os.fdopen(0, "rb"), os.fdopen(os.dup(0), "wb")
    templates = ProcessTemplates()
    _limit_memory(most_bytes)
    while header := requests.read(REQUEST.size):
        request = requests.read(REQUEST.unpack(header)[0])
        # Of processor time, and its default action: nothing that a template does gets around it.
        signal.setitimer(signal.ITIMER_PROF, seconds + _S_PER_BYTE * len(request))
        status, text = templates.answer(request)
        raw = text.encode(errors="surrogatepass")
        signal.setitimer(signal.ITIMER_PROF, 0)
        most = min(MAX_ANSWER_BYTES, MIN_ANSWER_BYTES + _GROWTH * len(request))
        if len(raw) > most:
            status, raw = REFUSED, f"it makes {len(raw)} bytes of {len(request)}, expected at most {most}".encode()
        answers.write(ANSWER.pack(status, len(raw)))
        answers.write(raw)
        answers.flush()


if __name__ == "__main__":
    main()
