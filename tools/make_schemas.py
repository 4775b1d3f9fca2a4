"""Write the JSON Schemas of `Job` and `Estimate` that ship with moecost.

    python tools/make_schemas.py            # after a field changed
    python tools/make_schemas.py --check    # only says whether the files are current

A job's schema describes what may be written, an estimate's what comes out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from moecost import Estimate, Job

FOLDER = Path(__file__).parent.parent / "moecost" / "data" / "schemas"
DIALECT = "https://json-schema.org/draft/2020-12/schema"


def schemas() -> Mapping[str, str]:
    """Text of each file, by its name."""
    found = {
        "job.schema.json": Job.model_json_schema(mode="validation"),
        "estimate.schema.json": Estimate.model_json_schema(mode="serialization"),
    }
    return {name: json.dumps({"$schema": DIALECT, **schema}, indent=1) + "\n" for name, schema in found.items()}


def outdated() -> list[str]:
    """Names of files that are not what `schemas` says, or missing."""
    on_disk = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.json")}
    return [name for name, text in schemas().items() if on_disk.get(name) != text]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 where a file is out of date")
    if parser.parse_args().check:
        wrong = outdated()
        print(f"out of date: {', '.join(wrong)}; run python tools/make_schemas.py" if wrong else "current")
        return int(bool(wrong))
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in schemas().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
        print(f"written: {FOLDER / name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
