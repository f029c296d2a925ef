"""The semantic index: an HNSW graph over the rows of the target's LM head, searched with the target's hidden states.

It is built on this computer and stored under a digest of weights and settings. It is never downloaded, since hnswlib
trusts every file.
"""

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch

from ...errors import ConfigurationError, UnsupportedError
from ...files import replacing, write_json

# Rows that are added between two reports of progress.
_BATCH_ROWS = 2048
_RECALL_QUERIES = 256
_RECALL_AT = 10
# Synthetic queries are means of rows, as a hidden state lies between the rows of likely tokens. Single rows, with or
# without noise, are found much less well, and no model asks for them.
_ROWS_OF_A_QUERY = 4
_SYNTHETIC = f"means of {_ROWS_OF_A_QUERY} random rows"

# Called with the number of rows in the index and the number of all rows.
Report = Callable[[int, int], None]


@dataclass(frozen=True)
class IndexSettings:
    """How an index is built and searched.

    Args:
        links: `M` of HNSW: links of a row in each layer (EvoSpec, table 5: 32).
        build_breadth: candidates while a row is linked (`ef_construction`).
        search_breadth: candidates during a search (`ef`), at least as many as its results.
        seed: the seed of the rows' random layers.
        threads: threads that add rows. Several are faster; with one the index is reproducible.

    Raises:
        ConfigurationError: a number is out of range.
    """

    links: int = 32
    build_breadth: int = 200
    search_breadth: int = 128
    seed: int = 0
    threads: int = 1

    def __post_init__(self):
        for name, least in (("links", 2), ("build_breadth", 1), ("search_breadth", 1), ("seed", 0), ("threads", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= 2**16:
                raise ConfigurationError(f"{name} must be a whole number from {least} to {2**16}, got {value!r}")


class SemanticIndex:
    """Approximate search for the rows with the largest inner product with a query (EvoSpec, section 3.3).

    HNSW finds nearest neighbours. One more number makes all rows equally long (norm augmentation) and is 0 in queries,
    so that the nearest row has the largest inner product.

    Make one with `build` or `of_head`. Several threads may search at once. The index is immutable.

    Attributes:
        settings: the settings of the index and its searches.
        recall: recall@10 against exact search for synthetic queries, means of four random rows, measured at building.
            `measure_recall` measures it for hidden states.
    """

    def __init__(self, index: Any, settings: IndexSettings, recall: float):
        self._index = index
        self._index.set_ef(settings.search_breadth)
        self._index.set_num_threads(1)
        self.settings = settings
        self.recall = recall

    @classmethod
    def build(
        cls, rows: torch.Tensor, settings: IndexSettings | None = None, report: Report | None = None
    ) -> "SemanticIndex":
        """Build an index.

        Args:
            rows: floating point `[V, d]`, by token id.
            settings: the settings (None: the defaults).
            report: called with the progress (None: a bar shows it, unless the Hub's bars are switched off).

        Raises:
            UnsupportedError: hnswlib is not installed.
            ConfigurationError: there are no rows, or they are not finite.
        """
        settings = settings or IndexSettings()
        hnswlib = require_hnswlib()
        if rows.dim() != 2 or not rows.numel() or not bool(rows.isfinite().all()):
            raise ConfigurationError(f"an index is built of finite rows [V, d], got {list(rows.shape)}")
        rows = rows.detach()
        count, width = rows.shape
        lengths = torch.cat([part.float().pow(2).sum(1) for part in rows.split(_BATCH_ROWS)]).cpu()
        missing = (lengths.max() - lengths).sqrt()
        index = hnswlib.Index(space="l2", dim=width + 1)
        index.init_index(
            max_elements=count,
            M=settings.links,
            ef_construction=settings.build_breadth,
            random_seed=settings.seed,
        )
        with _progress(report) as report_progress:
            for first in range(0, count, _BATCH_ROWS):
                part = rows[first : first + _BATCH_ROWS].float().cpu()
                last = first + part.shape[0]
                longer = torch.cat([part, missing[first:last].unsqueeze(1)], dim=1)
                labels = torch.arange(first, last, device="cpu").numpy()
                index.add_items(longer.numpy(), labels, num_threads=settings.threads)
                report_progress(last, count)
        made = cls(index, settings, recall=0.0)
        made.recall = made.measure_recall(rows)
        return made

    @classmethod
    def of_head(
        cls,
        rows: torch.Tensor,
        settings: IndexSettings | None = None,
        report: Report | None = None,
        folder: str | os.PathLike | None = None,
    ) -> "SemanticIndex":
        """Return the index of these rows: the open one, else the stored one, else a new one, which is stored.

        Args:
            rows: as for `build`.
            settings: as for `build`.
            report: as for `build`; not called if the index exists.
            folder: the folder of stored indexes (None: `hf_dynspec/indexes` in the Hub's home folder).
        """
        settings = settings or IndexSettings()
        digest = _digest(rows, settings)
        place = Path(folder or _default_folder()) / digest
        with _locks.setdefault(digest, threading.Lock()):
            opened = (place, settings.search_breadth)
            found = _open.get(opened) or cls._read(place, rows.shape, settings)
            if found is None:
                found = cls.build(rows, settings, report)
                found._write(place)
            _open[opened] = found
            return found

    def search(self, queries: torch.Tensor, count: int) -> torch.Tensor:
        """Find rows.

        Args:
            queries: floating point `[n, d]`, on any device.
            count: rows to find for each query, bounded by the number of rows.

        Returns:
            int64 `[n, count]` on the CPU: token ids, largest inner product first.
        """
        count = min(count, self._index.get_current_count())
        asked = torch.nn.functional.pad(queries.detach().float().cpu(), (0, 1))
        if count > self.settings.search_breadth:
            raise ConfigurationError(f"search_breadth is {self.settings.search_breadth}, and {count} rows are wanted")
        labels, _ = self._index.knn_query(asked.numpy(), k=count)
        return torch.from_numpy(labels.astype("int64"))

    def measure_recall(self, rows: torch.Tensor, queries: torch.Tensor | None = None) -> float:
        """The share of the 10 rows with the largest inner products that the index finds.

        Args:
            rows: the rows of the index.
            queries: `[n, d]`, such as hidden states of the target (None: 256 means of four random rows).
        """
        if queries is None:
            generator = torch.Generator().manual_seed(0)
            chosen = torch.randint(rows.shape[0], (_ROWS_OF_A_QUERY, _RECALL_QUERIES), generator=generator)
            queries = rows[chosen.to(rows.device)].float().mean(0)
        wanted = min(_RECALL_AT, rows.shape[0])
        exact = _exact_search(rows, queries, wanted)
        found = self.search(queries, wanted)
        return float((exact.unsqueeze(2) == found.unsqueeze(1)).any(2).float().mean())

    @classmethod
    def _read(cls, place: Path, shape: torch.Size, settings: IndexSettings) -> "SemanticIndex | None":
        """The index in a folder, or None if there is no complete one."""
        hnswlib = require_hnswlib()
        try:
            about = json.loads((place / "index.json").read_text(encoding="utf-8"))
            if about["sha256"] != _digest_of_file(place / "index.bin"):
                return None
            index = hnswlib.Index(space="l2", dim=shape[1] + 1)
            index.load_index(str(place / "index.bin"), max_elements=shape[0])
            return cls(index, settings, float(about["recall"][_SYNTHETIC]))
        except (OSError, ValueError, KeyError, TypeError, RuntimeError):
            return None

    def _write(self, place: Path) -> None:
        with replacing(place / "index.bin") as scratch:
            self._index.save_index(str(scratch))
            digest = _digest_of_file(scratch)
        # Written last: without this file the index is not read.
        about = {
            "sha256": digest,
            "recall": {_SYNTHETIC: self.recall},
            "rows": self._index.get_current_count(),
            "settings": asdict(self.settings),
        }
        write_json(place / "index.json", about)


# One thread builds an index, and the others wait for it.
_locks: dict[str, threading.Lock] = {}
# The indexes in use, by folder and search breadth, so that all policies and sessions share one.
_open: "WeakValueDictionary[tuple[Path, int], SemanticIndex]" = WeakValueDictionary()


def require_hnswlib() -> Any:
    """Import hnswlib.

    Raises:
        UnsupportedError: it is not installed.
    """
    try:
        import hnswlib
    except ImportError as error:
        raise UnsupportedError(
            'the semantic index needs hnswlib: pip install "hf-dynspec[retrieval]", which takes a C++ compiler. '
            'semantic="logits" and semantic="token" need neither, and are exact.'
        ) from error
    return hnswlib


@contextmanager
def _progress(report: Report | None) -> Iterator[Report]:
    if report is not None:
        yield report
        return
    from huggingface_hub.utils import tqdm

    with tqdm(desc="Building the semantic index", unit=" rows") as bar:

        def show(done: int, count: int) -> None:
            bar.total = count
            bar.update(done - bar.n)

        yield show


def _exact_search(rows: torch.Tensor, queries: torch.Tensor, count: int) -> torch.Tensor:
    """int64 `[n, count]` on the CPU: as `SemanticIndex.search`, but exact."""
    rows, queries = rows.detach(), queries.detach().to(rows.device, torch.float32)
    best, ids = queries.new_full((queries.shape[0], 0), 0), queries.new_zeros(queries.shape[0], 0, dtype=torch.int64)
    for first in range(0, rows.shape[0], 16 * _BATCH_ROWS):
        part = queries @ rows[first : first + 16 * _BATCH_ROWS].float().T
        best = torch.cat([best, part], dim=1)
        own = torch.arange(first, first + part.shape[1], device=rows.device).expand(queries.shape[0], -1)
        ids = torch.cat([ids, own], dim=1)
        best, order = best.topk(min(count, best.shape[1]), dim=1)
        ids = ids.gather(1, order)
    return ids.cpu()


def _digest(rows: torch.Tensor, settings: IndexSettings) -> str:
    """Hexadecimal digest of the weights and of the settings that the stored index depends on."""
    digest = hashlib.sha256()
    built_with = {name: value for name, value in asdict(settings).items() if name != "search_breadth"}
    digest.update(json.dumps([list(rows.shape), str(rows.dtype), built_with]).encode())
    for part in rows.detach().split(_BATCH_ROWS):
        digest.update(part.contiguous().cpu().view(torch.uint8).numpy())
    return digest.hexdigest()


def _digest_of_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(2**20):
            digest.update(part)
    return digest.hexdigest()


def _default_folder() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HOME) / "hf_dynspec" / "indexes"
