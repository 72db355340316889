"""The one exception of the emulator."""


class EmulatorError(RuntimeError):
    """The kernel did something wrong, or something the emulator does not know."""
