"""The settings of online alignment: what is refused, and the presets."""

from dataclasses import fields

import pytest

from hf_dynspec import ConfigurationError, OnlineAlignment
from hf_dynspec.alignment.statistics import AlignmentStatistics


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("modules", "q_proj"),
        ("modules", ()),
        ("modules", ("q_proj", 3)),
        ("modules", None),
        ("rank", 0),
        ("alpha", 0.0),
        ("learning_rate", -1e-3),
        ("learning_rate", float("nan")),
        ("learning_rate", float("inf")),
        ("learning_rate", "fast"),
        ("steps", 0),
        ("batch", 1.5),
        ("objective", "kl"),
        ("support", "all"),
        ("horizon", 65),
        ("decay", -0.1),
        ("temperature", 0),
        ("top_k", 0),
        ("buffer", True),
        ("buffer_bytes", 0),
        ("context", 0),
        ("fill", "none"),
        ("update_at", "always"),
        ("align_threshold", -1),
        ("background", 1),
        ("synchronous", None),
        ("max_overhead", 0),
        ("max_overhead", 1.5),
        ("gate", "on"),
        ("gate_window", 0),
        ("gate_least", 9),
        ("seed", -1),
    ],
)
def test_a_setting_that_cannot_be_is_named(name, value):
    with pytest.raises(ConfigurationError, match=rf"^{name}: .*Give "):
        OnlineAlignment(**{name: value})


def test_background_and_synchronous_exclude_each_other():
    with pytest.raises(ConfigurationError, match=r"background.*synchronous"):
        OnlineAlignment(background=True, synchronous=True)


def test_presets_are_what_was_printed():
    paper = OnlineAlignment.paper()
    table_5 = {"modules": ("q_proj", "v_proj"), "rank": 32, "alpha": 32, "learning_rate": 1e-5, "temperature": 1.0}
    table_5 |= {"decay": 0.3, "buffer": 32, "horizon": 6, "support": "kept", "objective": "horizon_kl", "fill": "gate"}
    table_5 |= {"update_at": "full_buffer"}
    assert {name: getattr(paper, name) for name in table_5} == table_5
    assert OnlineAlignment.osd().trains_all_parameters and OnlineAlignment.osd().objective == "cross_entropy"
    assert OnlineAlignment.paper(rank=8, seed=3).rank == 8
    with pytest.raises(ConfigurationError, match="rank"):
        OnlineAlignment.osd(rank=0)
    assert len({OnlineAlignment(), paper, OnlineAlignment.osd()}) == 3
    assert all(field.name in OnlineAlignment.__doc__ for field in fields(OnlineAlignment))


def test_statistics_are_printed_in_lines():
    new = str(AlignmentStatistics()).splitlines()
    assert [line.split("  ")[0] for line in new] == [
        "requests learnt from",
        "updates",
        "acceptance before",
        "acceptance after",
        "drafts with",
        "time",
        "memory",
    ]
    assert new[2].endswith("not scored yet") and new[4].endswith("the drafter's own weights")
    measured = {"acceptance_before": 0.59484, "acceptance_after": 0.73325, "is_served": True}
    stats = AlignmentStatistics(4, 4, 2, 1, **measured, seconds=0.4366, generation_seconds=7.5373, error="a full disk")
    lines = dict(map(str.strip, line.split("  ", 1)) for line in str(stats).splitlines())
    assert lines["updates"] == "4 (2 served, 1 rolled back)" and lines["acceptance before"] == "0.595"
    assert lines["acceptance after"] == "0.733" and lines["drafts with"] == "what was learnt"
    assert lines["time"] == "0.44 s, 5.8% of generation's" and lines["turned off by"] == "a full disk"
    assert max(map(len, str(stats).splitlines())) < 80
