"""vLLM's log, read line by line: what of it a person wants to see, when the server is ready, why it failed."""

import re
import threading

_LINE = re.compile(
    r"(?:\((?P<process>[^()]+) pid=\d+\) )?"
    r"(?:(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL)"
    r"(?: \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]+\]|:) +)?"  # vLLM names time and place, uvicorn does not
    r"(?P<text>.*)"
)

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

_PROGRESS = (
    (re.compile(r"Starting to load model "), "loading the weights"),
    (re.compile(r"Loading weights took ([\d.]+) seconds"), "weights loaded in {0} s"),
    (re.compile(r"Capturing CUDA graphs"), "capturing CUDA graphs"),
    (re.compile(r"\w+ KV cache size: ([\d,]+) tokens"), "engine KV cache: {0} tokens"),
    (re.compile(r"(Host memory for KV: .*)"), "{0}"),
    (re.compile(r"Starting vLLM server on (\S+)"), "serving on {0}"),
)
"""What is shown of the time before the server is ready."""

_READY = "Application startup complete."
_OWN_ERROR = re.compile(r"oasiskv\.core\.errors\.\w+: (.*)")
_ANY_ERROR = re.compile(r"(?:[a-z_]\w*\.)*([A-Z]\w*(?:Error|Exception)): (.+)")
_DEATH = re.compile(r".*(EngineDeadError|Engine core initialization failed|(exited|died) unexpectedly)")
"""vLLM's words of those who wait for an engine that is gone; they only point at other errors."""
_KILLED = (
    "engine: expected its processes to run, got the end of one without a word (see --verbose); was it killed, "
    "for want of memory?"
)
_VALIDATION = re.compile(r"\d+ validation errors? for ")
_USAGE_ERROR = re.compile(r"\S+: error: (.*)")

_SERVICE_LINE = re.compile(
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (?P<level>[A-Z]+) (?P<logger>\S+) (?P<text>.*)", re.DOTALL
)
_SERVICE_ERROR = re.compile(r"error: (.*)")
_LISTENS = re.compile(r"oasiskv \w+ listens on (.*)")


class LogReader:
    """Reads the log of one server.

    Args:
        least_level: Of the lines that are shown once the server is ready; INFO for a name that is no level.

    Attributes:
        is_ready: Set once the server takes requests.
    """

    def __init__(self, least_level: str = "INFO") -> None:
        """Start with nothing read."""
        least = least_level.upper()
        self._shown_levels = _LEVELS[_LEVELS.index(least if least in _LEVELS else "INFO") :]
        self.is_ready = threading.Event()
        self._own: str | None = None
        self._usage: str | None = None
        self._first: str | None = None
        self._is_dead = False
        self._in_validation = False
        self._last_progress: str | None = None

    @property
    def cause(self) -> str | None:
        """Why the server failed, in one line: OasisKV's own error before vLLM's, and of those the first."""
        return self._own or self._usage or self._first or (_KILLED if self._is_dead else None)

    def read(self, line: str) -> str | None:
        """Take a line; return what to show of it, None for nothing."""
        match = _LINE.fullmatch(line)
        assert match is not None
        level, text = match["level"], match["text"]
        # What the API server says once it is ready is about single requests, but for the end of its engine.
        is_engine = (match["process"] or "API").startswith(("EngineCore", "Worker"))
        if is_engine or not self.is_ready.is_set() or _DEATH.match(text):
            self._look_for_cause(text)
        if self.is_ready.is_set():
            return line if level in self._shown_levels else None
        if text == _READY:
            self.is_ready.set()
            self._own = self._usage = self._first = None
            self._is_dead = False
            return "ready"
        for pattern, words in _PROGRESS:
            if (found := pattern.match(text)) is not None:
                last, self._last_progress = self._last_progress, words.format(*found.groups())
                # A progress bar is a line for each of its states.
                return self._last_progress if self._last_progress != last else None
        return None

    def _look_for_cause(self, text: str) -> None:
        if self._in_validation:
            # pydantic says what is wrong in the line after the one that names the class.
            self._in_validation = False
            self._first = self._first or re.sub(r" \[type=.*", "", text.strip()).removeprefix("Value error, ")
        elif (found := _OWN_ERROR.search(text)) is not None:
            self._own = self._own or found[1]
        elif (found := _USAGE_ERROR.fullmatch(text)) is not None:
            self._usage = f"vLLM: {found[1]}"
        elif _DEATH.match(text):
            self._is_dead = True
        elif not self._is_dead and (found := _ANY_ERROR.fullmatch(text)) is not None:
            if _VALIDATION.match(found[2]):
                self._in_validation = True
            else:
                self._first = self._first or f"vLLM: {found[1]}: {found[2]}"


class ServiceLog:
    """Reads the log of a service of ours: its own lines, those of the engine in it, and its last word.

    Args:
        least_level: Of the lines that are shown once the service listens, and of what is no warning before; of its
            engine's, WARNING at least.

    Attributes:
        is_ready: Set once the service listens.
    """

    def __init__(self, least_level: str = "INFO") -> None:
        """Start with nothing read."""
        self.is_ready = threading.Event()
        self._levels = _LEVELS[_LEVELS.index(least_level) :]
        self._engine = LogReader("WARNING" if least_level == "INFO" else least_level)
        self._error: str | None = None

    @property
    def cause(self) -> str | None:
        """Why the service ended, in one line: its own last word before what its engine said."""
        return self._error or self._engine.cause

    def read(self, line: str) -> str | None:
        """Take a line; return what to show of it, None for nothing."""
        if (own := _SERVICE_LINE.fullmatch(line)) is not None:
            is_plain = own["level"] in ("DEBUG", "INFO")
            if is_plain and not own["logger"].startswith("oasiskv."):
                return None
            if own["level"] not in self._levels and (is_plain or self.is_ready.is_set()):
                return None
            return own["text"] if is_plain else f"{own['level']} {own['text']}"
        if (error := _SERVICE_ERROR.fullmatch(line)) is not None:
            self._error = error[1]
            return None
        if (where := _LISTENS.fullmatch(line)) is not None:
            self.is_ready.set()
            self._engine.is_ready.set()
            return f"listens on {where[1]}"
        return self._engine.read(line)
