"""The kind of each array of the tests' models, by its path alone."""

from fnmatch import fnmatchcase
from typing import Any

import redco_eqx as rx

# In the words of the files of these models. The first that matches a path in lower case
# decides.
BY_HAND = {
    "other": "key keys ids mask weight_ids *.cls_token *.class_embedding",
    "norm": "norm.* *norm.* *norm?.* *norms.*.* *layernorm* *layer_norm* *ln_?.* "
    "*ln_cross_attn.* *norm_out.*",
    "table": "*relative_attention_bias* *wte.* *wpe.* *embed_tokens.* "
    "*embed_positions.* *embed_in.* shared.weight *.shared.weight "
    "*shared.pytree.?.weight *position_embedding* *token_type_embeddings.* "
    "*word_embeddings.* *token_embedding.*",
    "bias": "*bias *bias_n",
    "matrix": "*",
}


def by_hand(path: str) -> str:
    globs = [(kind, glob) for kind, globs in BY_HAND.items() for glob in globs.split()]
    return next(kind for kind, glob in globs if fnmatchcase(path.lower(), glob))


def expected(model: Any) -> dict[str, str]:
    return {path: by_hand(path) for path in rx.to_arrays(model)}
