"""Assisted generation whose drafter scores a shortlist of tokens instead of its whole vocabulary.

Needs torch and transformers alone. The target verifies every draft over its full vocabulary, as transformers' own
assisted generation does, so that the output is the target's own. Call it through `generate`:

    target.generate(**inputs, assistant_model=drafter, custom_generate="…", trust_remote_code=True)
"""

import base64
import copy
import functools
import weakref
import zlib

import torch
from torch import nn

# Ids from here on are no tokens of the tokenizer that the shortlist was made for.
VOCABULARY_SIZE = 0
# Which of the others the drafter may propose: bit i % 8 of byte i // 8 for token i, compressed, as base 64.
SHORTLIST = ""

# Models for users of one tokenizer pad their output projections to a multiple of at most this.
_LARGEST_PADDING = 1024
_READY = weakref.WeakKeyDictionary()


def generate(model, assistant_model=None, **arguments):
    """As `model.generate(assistant_model=…, **arguments)`, with the drafter's output projection cut to the shortlist.

    Raises:
        ValueError: there is no drafter, or one that the shortlist is not for, or whose projection cannot be cut.
    """
    if assistant_model is None:
        raise ValueError("this custom_generate needs assistant_model=…, the small model that drafts")
    drafter = shortlisted(assistant_model, model.config.get_text_config().vocab_size)
    return model.generate(assistant_model=drafter, **arguments)


def shortlisted(drafter, rows):
    """A drafter that shares everything with `drafter`, which stays as it is, but its output projection.

    Args:
        drafter: a causal language model of transformers with a plain linear output projection.
        rows: of the target's output projection, padding included. As the scores past the shortlist are filled in
            anyway, they can be as many as the target's, which transformers asks for.
    """
    head = drafter.get_output_embeddings()
    names = [name for name, module in drafter.named_children() if module is head]
    if type(head) is not nn.Linear or not names or "forward" in vars(drafter):
        raise ValueError(
            f"the output projection of this {type(drafter).__name__} cannot be cut to a shortlist: it must be a plain "
            "linear layer, and the model on one device, without adapters, quantisation of its head or a forward of "
            "its own. Leave custom_generate out to draft from all tokens."
        )
    for one in (head.out_features, rows):
        if not VOCABULARY_SIZE <= one < VOCABULARY_SIZE + _LARGEST_PADDING:
            raise ValueError(
                f"the shortlist is for a tokenizer of {VOCABULARY_SIZE:,} tokens, and these models score "
                f"{head.out_features:,} and {rows:,}: use the models that the README names"
            )
    view = copy.copy(drafter)
    view._modules = {**drafter._modules, names[0]: _shortlist_head(head, rows)}
    view.generate = functools.partial(_draft, view)
    if head.out_features != rows:
        view.config = copy.deepcopy(drafter.config)
        view.config.get_text_config().vocab_size = rows
    return view


def _draft(drafter, generation_config=None, **arguments):
    """`drafter.generate` with settings moved into the configuration: transformers passes both for each draft, and
    warns of that itself."""
    if generation_config is not None:
        generation_config = copy.deepcopy(generation_config)
        arguments = generation_config.update(**arguments)
    return type(drafter).generate(drafter, generation_config=generation_config, **arguments)


class ShortlistHead(nn.Module):
    """Scores of the shortlist in their places among −∞.

    Args:
        head: the whole projection. The rows of the shortlist are copied.
        rows: how many scores there are in all.
    """

    def __init__(self, head, rows):
        super().__init__()
        self.rows = rows
        self.token_ids = _token_ids().to(head.weight.device)
        self.weight = head.weight.detach()[self.token_ids]
        self.bias = None if head.bias is None else head.bias.detach()[self.token_ids]

    def forward(self, hidden):
        scores = hidden.new_full((*hidden.shape[:-1], self.rows), -torch.inf)
        return scores.index_copy_(-1, self.token_ids, nn.functional.linear(hidden, self.weight, self.bias))


def _shortlist_head(head, rows):
    """The shortlist's rows of a projection, which are copied once, and anew where its weights have changed."""
    tensors = [one for one in (head.weight, head.bias) if one is not None]
    stamp = (rows, *((one.data_ptr(), one._version, one.dtype, one.device) for one in tensors))
    if _READY.get(head, (None,))[0] != stamp:
        _READY[head] = stamp, ShortlistHead(head, rows)
    return _READY[head][1]


def _token_ids():
    """int64 `[n]`, in ascending order."""
    places = torch.tensor(list(zlib.decompress(base64.b64decode(SHORTLIST))), dtype=torch.uint8)
    return ((places[:, None] >> torch.arange(8)) & 1).flatten().nonzero().flatten()
