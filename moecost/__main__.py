"""`moecost` on the command line: needs the extra, `pip install 'moecost[cli]'`."""

from __future__ import annotations

import io
import sys
from importlib.util import find_spec


def main() -> None:
    """Run the command line; exit status 0 done, 1 does not fit, 2 bad input."""
    missing = [name for name in ("typer", "rich") if find_spec(name) is None]
    if missing:
        print(
            f"moecost: the command line needs {' and '.join(missing)}: pip install 'moecost[cli]'",
            file=sys.stderr,
        )
        raise SystemExit(2)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal may lack a character of someone's file name

    from moecost.cli import app

    app(prog_name="moecost")


if __name__ == "__main__":
    main()
