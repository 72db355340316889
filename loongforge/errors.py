"""What a command of the tools prints as one line without a traceback."""


class UsageError(ValueError):
    """Something the user can put right; the message says what was expected, what came and what to do."""
