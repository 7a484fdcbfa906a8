"""A user's mistake, met at the door: one line that names the key, the value and what to write instead."""


class UserError(Exception):
    """Commands print its text without a traceback and exit with 2."""
