"""What a check raises, and what a user's mistake raises."""


class SkipCheck(Exception):
    """A check that does not apply to this model; the message says why."""


class ModelRaised(AssertionError):
    """The model raised where it should have answered; the cause is its own.

    An AssertionError, since inside a check it is a failure of the model.
    """


class UnusableModel(ValueError):
    """What was given cannot be built, called or read as a language model.

    The cause, where there is one, is the user's own exception.
    """


def sentence(error: BaseException) -> str:
    """Return an exception as one line: its class and its message."""
    text = " ".join(str(error).split())
    name = type(error).__name__
    return f"{name}: {text[:300]}" if text else name
