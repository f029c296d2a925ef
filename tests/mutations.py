"""Are deliberate faults found? Writes one fault after another into a copy of the project, and runs the tests that are
to find it. Prints which of them were found, and ends with an error if one was not.

    python tests/mutations.py            # all of them, about 20 minutes on two cores
    python tests/mutations.py "residual" # those whose description has this word

`test_mutations.py` checks that each fault can still be written.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGE = "hf_dynspec"


class Mutation(NamedTuple):
    """A fault: what is wrong, the file, its text before and after, and the tests that find it."""

    fault: str
    file: str
    before: str
    after: str
    tests: str


MUTATIONS = [
    Mutation(
        "one accepted row too few is kept in fixed memory",
        "rounds/round.py",
        "self.memory.keep((walks.accepted + 1) * self._goes_on, None",
        "self.memory.keep(walks.accepted * self._goes_on, None",
        "tests/generation/test_batches.py",
    ),
    Mutation(
        "a wrong position of rows over fixed memory",
        "kernels/attention.py",
        "return self.lengths.unsqueeze(1) + self.row_levels",
        "return self.lengths.unsqueeze(1) + self.row_levels + (self.row_levels > 2)",
        "tests/generation/test_batches.py",
    ),
    Mutation(
        "a window that is one position too long on the host",
        "kernels/attention.py",
        "visible &= levels[-within.shape[0] :].unsqueeze(1) - behind < window",
        "visible &= levels[-within.shape[0] :].unsqueeze(1) - behind <= window",
        "tests/kernels",
    ),
    Mutation(
        "a path of a tree is kept in the order of other nodes",
        "memory/fixed.py",
        "kept = slots.index_select(1, _among_all((first + path) % size, size))",
        "kept = slots.index_select(1, _among_all((first + path.flip(1)) % size, size))",
        "tests/memory tests/generation/test_batches.py",
    ),
    Mutation(
        "a drafted chain is read one token too late",
        "drafters/causal_lm_fixed.py",
        "known = min(accepted, len(self._chain) - 1)",
        "known = min(accepted, len(self._chain))",
        "tests/generation/test_calls_of_batches.py",
    ),
    Mutation(
        "a node of a tree sees its siblings",
        "modeling/masks.py",
        "paths[:k] = itself | paths[parents]",
        "paths[:k] = itself | paths[parents] | (parents.unsqueeze(1) == parents)",
        "tests/generation/test_exactness.py",
    ),
    Mutation(
        "a rejected node stays in a cache of transformers",
        "generation/target.py",
        "    cache.crop(kept - nodes)",
        "    cache.crop(kept - nodes + 1)",
        "tests/generation/test_exactness.py",
    ),
    Mutation(
        "packed rows of replaced tokens are stale",
        "modeling/head.py",
        "        changed = shortlist.replaced\n",
        "        changed = None if shortlist.replaced is None else shortlist.replaced[1:]\n",
        "tests/kernels",
    ),
    Mutation(
        "a window evicts the token that was used last",
        "shortlists/recent_tokens.py",
        "oldest = last_seen.topk(entries.shape[0], largest=False).indices + self._fixed_count",
        "oldest = last_seen.topk(entries.shape[0], largest=True).indices + self._fixed_count",
        "tests/shortlists",
    ),
    Mutation(
        "the same on the host",
        "shortlists/recent_tokens.py",
        "last_seen[slots[self._fixed_count : -1]].argpartition(len(new) - 1)",
        "(-last_seen[slots[self._fixed_count : -1]]).argpartition(len(new) - 1)",
        "tests/shortlists",
    ),
    Mutation(
        "a tie is taken the wrong way",
        "kernels/reference.py",
        "    return scores.argmax(-1)\n",
        "    return scores.shape[-1] - 1 - scores.flip(-1).argmax(-1)\n",
        "tests/kernels tests/generation/test_ties.py",
    ),
    Mutation(
        "an EOS token does not end a text",
        "generation/verification.py",
        "return token_ids[count - 1] in self._ends or any(",
        "return token_ids[count - 1] in list(self._ends)[1:] or any(",
        "tests/generation/test_exactness.py",
    ),
    Mutation(
        "drafted tokens after the end are kept",
        "generation/verification.py",
        "count = next((one for one in range(1, n) if not goes_on[one - 1] or stops_after(one)), n)",
        "count = next((one for one in range(1, n) if not goes_on[one - 1]), n)",
        "tests/generation/test_exactness.py",
    ),
    Mutation(
        "a candidate is accepted too often",
        "generation/acceptance.py",
        "is_accepted = torch.rand(1, dtype=torch.float32, device=device) * of_drafter * p.total < p.at(drafted)",
        "is_accepted = torch.rand(1, dtype=torch.float32, device=device) * of_drafter * p.total < 1.3 * p.at(drafted)",
        "tests/generation/test_sampling.py",
    ),
    Mutation(
        "a wrong residual distribution of chains",
        "generation/acceptance.py",
        "left = p.minus(token_ids.to(device), q.to(device) * p.total)",
        "left = p.minus(token_ids.to(device), 0 * q.to(device) * p.total)",
        "tests/generation/test_sampling.py",
    ),
    Mutation(
        "a wrong residual distribution on the host",
        "generation/acceptance.py",
        "left = [max(0.0, weight - q_of.get(token_id, 0.0)) for token_id, weight in p_of.items()]",
        "left = list(p_of.values())",
        "tests/generation/test_sampling.py",
    ),
    Mutation(
        "a wrong residual distribution of batches",
        "generation/acceptance.py",
        "left = before.scatter_add(-1, token_ids, -q * total).clamp_min_(0.0)",
        "left = before.clone()",
        "tests/generation/test_sampling.py tests/generation/test_recorded_rounds.py",
    ),
    Mutation(
        "siblings of a drawn tree are drawn with their elders",
        "generation/acceptance.py",
        "left = torch.where(place >= order.unsqueeze(1), q, 0.0)",
        "left = torch.where(place >= 0 * order.unsqueeze(1), q, 0.0)",
        "tests/generation/test_sampling.py",
    ),
    Mutation(
        "a recurrent state is not rolled back",
        "memory/recurrent.py",
        "            layer.recurrent_states.update(_copied(states))\n",
        "",
        "tests/memory tests/generation/test_families.py",
    ),
    Mutation(
        "a draft is chosen by one distribution and told by another",
        "drafting/token_choice.py",
        "few = SparseDistribution(token_ids.tolist(), weights.tolist())\n",
        "few = SparseDistribution(token_ids.tolist(), weights.flip(0).tolist())\n"
        "        place = draw_place(weights.tolist())\n"
        "        return token_ids[place : place + 1], used, few\n",
        "tests/generation/test_sampling.py",
    ),
]


def is_found(mutation: Mutation, copy: Path) -> bool:
    """Whether the tests find a fault in a copy of the project."""
    file = copy / PACKAGE / mutation.file
    text = file.read_text()
    file.write_text(text.replace(mutation.before, mutation.after))
    try:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *mutation.tests.split()]
        # The installed package may be the original.
        environment = {**os.environ, "PYTHONPATH": str(copy)}
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
        # The exit status does not tell failed tests from tests that cannot be collected.
        return " failed" in done.stdout.splitlines()[-1]
    finally:
        file.write_text(text)


def main(words: list[str]) -> int:
    chosen = [one for one in MUTATIONS if all(word in one.fault for word in words)]
    lost = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "project"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__"))
        for one in chosen:
            began = time.perf_counter()
            found = is_found(one, copy)
            lost += not found
            print(
                f"{'found' if found else 'NOT FOUND'}: {one.fault} ({time.perf_counter() - began:.0f} s)", flush=True
            )
    print(f"{len(chosen) - lost} of {len(chosen)} found")
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
