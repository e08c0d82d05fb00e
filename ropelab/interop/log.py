"""The log of a server's plugin: each message once."""

import logging

_said: set[str] = set()


def say(level: str, message: str, logger: str = "vllm.ropelab", **more) -> None:
    """Log a message, once in a process.

    Args:
        level: "info" or "warning".
        logger: a name below the server's own logger, whose handlers then print the message.
        more: as for ``logging.Logger.log``.
    """
    if message not in _said:
        _said.add(message)
        logging.getLogger(logger).log(logging.getLevelNamesMapping()[level.upper()], "ropelab: %s", message, **more)
