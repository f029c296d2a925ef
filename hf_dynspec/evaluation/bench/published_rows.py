"""Rows for an artifact's model card from the JSON files of `hf-dynspec bench` and `hf-dynspec coverage`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...artifacts.config import ARTIFACT_SYSTEM
from ...errors import ConfigurationError, counted
from ...shortlists import ShortlistPolicy
from ...tree_config import AUTO, TreeConfig
from ..provenance import cpu_threads, describe_policies
from ..tables import decoding
from ..tree_text import format_tree
from .systems import BASELINES, HEAD_PRODUCT, PLAIN


def read_published_rows(path: Path, policy: ShortlistPolicy) -> list[dict[str, Any]]:
    """The figures of a measurement as rows of `DynSpecConfig.results`, over all domains together.

    The policy that is published is called `ARTIFACT_SYSTEM`, by its tensors and not by its name, with those settings
    that were measured with other values; what it was compared with keeps its label.

    Args:
        path: what `--json` of `hf-dynspec bench` or `hf-dynspec coverage` wrote.
        policy: the artifact's.

    Raises:
        ConfigurationError: the file cannot be read, is of something else, of a run that was interrupted, or of other
            policies than this one.
    """
    try:
        data = json.loads(path.read_bytes())
        rows = _benchmark_rows if "generations" in data else _coverage_rows
        conditions = {"workload": workload(data), "hardware": hardware_of(data), "generation": generation_of(data)}
        if data["complete"] is not True:
            raise ConfigurationError(f"{path} is of a run that was interrupted; run the measurement to its end")
        names = _artifact_names(path, data["policies"], policy)
        found = rows(data, lambda label: names.get(label, label))
        return [{key: value for key, value in {**row, **conditions}.items() if value is not None} for row in found]
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(
            f"{path} is not what --json of hf-dynspec bench or hf-dynspec coverage writes; give what they wrote"
        ) from error


def _artifact_names(path: Path, policies: dict[str, Any], policy: ShortlistPolicy) -> dict[str, str]:
    """What the measured policies that are the artifact's are called, by their labels."""
    (own,) = describe_policies({"": policy}).values()
    own = json.loads(json.dumps(own))
    names = {}
    for label, measured in policies.items():
        if measured.get("name") != own["name"] or measured.get("tensors", {}) != own["tensors"]:
            continue
        changed = [
            f"{key}={value}" for key, value in measured["settings"].items() if own["settings"].get(key) != value
        ]
        names[label] = f"{ARTIFACT_SYSTEM} with {', '.join(changed)}" if changed else ARTIFACT_SYSTEM
    if not names:
        raise ConfigurationError(
            f"{path} does not measure this artifact's {own['name']} policy with its tensors, but "
            f"{', '.join(policies) or 'nothing'}; measure with the folder that is published"
        )
    return names


def workload(data: dict[str, Any]) -> str:
    """Which prompts a measurement was made on, and how many."""
    files = ", ".join(Path(name).stem for name in data["settings"]["prompts"]) or "prompts"
    prompts, texts = len(data["prompts"]), data["settings"].get("continuations", 1)
    each = "" if texts == 1 else f", {texts} continuations each"
    stream = ", as a stream" if data["settings"].get("stream") else ""
    return f"{files}, {counted(prompts, 'prompt')}{each}{stream}"


def hardware_of(data: dict[str, Any]) -> str:
    """The processor of a measurement, its threads and the target's dtype."""
    hardware, target = data["provenance"]["hardware"], data["models"]["target"]
    processor = hardware["gpus"][0] if target["device"].startswith("cuda") else hardware["cpu"]
    return f"{processor}, {cpu_threads(hardware['threads'])}, {target['dtype']}"


def generation_of(data: dict[str, Any]) -> str:
    """How many tokens were generated, and drafted in a chain."""
    settings = data["settings"]
    length = settings["num_assistant_tokens"]
    chains = "chains as long as pays" if length == AUTO else f"chains of {length}"
    return f"{counted(settings['max_new_tokens'], 'new token')}, {chains} unless trees"


def _benchmark_rows(data: dict[str, Any], named: Callable[[str], str]) -> list[dict[str, Any]]:
    as_they_are = ("acceptance_length", "active_vocabulary", "draft_ms_per_round", "coverage")
    return [
        {
            "measurement": "benchmark",
            "decoding": decoding(row["temperature"], data["settings"]["top_k"]),
            "system": _system(data["systems"], row["system"], named),
            "tokens_per_second": row["tokens_per_second"]["median"],
            "speedup": row["ratios"][PLAIN]["median"],
            "speedup_over_plain_with_head_product": row["ratios"].get(HEAD_PRODUCT, {}).get("median"),
            **{name: row.get(name) for name in as_they_are},
        }
        for row in data["results"]
        if row["domain"] is None and "tokens_per_second" in row
    ]


def _system(systems: dict[str, Any], label: str, named: Callable[[str], str]) -> str:
    """A system's label with the policy called by its name; a drafter is told where there are several."""
    if label not in systems:
        return BASELINES[label]
    made_of = systems[label]
    parts = [made_of["drafter"]] if len({one["drafter"] for one in systems.values()}) > 1 else []
    parts.append(named(made_of["policy"]))
    if made_of["tree"] is not None:
        parts.append(f"tree {format_tree(TreeConfig(**made_of['tree']))}")
    return " · ".join(parts)


def _coverage_rows(data: dict[str, Any], named: Callable[[str], str]) -> list[dict[str, Any]]:
    return [
        {
            "measurement": "coverage",
            "decoding": decoding(data["settings"]["temperature"]),
            "system": named(row["policy"]),
            "shortlist_size": row["figures"]["size"]["mean"],
            "mass": row["figures"]["mass"]["mean"],
            "oracle_mass": row["figures"]["oracle_mass"]["mean"],
            f"recall_at_{data['settings']['recall_k']}": row["figures"]["recall"]["mean"],
            "oov_rate": row["figures"]["oov"]["mean"],
            "acceptance_probability": row["figures"]["acceptance"]["mean"],
            "expected_acceptance_length": row["figures"]["acceptance_length"]["mean"],
        }
        for row in data["results"]
        if row["domain"] is None
    ]
