"""Logging of a run: everything into run_dir/run.log, moerl's own warnings on the terminal, no library's chatter there."""

import logging
import sys
from contextlib import suppress
from pathlib import Path

from moerl.observe.terminal import Level, Terminal

_MOERL = logging.getLogger("moerl")


class RunLog:
    """Takes over the root logger from construction to `close`, which restores what it found."""

    def __init__(self, path: Path, terminal: Terminal):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = _LogFile(path, encoding="utf-8", errors="backslashreplace")
        self._file.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
        self._own = _TerminalHandler(terminal)
        self._levels = {logger: logger.level for logger in (logging.root, _MOERL)}
        self._silenced: list[tuple[logging.Logger, logging.Handler, bool]] = []
        logging.root.addHandler(self._file)
        logging.root.setLevel(logging.INFO)
        _MOERL.setLevel(logging.INFO)
        _MOERL.addHandler(self._own)
        # warnings.warn becomes the logger py.warnings, hence a line of run.log.
        logging.captureWarnings(True)
        self.silence_libraries()

    def silence_libraries(self) -> None:
        """Takes away terminal handlers that libraries gave their loggers; call again after importing more of them."""
        for logger in _library_loggers():
            for handler in [handler for handler in logger.handlers if _writes_to_terminal(handler)]:
                self._silenced.append((logger, handler, logger.propagate))
                logger.removeHandler(handler)
                # Their messages still reach run.log, by way of the root logger.
                logger.propagate = True

    def close(self) -> None:
        """Safe to call twice."""
        logging.root.removeHandler(self._file)
        _MOERL.removeHandler(self._own)
        for logger, level in self._levels.items():
            logger.setLevel(level)
        for logger, handler, propagate in reversed(self._silenced):
            logger.addHandler(handler)
            logger.propagate = propagate
        logging.captureWarnings(False)
        self._levels, self._silenced = {}, []
        with suppress(OSError):  # of lines for which the disk has no room
            self._file.close()


class _LogFile(logging.FileHandler):
    """Loses what the disk has no room for: whatever else needs the disk fails and says so, once."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class _TerminalHandler(logging.Handler):
    """Warnings and errors of moerl as notices; tracebacks stay in run.log."""

    def __init__(self, terminal: Terminal):
        super().__init__(logging.WARNING)
        self._terminal = terminal

    def emit(self, record: logging.LogRecord) -> None:
        level: Level = "error" if record.levelno >= logging.ERROR else "warning"
        cause = f" ({record.exc_info[1]!r})" if record.exc_info and record.exc_info[1] is not None else ""
        self._terminal.notice(record.getMessage() + cause, level)


def _library_loggers() -> list[logging.Logger]:
    """The root logger and every existing one that is not moerl's."""
    known = [logger for logger in logging.root.manager.loggerDict.values() if isinstance(logger, logging.Logger)]
    return [logging.root, *(logger for logger in known if logger.name.partition(".")[0] != "moerl")]


def _writes_to_terminal(handler: logging.Handler) -> bool:
    streams = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    # Not isinstance: file handlers are StreamHandlers too, and go to a stream of their own.
    return getattr(handler, "stream", None) in streams
