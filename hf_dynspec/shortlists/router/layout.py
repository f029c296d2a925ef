"""The vocabulary in blocks of rows, cluster by cluster, so that clusters are read in whole blocks."""

from dataclasses import dataclass

import torch

from ...devices import is_host_memory
from ...errors import ConfigurationError
from ...protocol import BlockLayout, VocabularyInfo
from .network import Router

# Rows of a block: enough for the matrix units of GPUs, few enough that the clusters' last blocks waste little.
BLOCK_ROWS = 16


@dataclass(frozen=True, eq=False)
class ClusterLayout:
    """The vocabulary in blocks, cluster by cluster.

    Args:
        blocks: token ids by block.
        cluster_of: int64 `[B]`: the cluster of each block; `M` for blocks of pinned tokens.
        most_blocks: entry `k` is the number of blocks of the pinned tokens and the `k` largest clusters.
        is_empty: bool `[M]`: clusters whose tokens are all pinned, or cannot be drafted.
    """

    blocks: BlockLayout
    cluster_of: torch.Tensor
    most_blocks: tuple[int, ...]
    is_empty: torch.Tensor

    def blocks_of(self, chosen: torch.Tensor, budget: int) -> torch.Tensor:
        """int64 `[n]`: the blocks of the at most `budget` chosen clusters, bool `[M + 1]`. Off the CPU, as
        `fixed_blocks_of`, since counting them would wait for the device."""
        if not is_host_memory(chosen.device):
            return self.fixed_blocks_of(chosen, budget)
        return chosen.index_select(0, self.cluster_of).nonzero().squeeze(1)

    def fixed_blocks_of(self, chosen: torch.Tensor, budget: int) -> torch.Tensor:
        """The same with a place for every block that there can be, filled up with −1."""
        is_wanted = chosen.index_select(0, self.cluster_of)
        capacity = self.most_blocks[budget]
        place = torch.where(is_wanted, is_wanted.cumsum(0) - 1, capacity)
        blocks = torch.full((capacity + 1,), -1, dtype=torch.int64, device=is_wanted.device)
        blocks.scatter_(0, place, torch.arange(is_wanted.shape[0], device=is_wanted.device))
        return blocks[:capacity]


def lay_out(router: Router, pinned: torch.Tensor, vocabulary: VocabularyInfo) -> ClusterLayout:
    """Lay out the draftable tokens of a vocabulary: the pinned ids, int64 `[p]`, and EOS first, then the clusters.

    Raises:
        ConfigurationError: the clusters are those of a smaller vocabulary.
    """
    clusters = router.clusters.to(torch.int64)
    if clusters.shape[0] < vocabulary.size:
        raise ConfigurationError(
            f"the router's clusters are of {clusters.shape[0]} tokens, and the vocabulary has {vocabulary.size}. "
            "Build them for this target."
        )
    count = router.num_clusters
    group = clusters[: vocabulary.size].clone()
    group[pinned] = count
    group[list(vocabulary.eos_token_ids)] = count
    token_ids = torch.arange(vocabulary.size, device=group.device)
    can_draft = vocabulary.can_draft(token_ids.to(vocabulary.device)).cpu()
    token_ids, group = token_ids[can_draft], group[can_draft]
    # Pinned tokens first: their blocks are on every shortlist.
    group, order = torch.sort((group + 1) % (count + 1), stable=True)
    sizes = torch.bincount(group, minlength=count + 1)
    block_counts = (sizes + BLOCK_ROWS - 1) // BLOCK_ROWS
    first_row = (block_counts.cumsum(0) - block_counts) * BLOCK_ROWS
    rank = torch.arange(group.shape[0], device=group.device) - (sizes.cumsum(0) - sizes)[group]
    rows = group.new_zeros(int(block_counts.sum()) * BLOCK_ROWS)
    is_token = torch.zeros_like(rows, dtype=torch.bool)
    rows[first_row[group] + rank] = token_ids[order]
    is_token[first_row[group] + rank] = True
    # Empty slots need a valid id too.
    rows = torch.where(is_token, rows, token_ids[0]).view(-1, BLOCK_ROWS)
    largest_first = block_counts[1:].sort(descending=True).values.cumsum(0)
    pinned_blocks = int(block_counts[0])
    numbers = (torch.arange(count + 1, device=group.device) + count) % (count + 1)
    device = vocabulary.device
    return ClusterLayout(
        BlockLayout(rows.to(device), is_token.view(-1, BLOCK_ROWS).to(device), vocabulary.size),
        torch.repeat_interleave(numbers, block_counts).to(device),
        (pinned_blocks, *(pinned_blocks + int(blocks) for blocks in largest_first)),
        (sizes[1:] == 0).to(device),
    )


def is_same_vocabulary(one: VocabularyInfo, other: VocabularyInfo) -> bool:
    same = (one.size, one.eos_token_ids, one.device) == (other.size, other.eos_token_ids, other.device)
    return same and one.draftable is other.draftable
