"""The tables of the papers, each as what it takes to measure it on another pair and other prompts.

MicroSpec: Chen et al. 2026, "MicroSpec: Accelerating Speculative Decoding with Lightweight In-Context Vocabularies".
EvoSpec: Zhang et al. 2026, "EvoSpec: Evolving Speculative Decoding via Real-Time Vocabulary and Parameter Adaptation".
DynaSpec: Zhang et al. 2025, "DynaSpec: Context-Aware Dynamic Speculative Sampling for Large-Vocabulary Language
Models". What their full-vocabulary rows call EAGLE is whatever drafter is given here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from string import Template

from ...errors import ConfigurationError, shown_value
from ..bench.systems import BASELINES, HEAD_PRODUCT, PLAIN
from .methods import Method

# What a user may give, and how it goes into a policy's text.
GIVEN = {"ranking": "ranking", "vocabtrim": "ranking", "router": "router", "coral": "router", "graph": "graph"}


@dataclass(frozen=True)
class Row:
    """A row of a table."""

    label: str  # what the paper calls it
    # What `parse_policy` understands, in which the names in `GIVEN`, such as `${ranking}`, and `${core}` stand for
    # settings that name what was given; None for a baseline of `bench`, whose name is the label.
    policy: str | None = None
    alignment: str | None = None  # a name in `methods.ALIGNMENTS`
    needs: tuple[str, ...] = ()  # names in `GIVEN`, without which the row is left out
    omitted: str | None = None  # why the row cannot be measured here; None where it can


@dataclass(frozen=True)
class PaperTable:
    """A table of a paper."""

    title: str  # the paper and the table's number
    shows: str  # what it is about
    rows: tuple[Row, ...]  # in the paper's order; those of this package's own settings come last
    # Figures (see `figures.summarize`) that have a column for each domain, and one for their mean.
    by_domain: tuple[str, ...] = ()
    overall: tuple[str, ...] = ()  # figures that have one column, a mean over domains
    # The label of the row that the first figure is divided by (None: there is no such column).
    compared_with: str | None = None
    suite: str = "domains"  # whose prompts it is measured on, unless told otherwise
    temperatures: tuple[float, ...] = (0.0,)  # likewise
    recall_k: tuple[int, ...] = (10,)  # see `SuiteSettings.recall_k`


SPEED, LENGTH, SIZE, MEMORY = "tokens_per_second", "expected_length", "shortlist_size", "training_bytes"
# Prompts whose greedy text is shorter are left out: of a token or two nothing can be learnt about drafts.
LEAST_TOKENS = 8
# Of rows without expectations, such as those whose drafter is aligned while it generates: the same in generation.
IN_GENERATION = {LENGTH: "counted_length", SIZE: "active_vocabulary"}

_PLAIN, _PLAIN_WITH_PRODUCT = Row(BASELINES[PLAIN]), Row(BASELINES[HEAD_PRODUCT])
_FULL = Row("full vocabulary", "full")
_FR_SPEC = Row("FR-Spec, 32k", "frequency:${ranking}size=32768")
# The papers name VocabTrim beside FR-Spec, and measure it nowhere: the same list of tokens counted in what the target
# generates.
_VOCABTRIM = Row("VocabTrim, 32k", "frequency:${vocabtrim}size=32768", needs=("vocabtrim",))
_CORAL = Row("CORAL", "coral:${coral}", needs=("coral",))
# The router's first budget is what `train router --share` found; DynaSpec's formula is section 4.2's.
_DYNASPEC = Row("DynaSpec", "router:${router}schedule=dynaspec", needs=("router",))
_OWN_DYNASPEC = Row("DynaSpec's router, this package's settings", "router:${router}", needs=("router",))
_MICROSPEC = Row("MicroSpec", "in_context:window=3072")
_HYBRID = Row("hybrid (this package's default)", "hybrid:${ranking}")
# Rows that no paper has.
_ADDED = (_VOCABTRIM, _OWN_DYNASPEC, _HYBRID)
# EvoSpec's table 5: the static list, which its FR-Spec is; and retrieval, with any places for what is retrieved.
_STATIC_CORE = Row("FR-Spec, 32k", "frequency:${ranking}size=32000")
_PRINTED = (
    "size=32000,likely=10,semantic=index,trigger=oov,cache=arc,prompt_positions=0,displaceable=0,candidates=none,"
    "dynamic="
)
_RETRIEVAL = "retrieval:${core}${graph}" + _PRINTED
_EVOSPEC = Row("EvoSpec, as printed", _RETRIEVAL + "256", alignment="paper")
_OWN_EVOSPEC = Row("EvoSpec, this package's settings", "retrieval:${core}${graph}size=32768", alignment="default")

PAPER_TABLES = {
    "microspec-2": PaperTable(
        "MicroSpec, table 2",
        "speed and acceptance length by task",
        (_PLAIN, _PLAIN_WITH_PRODUCT, _FULL, _CORAL, _FR_SPEC, _DYNASPEC, _MICROSPEC, *_ADDED),
        by_domain=(SPEED,),
        overall=(LENGTH, SIZE),
        compared_with=_PLAIN.label,
    ),
    "microspec-3": PaperTable(
        "MicroSpec, table 3",
        "what the prompt and what the target finds likely bring",
        (
            _FULL,
            Row("Ctx. only, and what was generated", "in_context:window=3072,verify_top_k=0"),
            Row("Ext. only", omitted="the window always holds the tokens of the text"),
            Row("Ctx. + Ext., indexed GEMM", omitted="rows are always packed, and only those that are new are copied"),
            Row("Ctx. + Ext.", "in_context:window=3072"),
        ),
        by_domain=(LENGTH,),
        overall=(SPEED, SIZE),
    ),
    "evospec-1": PaperTable(
        "EvoSpec, table 1",
        "acceptance length on general tasks by the size of the dynamic vocabulary, drafters as they are",
        (
            _FULL,
            _STATIC_CORE,
            *(Row(f"+ dynamic {size}", f"{_RETRIEVAL}{size}") for size in (256, 512, 1024)),
            Row("+ dynamic 256, this package's settings", "retrieval:${core}${graph}size=32768"),
        ),
        by_domain=(LENGTH,),
        overall=(SIZE,),
        compared_with=_FULL.label,
    ),
    "evospec-2": PaperTable(
        "EvoSpec, table 2",
        "speed on specialised texts",
        (_FULL, _STATIC_CORE, _CORAL, _EVOSPEC, _OWN_EVOSPEC, _HYBRID),
        by_domain=(SPEED,),
        overall=(LENGTH,),
        compared_with=_FULL.label,
    ),
    "evospec-4": PaperTable(
        "EvoSpec, table 4",
        "memory of online alignment: gradients and the optimizer's state, with the full vocabulary",
        (
            Row("OSD, all parameters", "full", alignment="osd"),
            Row("EvoSpec, as printed", "full", alignment="paper"),
            Row("EvoSpec, this package's settings", "full", alignment="default"),
        ),
        by_domain=(MEMORY,),
        overall=(LENGTH,),
        compared_with="OSD, all parameters",
    ),
    "evospec-6": PaperTable(
        "EvoSpec, table 6",
        "what the shortlist holds of the target's probability, and of its likeliest tokens",
        (
            _STATIC_CORE,
            Row("32k + HNSW", "retrieval:${core}" + _PRINTED + "256"),
            Row("32k + HNSW + graph", _RETRIEVAL + "256", needs=("graph",)),
            Row("EvoSpec, full system", omitted="policies are led along given texts here, by a drafter that stays"),
            Row("this package's retrieval", "retrieval:${core}${graph}size=32768"),
            _HYBRID,
        ),
        overall=("mass", "oracle_mass", "recall@10", "recall@50", "recall@100", "shortlist_size"),
        recall_k=(10, 50, 100),
    ),
    "evospec-7": PaperTable(
        "EvoSpec, table 7",
        "long conversations",
        (_FULL, _STATIC_CORE, _EVOSPEC, _OWN_EVOSPEC, _HYBRID),
        overall=(LENGTH, SPEED),
        suite="multi-turn",
    ),
    "evospec-10": PaperTable(
        "EvoSpec, table 10",
        "sampling from all tokens",
        (_FULL, _STATIC_CORE, _CORAL, _EVOSPEC, _OWN_EVOSPEC, _HYBRID),
        overall=(SPEED, LENGTH),
        compared_with=_STATIC_CORE.label,
        temperatures=(0.7, 1.0),
    ),
    "dynaspec-1": PaperTable(
        "DynaSpec, table 1",
        "acceptance length and shortlist size by task",
        (_FULL, _FR_SPEC, _DYNASPEC, *_ADDED),
        by_domain=(LENGTH, SIZE),
        compared_with=_FULL.label,
    ),
    "dynaspec-2": PaperTable(
        "DynaSpec, table 2",
        "frequency lists of one size, and of sizes that shrink with the draft's depth",
        (
            Row("FR-Spec-F", "frequency:${ranking}size=32768"),
            # In chains of 5 it has 31,730 tokens on average; in the paper 31,739.
            Row("FR-Spec-PA", "frequency:${ranking}size=57000,position_aware=true"),
        ),
        by_domain=(LENGTH,),
        overall=(SIZE,),
        compared_with="FR-Spec-F",
    ),
}


def paper_table(name: str) -> PaperTable:
    """The table of that name. Raises `ConfigurationError` if there is none."""
    if name not in PAPER_TABLES:
        raise ConfigurationError(f"there is no table {shown_value(name)}; the tables are {', '.join(PAPER_TABLES)}")
    return PAPER_TABLES[name]


def table_methods(table: PaperTable, given: Mapping[str, str]) -> tuple[Method, ...]:
    """How those rows of a table draft that can be measured with what the user has: by the names in `GIVEN`, folders,
    in which `{domain}` may stand for the domain."""
    words = {name: f"{setting}={given[name]}," if given.get(name) else "" for name, setting in GIVEN.items()}
    words["core"] = words["ranking"].replace("ranking=", "core=", 1)
    rows = [row for row in table.rows if row.policy is not None and why_left_out(row, given) is None]
    return tuple(Method(row.label, Template(row.policy).substitute(words).rstrip(",:"), row.alignment) for row in rows)


def why_left_out(row: Row, given: Mapping[str, str]) -> str | None:
    """Why a row cannot be measured; None where it can."""
    missing = [name for name in row.needs if not given.get(name)]
    return row.omitted or (f"no --{missing[0]} was given" if missing else None)
