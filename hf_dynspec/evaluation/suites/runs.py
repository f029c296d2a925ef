"""The folder of an evaluation: its settings, and a line for everything that was measured.

Every process adds to a file of its own, so that a process which is killed costs the line that it was writing. They are
put together into `runs.jsonl` when an evaluation begins and when it ends, in the order of the prompts and systems,
however many processes there were.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import ConfigurationError
from ...fields import ChangedSettings
from ...files import append_json_line, read_whole_lines, replacing, write_json

SETTINGS, RUNS = "settings.json", "runs.jsonl"
_PARTS = "runs-of-process-*.jsonl"
# The kinds of lines. A session is the time for which one process worked.
SESSION, TIMED, PROFILE, COVERAGE, EXPECTED = "session", "timed", "profile", "coverage", "expected"

# What a line is of: its kind, prompt, system, temperature and repeat; of an expectation's, `k` of its recall in place
# of the repeat.
Key = tuple[str, str, str, float, int]


def key_of(line: Mapping[str, Any]) -> Key:
    """What a line is of."""
    return line["kind"], line["prompt"], line["system"], line["temperature"], line["repeat"]


class RunMemory:
    """The lines of a run in memory, with counts as `DraftingStatistics`."""

    def __init__(self) -> None:
        self.lines: dict[Key, dict[str, Any]] = {}

    def drop(self, keys: Iterable[Key]) -> None:
        """Forget lines, as what they are of has to be measured anew."""
        for key in keys:
            self.lines.pop(key, None)

    def writer(self, process: int) -> Callable[[Mapping[str, Any]], None]:
        """Return the function that adds a line, to the file of one process if there are files."""
        return lambda line: self.lines.update({key_of(line): dict(line)})


class RunFolder(RunMemory):
    """The lines of an evaluation on the disk, in the folder `path`."""

    def __init__(self, path: Path):
        super().__init__()
        self.path = path
        self.sessions: list[dict[str, Any]] = []

    def require_settings(self, fingerprint: Mapping[str, Any]) -> None:
        """Note the settings of an evaluation that begins. Raises `ChangedSettings` if the folder holds one with
        others, and `ConfigurationError` if it holds something else."""
        path = self.path / SETTINGS
        wanted = json.loads(json.dumps(fingerprint))
        if not path.exists():
            if (self.path / RUNS).exists():
                raise ConfigurationError(f"{self.path} has a {RUNS} and no {SETTINGS}; choose another folder")
            write_json(path, wanted)
            return
        found, wanted = _one_by_one(read_settings(self.path)), _one_by_one(wanted)
        differing = [name for name in {**wanted, **found} if wanted.get(name) != found.get(name)]
        if differing:
            raise ChangedSettings(
                f"{self.path} holds an evaluation with other settings",
                {name: (found.get(name), wanted.get(name)) for name in differing},
                "choose another folder, or give the same settings",
            )

    def read(self) -> None:
        """Read all lines. Raises `ArtifactError` if one is damaged."""
        self.sessions, self.lines = [], {}
        merged = self.path / RUNS
        for file in (*[merged] * merged.exists(), *sorted(self.path.glob(_PARTS))):
            for line in read_whole_lines(file):
                if line.get("kind") == SESSION:
                    self.sessions.append(line)
                else:
                    # What was measured anew counts.
                    self.lines[key_of(line)] = line

    @property
    def systems(self) -> list[str]:
        """The labels of the systems that ran, in their order."""
        return list(self.described_systems)

    @property
    def described_systems(self) -> dict[str, dict[str, Any]]:
        """By label what each system is: its `drafter`, its `method` and its `tree`, all None for a baseline."""
        return {one["label"]: one for session in self.sessions for one in session["systems"]}

    @property
    def is_finished(self) -> bool:
        """Whether an evaluation came to its end here, and all lines that it left are there."""
        return bool(self.sessions) and self.sessions[-1].get("lines_at_the_end") == len(self.lines)

    def put_together(self, prompts: Sequence[str], finished: str | None = None) -> None:
        """Read all lines, and replace the files that they are in by one, in the order of the prompts' identifiers.
        `finished` is the UTC time in ISO format if the evaluation came to its end. Raises as `read`."""
        self.read()
        if finished is not None:
            self.sessions[-1]["provenance"]["finished"] = finished
            self.sessions[-1]["lines_at_the_end"] = len(self.lines)
        places = {name: number for number, name in enumerate(prompts)}
        columns = {name: number for number, name in enumerate(self.systems)}

        def place(key: Key) -> tuple:
            kind, prompt, system, temperature, repeat = key
            known = places.get(prompt, len(places)), columns.get(system, len(columns))
            return (kind != TIMED, kind, temperature, repeat, *known, prompt, system)

        ordered = [*self.sessions, *(self.lines[key] for key in sorted(self.lines, key=place))]
        with replacing(self.path / RUNS) as scratch:
            text = "".join(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n" for line in ordered)
            scratch.write_text(text, encoding="utf-8")
        for part in self.path.glob(_PARTS):
            part.unlink()

    def writer(self, process: int) -> Callable[[Mapping[str, Any]], None]:
        path = self.path / _PARTS.replace("*", str(process))

        def write(line: Mapping[str, Any]) -> None:
            drafting = {"drafting": line["drafting"].to_dict()} if "drafting" in line else {}
            append_json_line(path, {**line, **drafting})

        return write


def _one_by_one(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with what a table's rows were given by itself, as it is given."""
    return {**{name: value for name, value in settings.items() if name != "given"}, **settings.get("given", {})}


def read_settings(path: Path) -> dict[str, Any]:
    """The settings of the evaluation in a folder. Raises `ConfigurationError` if there is none."""
    try:
        found = json.loads((path / SETTINGS).read_bytes())
    except OSError as error:
        raise ConfigurationError(f"{path} holds no evaluation: {SETTINGS} cannot be read") from error
    except ValueError as error:
        raise ConfigurationError(f"{path / SETTINGS} is no JSON: {error!s:.100}") from error
    if not isinstance(found, dict) or "suite" not in found:
        raise ConfigurationError(f"{path / SETTINGS} is not of hf-dynspec evaluate; choose another folder")
    return found
