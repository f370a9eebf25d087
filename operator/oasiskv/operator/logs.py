"""One JSON object per line, so that a cluster's log store can search by service and object."""

import json
import logging
from datetime import UTC, datetime

PLAIN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "settings", "k8s_ref", "k8s_skip"}
"""What every record has, and what kopf adds for itself; the rest is ours."""


class JsonFormatter(logging.Formatter):
    """Writes a record as JSON, with its extra fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record's line."""
        made = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        made |= {key: value for key, value in vars(record).items() if key not in PLAIN}
        if record.exc_info:
            made["traceback"] = self.formatException(record.exc_info)
        return json.dumps(made, default=str)


def configure(level: str) -> None:
    """Send everything that is logged to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # It says much of what it does for each event, and that signals are not its own.
    logging.getLogger("kopf").setLevel(logging.WARNING)
    logging.getLogger("kopf._core.reactor.running").setLevel(logging.ERROR)
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
