"""Shortens errors about a user's input to one sentence instead of a traceback."""

import os
import re
import signal
import sys
from collections.abc import Callable
from pydoc import locate
from typing import Any, is_typeddict

from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException

WRONG_SIZE = "doesn't match model"  # timm's assertion about an image


class ExperimentFailed(RuntimeError):
    """Some nodes of an experiment failed; the message has a sentence for each reason."""


def require_at_least(least: int, **options: int | None) -> None:
    """Refuse a number on the command line that is too small; None was not given.

    Raises:
        ValueError: naming the option, as it is typed, and its value.
    """
    for name, number in options.items():
        if number is not None and number < least:
            raise ValueError(f"--{name} {number}: expected at least {least}")


def console(run: Callable[[], Any], resume: str = "the same command continues") -> None:
    """Run a command; print an error about its input in one line instead of a traceback.

    `resume` says after Ctrl-C and SIGTERM how to go on; "" says nothing.
    The environment variable RECIPES_TRACEBACK=1 brings the traceback back.
    """
    how = f": {resume}" if resume else ""
    try:
        run()
    except KeyboardInterrupt:
        sys.exit(f"interrupted{how}")
    except SIGTERMException:  # its own exit code is 0, which would mean success
        print(f"ended by SIGTERM{how}", file=sys.stderr)
        sys.exit(128 + signal.SIGTERM)
    except Exception as error:
        reason = sentence(error)
        if reason is None or os.environ.get("RECIPES_TRACEBACK"):
            raise
        print(f"error: {reason}\n(RECIPES_TRACEBACK=1 shows where)", file=sys.stderr)
        sys.exit(2)


def sentence(error: BaseException) -> str | None:
    """The message of an error that an input caused; None for any other, which is a bug."""
    expected = (ValueError, OSError, MisconfigurationException, ExperimentFailed)
    reason = str(error)
    if isinstance(error, AssertionError) and WRONG_SIZE in reason:
        return (
            f"{reason} Set data.image_size to the model's, or img_size in model.model_args (of "
            "ALBEF: image_size in model.sizes)."
        )
    if not isinstance(error, expected):
        return None
    # an error in a DataLoader's worker contains that worker's whole traceback
    return re.split(r"Original Traceback.*\n\w+Error: ", reason, flags=re.S)[-1].strip()


def shortened(message: str) -> str:
    """jsonargparse's message in one line: the setting, its value, what was expected.

    For a union of types jsonargparse gives nested reasons why the value fits no member; only the
    innermost are kept.
    """
    message = message.removeprefix('Parser key "config": ')
    key = _key(message)
    if unknown := re.search(r"Option '([^']+)' is not accepted", message):
        part = key.partition(".")[0] or "model"
        return f"{key}.{unknown[1]} is no setting: --{part}.help lists those that there are"
    if unknown := re.search(r"Unexpected keys: \{'([^']+)'", message):  # of a TypedDict
        named = map(locate, re.findall(r"<class '([\w.]+)'>", message[: unknown.start()]))
        known = [key for one in named if is_typeddict(one) for key in one.__annotations__]
        return f"{key}.{unknown[1]} is no setting: expected some of {', '.join(known)}"
    wrong = re.search(r"Problem with given class_path '([^']+)':\s*(.+)", message)
    if wrong and "Parser key" not in message[wrong.start() :]:
        return f"{key} names {wrong[1]!r}: {wrong[2].strip()}"
    kinds = re.findall(r"Expected an? (.+?)(?:\. Got value.*)?$", _innermost(message), re.M)
    types = list(dict.fromkeys(map(_name, kinds)))
    if key and types:
        return f"{key} is {_value(message)}: expected {' or '.join(types)}"
    if message.startswith("the following arguments are required: fit."):
        return "no stage is named: give its file, such as -c recipes/matformer/matvit.yaml"
    if unknown := re.match(r"unrecognized arguments: (.*)", message):
        return f"{unknown[1]} is no setting: --help lists those that there are"
    if unknown := re.search(r"does not accept option '([^']+)'", message):
        return f"{unknown[1]} is no setting: --help lists those that there are"
    message = re.sub(r'^Parser key "([^"]+)":', r"\1:", message.strip())
    return re.sub(r"\s+", " ", message)


def refused(message: str) -> str | None:
    """The error that a class raised about its arguments, extracted from jsonargparse's message.

    For a type such as "LightningDataModule or None" jsonargparse lists the errors of all members
    and all settings; before that of a link's function it writes the function's arguments. None if
    the message is neither.
    """
    if linked := re.match(r"Call to compute_fn of link .*?\) failed: (.*)", message, flags=re.S):
        return linked[1]
    match = re.match(r"Does not validate against any.*?\n *- (.*?)\n *- ", message, flags=re.S)
    return match[1] if match else None


def _key(message: str) -> str:
    """The dotted key of the wrong setting, from "Parser key" lines of growing indentation."""
    parts: list[str] = []
    depth = -1
    for indent, name in re.findall(r'^([ -]*)Parser key "([^"]+)"', message, flags=re.M):
        if len(indent) > depth:
            parts.append(name)
            depth = len(indent)
    return ".".join(parts).replace(".init_args", "")


def _innermost(message: str) -> str:
    """The lines after the last "Parser key" that are indented more than it."""
    lines = message.splitlines()
    places = [i for i, line in enumerate(lines) if "Parser key" in line]
    if not places:
        return message
    depth = len(lines[places[-1]]) - len(lines[places[-1]].lstrip(" -"))
    inner = []
    for line in lines[places[-1] + 1 :]:
        if len(line) - len(line.lstrip(" -")) <= depth and depth > 0:
            break
        inner.append(line)
    return "\n".join(inner)


def _name(kind: str) -> str:
    """A type as a user would write it in YAML."""
    if literal := re.match(r"typing\.Literal\[(.*)\]", kind):
        return literal[1].replace("', '", "' or '")
    kind = re.sub(r"<class '(?:[\w.]*\.)?(\w+)'>", r"\1", kind)
    return {"NoneType": "null"}.get(kind, kind)


def _value(message: str) -> str:
    """The value that was refused."""
    for pattern in (
        r"Got value: (.*)",
        r"NestedArg\(key='[^']*', val=(.*)\)",
        r"Given value: (.*)",
    ):
        if given := re.search(pattern, message):
            return given[1]
    return "of another type"
