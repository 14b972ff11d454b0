"""Read what `orbax_v1_writer.py` wrote by the stand-in for Orbax's second interface.

`python orbax_v1_reader.py FOLDER RESULT` reads each checkpoint where Orbax left it, and once more
after an import, and writes what is different as a list of texts, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

from holdfast.errors import HoldfastError
from holdfast.interop.orbax import v1 as ocp
from holdfast.interop.orbax.orbax_import import import_orbax
from tests.interop.orbax_v1_writer import Counter, items_shown, shown


def differences(place, expected, found):
    if isinstance(expected, dict) and isinstance(found, dict):
        names = sorted({*expected, *found}, key=str)
        return [
            text
            for name in names
            for text in differences(f"{place}/{name}", expected.get(name), found.get(name))
        ]
    return [] if expected == found else [f"{place}: expected {expected}, found {found}"]


def seen(place, expected, see, *arguments):
    """How what is seen differs from what is expected, or the error that it ended with."""
    try:
        found = see(*arguments)
    except (AssertionError, HoldfastError) as error:
        return [f"{place}: {type(error).__name__}: {error}"]
    return differences(place, expected, json.loads(json.dumps(found)))


def at_path(path):
    metadata = ocp.checkpointables_metadata(path)
    return {"tree": shown(ocp.load(path)), "custom": metadata.custom_metadata}


def items_at_path(path, names):
    metadata = ocp.checkpointables_metadata(path)
    assert sorted(metadata.metadata) == sorted(names), sorted(metadata.metadata)
    found = ocp.load_checkpointables(path, wanted(names))
    return {"items": items_shown(found), "custom": metadata.custom_metadata}


def wanted(names):
    return {name: Counter(0) if name == "count" else None for name in names}


def of_run(directory, steps):
    found = {}
    with ocp.training.Checkpointer(directory) as checkpointer:
        assert [one.step for one in checkpointer.checkpoints] == sorted(map(int, steps))
        for one in checkpointer.checkpoints:
            metadata = checkpointer.checkpointables_metadata(one)
            expected = steps[str(one.step)]
            if "tree" in expected:
                assert checkpointer.metadata(one).metadata.keys() == expected["tree"].keys()
                content = {"tree": shown(checkpointer.load(one))}
            else:
                assert sorted(metadata.metadata) == sorted(expected["items"]), metadata
                items = checkpointer.load_checkpointables(one, wanted(expected["items"]))
                content = {"items": items_shown(items)}
            content |= {"custom": metadata.custom_metadata, "metrics": metadata.metrics}
            found[str(one.step)] = content
        return {"steps": found, "custom": checkpointer.root_metadata().custom_metadata}


def main(folder, result):
    found = []
    for name, expected in json.loads((folder / "contents.json").read_text()).items():
        imported = folder / f"imported-{name}"
        found += seen(f"import {name}", None, import_orbax, folder / name, imported)
        for path in (folder / name, imported):
            if "steps" in expected:
                # The metadata of a run is given to its new manager.
                custom = expected["custom"] if path != imported else {}
                content = expected | {"custom": custom}
                found += seen(path, content, of_run, path, expected["steps"])
            elif "tree" in expected:
                found += seen(path, expected, at_path, path)
            else:
                found += seen(path, expected, items_at_path, path, expected["items"])
    result.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
