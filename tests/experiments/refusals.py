"""Commands that refuse, run in this process: the imports of another would take seconds each."""

import io
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from unittest import mock

import pytest

# Hydra's set-up of logging would close the handlers of this process, and their streams.
QUIET = ("hydra.job_logging.root=null", "hydra.hydra_logging.root=null")


def refused(main: Callable[[], None], *overrides: str) -> str:
    """The one line of complaint of a command that ends with status 2 and says no more."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["command", *QUIET, *overrides]),
        redirect_stdout(out),
        redirect_stderr(err),
        pytest.raises(SystemExit) as ended,
    ):
        main()
    assert (ended.value.code, out.getvalue()) == (2, ""), err.getvalue()
    [line] = err.getvalue().splitlines()
    assert line.startswith("error: ")
    return line
