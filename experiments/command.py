"""The one way a command starts and ends.

A Hydra config goes in; progress goes to stderr, and the last line of stdout is one
JSON object: what `main` returns, unless it returns None, having printed its own. Exit
status: 0 done, 2 the caller's mistake, 1 a fault, 130 an interrupt (Ctrl-C or SIGTERM).

In a multirun each job prints its object, or `{"error": ...}`. One that fails does not keep the
others from running; the exit status is that of the first failure.
"""

import functools
import hashlib
import json
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from forge_jax.config import UserError

# The folder of a run: the one to continue, or else a fresh one.
OmegaConf.register_new_resolver("run_folder", lambda resume, fresh: resume or fresh)
# The folder of a job in its multirun: the same call finds it again.
OmegaConf.register_new_resolver("run_name", lambda overrides: run_name(overrides))
INTERRUPTED = 130
LONGEST_NAME = 120  # characters of such a folder
CONFIGS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "configs")

# What the caller can mend; an unsupported case names the way out.
MISTAKES = (UserError, NotImplementedError, HydraException, OmegaConfBaseException)

Main = Callable[[dict[str, Any]], Mapping[str, Any] | None]


class Ended(SystemExit):
    """The end of the process, and the line that says why."""

    code: int

    def __init__(self, status: int, said: str):
        super().__init__(status)
        self.said = said


class JobFailed(Exception):
    """A job of a multirun that has ended with a status other than 0, and said why."""

    def __init__(self, status: int, said: str):
        super().__init__(status, said)
        self.status, self.said = status, said


def run_name(overrides: Iterable[str]) -> str:
    """Overrides as the name of a folder, whatever their order: `sched.window=0,seed=1`.

    `+experiment=NAME`, which the folder above is for, is left out.
    """
    plain = (override.lstrip("+").removeprefix("plain.") for override in overrides)
    told = sorted(override for override in plain if not override.startswith("experiment="))
    name = re.sub(r"[^\w.=,+-]", "_", ",".join(told)) or "default"
    if len(name) <= LONGEST_NAME:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{name[: LONGEST_NAME - 9]}-{digest}"


def command(
    config_name: str,
    plain: tuple[str, ...] = ("model",),
    texts: tuple[str, ...] = (),
    refined: tuple[str, ...] = (),
    listed: tuple[str, ...] = (),
) -> Callable[[Main], Callable[[], None]]:
    """Decorates ``main(mapping) -> JSON-able mapping`` into a Hydra entry point.

    Keys of `plain` take any value. Hydra would read `model=X` as a choice among the files
    of `configs/model/`, but a model may be any folder. The mappings named in `texts` take new
    keys, ``texts.NAME=VALUE``, whose values are the text after the sign, whatever Hydra would
    read into it; so are the values of keys of `plain` that are named there. Of the groups named in
    `refined`, ``GROUP=FILE:MORE`` chooses a file and sets the key of the group's name to all of
    ``FILE:MORE``. Keys of `listed` take ``A,B``, which Hydra would run one after the other, as the
    list ``[A,B]``.
    """

    def decorate(main: Main) -> Callable[[], None]:
        @hydra.main(version_base="1.3", config_path=CONFIGS, config_name=config_name)
        @functools.wraps(main)
        def entry(cfg: DictConfig) -> None:
            with one_of_many(), complaining():
                mapping = OmegaConf.to_container(
                    _unwrapped(cfg), resolve=True, throw_on_missing=True
                )
                result = main(mapping)  # type: ignore[arg-type]
            if result is not None:
                print(json.dumps(result), flush=True)

        @functools.wraps(main)
        def run() -> None:
            # Hydra then raises instead of printing a trace and exiting with 1 itself.
            os.environ["HYDRA_FULL_ERROR"] = "1"
            sys.argv[1:] = [
                _wrapped(part, plain, texts)
                for argument in sys.argv[1:]
                for part in _parts(_as_list(argument, listed), refined)
            ]
            with complaining(), terminable():
                _refuse_no_file(sys.argv[1:])
                entry()

        return run

    return decorate


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM is an interrupt inside, as Ctrl-C is: whatever runs is ended and cleared away."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are not ours to handle
        return
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: object) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # begun in the background
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGINT)  # an event loop handles that by cancelling its task


@contextmanager
def one_of_many() -> Iterator[None]:
    """A job of a multirun that ends badly inside raises JobFailed, and Hydra goes on to the next;
    an interrupt ends all."""
    try:
        yield
    except Ended as ended:
        if HydraConfig.get().mode != RunMode.MULTIRUN or ended.code == INTERRUPTED:
            raise
        print(json.dumps({"error": ended.said}), flush=True)
        raise JobFailed(int(ended.code), ended.said) from None


@contextmanager
def complaining(then: str = "") -> Iterator[None]:
    """Ends the process on what goes wrong inside: status 2 and one line on the caller's
    mistake, 1 and a trace on a fault, 130 on an interrupt; the last two lead to `then`.

    Also inside the job, where Hydra would add lines of its own.
    """
    try:
        yield
    except KeyboardInterrupt:
        _end(INTERRUPTED, "interrupted", then)
    except JobFailed as job:
        _end(job.status, f"a job of the multirun failed: {job.said}")
    except Exception as error:
        mistake = _mistake(error)
        if mistake is not None:
            lines = [line.strip() for line in str(mistake).splitlines() if line.strip()]
            _end(2, f"error: {'; '.join(lines)}")
        traceback.print_exception(error)
        cause = _first(error)
        _end(1, f"fault: {type(cause).__name__}: {cause}", then)


def _end(status: int, *lines: str) -> NoReturn:
    print("\n".join(filter(None, lines)), file=sys.stderr, flush=True)
    raise Ended(status, lines[0].removeprefix("error: "))


def _first(error: BaseException) -> BaseException:
    """The first error that is not a group of errors."""
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def _as_list(argument: str, listed: tuple[str, ...]) -> str:
    """`KEY=A,B` as the list it means, under a key of `listed`; else the argument itself."""
    key, _, value = argument.partition("=")
    if key not in listed:
        return argument
    if not value.startswith("["):
        value = f"[{','.join(map(_quoted, value.split(',')))}]"
    return f"++plain.{key}={value}"  # out of the reach of Hydra's group of that name


def _parts(argument: str, refined: tuple[str, ...]) -> list[str]:
    """The choice of a group's file, and the value that refines it; else the argument itself."""
    key, _, value = argument.partition("=")
    file, more, _ = value.partition(":")
    if key in refined and more:
        return [f"{key}={file}", f"++plain.{key}={_quoted(value)}"]
    return [argument]


def _wrapped(argument: str, plain: tuple[str, ...], texts: tuple[str, ...]) -> str:
    """An override of a plain key out of the reach of Hydra's groups; a text in quotes."""
    key, sign, value = argument.partition("=")
    if key in plain:
        return f"++plain.{key}={_quoted(value)}" if key in texts else f"++plain.{argument}"
    if sign and "." in key and key.partition(".")[0] in texts:
        return f"++{key}={_quoted(value)}"
    return argument


def _refuse_no_file(arguments: Sequence[str]) -> None:
    """Raises UserError on ``GROUP=null``, which Hydra takes for a fault of its own."""
    for argument in arguments:
        group, _, value = argument.partition("=")
        if value == "null" and group and os.path.isdir(os.path.join(CONFIGS, group)):
            raise UserError(f"{argument}: leave {group} out, or name a file of configs/{group}/")


def _quoted(text: str) -> str:
    """`text` as Hydra's grammar spells it, so that it is read back as it is.

    Backslashes count double before a quote and before `${`, which would be looked up.
    """

    def escape(found: re.Match[str]) -> str:
        slashes, last = found.groups()
        return 2 * slashes + ("\\" + last if last else "")

    return '"' + re.sub(r'(\\*)("|\$\{|\Z)', escape, text) + '"'


def _unwrapped(cfg: DictConfig) -> DictConfig:
    """`cfg` with wrapped values in their places. Raises OmegaConfBaseException where one
    has no place."""
    with open_dict(cfg):
        plain = cfg.pop("plain", {})
    merged = OmegaConf.merge(cfg, plain)
    assert isinstance(merged, DictConfig)
    return merged


def _mistake(error: Exception) -> Exception | None:
    """The caller's mistake that `error` is, or that all members of a group of errors are."""
    if isinstance(error, ExceptionGroup):
        mistakes = [_mistake(member) for member in error.exceptions]
        return mistakes[0] if all(mistakes) else None
    return error if isinstance(error, MISTAKES) else None
