"""The workloads of the benchmarks: models with their losses and batches, and one step
of them for a mesh."""

import contextlib
import functools
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, Key, PyTree

import redco_eqx as rx

if TYPE_CHECKING:  # what measures a model of one's own needs only the core
    import redco_eqx_models as models

sys.path.append(str(pathlib.Path(__file__).parents[1] / "examples"))
import quickstart

HERE = pathlib.Path(__file__).parent
MIB = 2**20
# Machine code is not needed. These options take effect after the collectives are
# decided: the counts are equal.
COMPILER_OPTIONS: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}

Overrides = Sequence[tuple[str, PartitionSpec]]


@dataclass(frozen=True)
class Case:
    """A model with its loss.

    - `make_model`: key -> model.
    - `batch`: an abstract batch.
    - `activation`: (batch, length, dim), over all devices.
    - `reductions`: the least number of all-reduces of an activation that a step needs,
        forward and again backward.
    """

    make_model: Callable[[Key[Array, ""]], PyTree]
    loss_fn: Callable[..., Any]
    batch: PyTree[jax.ShapeDtypeStruct]
    activation: tuple[int, int, int]
    reductions: int


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model and its batch; by default those at which redco was measured.

    The MLP is `4 * dim` wide; LLaMA's gated one `8/3 * dim`, rounded up to a multiple
    of 16 (688 of 256).
    """

    dim: int = 256
    num_layers: int = 4
    num_heads: int = 8
    vocabulary: int = 1024
    length: int = 128
    batch_size: int = 8


FAMILIES = ("LLaMA", "GPT-2", "GPT-J", "OPT")
ENCODER_DECODERS = ("T5", "T5 v1.1", "BART")
"""Models of which encoder and decoder each have `num_layers`, and read `length`
tokens."""


def make_model(
    name: str, sizes: Sizes, **options: Any
) -> Callable[[Key[Array, ""]], "models.Model"]:
    """Return a function from a key to a model of one of the `FAMILIES` or
    `ENCODER_DECODERS`. `options` are those of the model, such as `remat`."""
    import redco_eqx_models as models

    dim, heads = sizes.dim, sizes.num_heads
    by_gpt: dict[str, Any] = {
        "vocab_size": sizes.vocabulary,
        "n_embd": dim,
        "n_layer": sizes.num_layers,
        "n_head": heads,
        "n_positions": sizes.length,
    }
    by_hidden: dict[str, Any] = {
        "vocab_size": sizes.vocabulary,
        "hidden_size": dim,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": heads,
        "max_position_embeddings": sizes.length,
    }
    match name:
        case "LLaMA":
            width = 16 * math.ceil(8 * dim / 3 / 16)
            llama = models.LlamaConfig(**by_hidden, intermediate_size=width)
            return lambda key: models.LlamaForCausalLM(llama, **options, key=key)
        case "GPT-2":
            gpt2 = models.GPT2Config(**by_gpt)
            return lambda key: models.GPT2LMHeadModel(gpt2, **options, key=key)
        case "GPT-J":
            gptj = models.GPTJConfig(**by_gpt, rotary_dim=dim // heads // 4 * 2)
            return lambda key: models.GPTJForCausalLM(gptj, **options, key=key)
        case "OPT":
            opt = models.OPTConfig(
                **by_hidden, ffn_dim=4 * dim, word_embed_proj_dim=dim
            )
            return lambda key: models.OPTForCausalLM(opt, **options, key=key)
        case "T5" | "T5 v1.1":
            is_newer = name == "T5 v1.1"
            t5 = models.T5Config(
                vocab_size=sizes.vocabulary,
                d_model=dim,
                d_kv=dim // heads,
                d_ff=4 * dim,
                num_layers=sizes.num_layers,
                num_heads=heads,
                feed_forward_proj="gated-gelu" if is_newer else "relu",
                tie_word_embeddings=not is_newer,
                scale_decoder_outputs=not is_newer,
            )
            return lambda key: models.T5ForConditionalGeneration(t5, **options, key=key)
        case "BART":
            bart = models.BartConfig(
                vocab_size=sizes.vocabulary,
                d_model=dim,
                encoder_layers=sizes.num_layers,
                decoder_layers=sizes.num_layers,
                encoder_attention_heads=heads,
                decoder_attention_heads=heads,
                encoder_ffn_dim=4 * dim,
                decoder_ffn_dim=4 * dim,
                max_position_embeddings=sizes.length,
            )
            return lambda key: models.BartForConditionalGeneration(
                bart, **options, key=key
            )
    raise ValueError(
        f"no family {name!r}; there are {', '.join(FAMILIES + ENCODER_DECODERS)}"
    )


def next_token_loss(
    model: "models.DecoderLM",
    tokens: Int[Array, "batch length"],
    key: Key[Array, ""] | None,
) -> rx.Mean:
    """Return the mean cross-entropy of each token after those before it."""
    hidden, _ = model.hidden_states(tokens[:, :-1])
    parallel = model.sequence_parallel
    return rx.layers.cross_entropy(
        hidden, model.head, tokens[:, 1:], sequence_parallel=parallel
    )


def sequence_to_sequence_loss(
    model: "models.EncoderDecoder",
    batch: dict[str, Int[Array, "batch _"]],
    key: Key[Array, ""] | None,
) -> rx.Mean:
    """Return the mean cross-entropy of each token after those before it and the
    source."""
    hidden = model.hidden_states(batch["source"], batch["target"][:, :-1])
    parallel = model.sequence_parallel
    return rx.layers.cross_entropy(
        hidden, model.head, batch["target"][:, 1:], sequence_parallel=parallel
    )


def family_case(name: str, sizes: Sizes = Sizes(), **options: Any) -> Case:
    """Make the case of one of the library's models.

    A layer needs a reduction for each part that is added to the stream: attention, MLP
    (one for both if they are side by side), and cross-attention. The step needs one
    more each way, for the lookup and for the head. An encoder also has a lookup, and
    its output, which all cross-attentions read, has one gradient.
    """
    tokens = jax.ShapeDtypeStruct((sizes.batch_size, sizes.length), jnp.int32)
    following = jax.ShapeDtypeStruct((sizes.batch_size, sizes.length + 1), jnp.int32)
    is_pair = name in ENCODER_DECODERS
    of_decoder = {"GPT-J": 1}.get(name, 3 if is_pair else 2) * sizes.num_layers + 1
    of_encoder = 2 * sizes.num_layers + 1 if is_pair else 0
    return Case(
        make_model=make_model(name, sizes, **options),
        loss_fn=sequence_to_sequence_loss if is_pair else next_token_loss,
        batch={"source": tokens, "target": following} if is_pair else following,
        activation=(sizes.batch_size, sizes.length, sizes.dim),
        reductions=of_decoder + of_encoder,
    )


def quickstart_case(batch_size: int = 8) -> Case:
    """Make the case of the model of `examples/quickstart.py`: plain `eqx.nn`, as a user
    writes it."""

    def make_model(key: Key[Array, ""]) -> quickstart.Transformer:
        return quickstart.Transformer(key=key)

    model = eqx.filter_eval_shape(make_model, jax.random.key(0))
    return Case(
        make_model=make_model,
        loss_fn=quickstart.loss_fn,
        batch=jax.ShapeDtypeStruct((batch_size, quickstart.LENGTH + 1), jnp.int32),
        activation=(batch_size, quickstart.LENGTH, model.embedding.embedding_size),
        reductions=2 * len(model.layers) + 1,
    )


def abstract_model(
    case: Case, mesh: Mesh, overrides: Overrides = ()
) -> tuple[PyTree, PyTree]:
    """Make the model with a sharding in each of its abstract arrays, and the tree of
    these shardings."""
    model = eqx.filter_eval_shape(case.make_model, jax.random.key(0))
    shardings = rx.shard_rules(model, mesh, overrides=overrides)

    def one(x: Any, sharding: NamedSharding | None) -> Any:
        return (
            x
            if sharding is None
            else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        )

    return jax.tree.map(one, model, shardings), shardings


def lower_step(
    case: Case,
    mesh: Mesh,
    *,
    train: bool = True,
    overrides: Overrides = (),
    **options: Any,
) -> jax.stages.Lowered:
    """Lower one `train_step` with these options (AdamW by default), or, if not `train`,
    an `eval_step`: the forward pass."""
    model, shardings = abstract_model(case, mesh, overrides)
    options = {"optimizer": optax.adamw(1e-3), **options}
    state = rx.init_state(model, options["optimizer"], key=jax.random.key(0))
    rows = rx.batch_sharding(mesh)
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows), case.batch
    )
    if train:
        step = functools.partial(
            rx.train_step, loss_fn=case.loss_fn, shardings=shardings, **options
        )
        return jax.jit(step, donate_argnums=0).lower(state, batch)
    step = functools.partial(rx.eval_step, loss_fn=case.loss_fn, shardings=shardings)
    return jax.jit(step).lower(state, batch)


def num_shards(mesh: Mesh) -> int:
    """Return the number of parts into which the batch is split."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def run_alone(arguments: Sequence[str], limit: float) -> dict[str, Any]:
    """Runs Python with these arguments and the name of a file, in a process that may
    take `limit` seconds. Returns what it wrote there as JSON, or its error."""
    with tempfile.TemporaryDirectory() as directory:
        result = pathlib.Path(directory, "result.json")
        command = [sys.executable, *arguments, str(result)]
        # A separate session, so that processes that it starts end with it.
        with subprocess.Popen(
            command, cwd=HERE, start_new_session=True, stdout=sys.stderr.fileno()
        ) as process:
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                return {"error": f"took more than {limit:.0f} s"}
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return (
            json.loads(result.read_text())
            if result.exists()
            else {"error": f"ended with {code}"}
        )


def table(rows: Sequence[Sequence[str]], num_left: int = 1) -> str:
    """Format a table with columns as wide as they need to be, the first `num_left` of
    them aligned left."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for row in rows:
        cells = [
            x.ljust(w) if i < num_left else x.rjust(w)
            for i, (x, w) in enumerate(zip(row, widths))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
