"""The models that fit on each server: Table 1 of the RedCoast paper, decided by the
compilers, and more.

    python benchmarks/applicability.py [PART ...]
    paper meshes figure3 longest largest estimates-tpu estimates-gpu

Each cell is a training step of AdamW in float32, compiled for devices that are not
present, at the paper's lengths. The paper trains by data and tensor parallelism alone.
Here this means `tensor` over all devices; the other rows are the choice of `rx.plan`,
with FSDP and rematerialisation. The paper does not give its batches: here a batch has a
row for each device. A step may use all memory of a device. `estimates` compare the CPU
compiler's memory with that of the others.

Needed: `python -m pip install "jax[tpu]" "jax[cuda12]"`. If a compiler is missing, its
rows report that. A part takes up to half an hour on two cores.
"""

import argparse
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from workloads import next_token_loss, sequence_to_sequence_loss, table

import redco_eqx as rx
import redco_eqx_models as models
from redco_eqx._planning.targets import GPUS, TPUS, gib

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

OPTIMIZER = optax.adamw(1e-4)
TWO, FOUR, EIGHT, MANY = "rtx3080-10g:2", "a100-40g:4", "v4:2x2x2", "v4:4x4x4"
REMAT = {"remat": ["none", "row_out", "full"]}


def opt(size: int, num_layers: int, num_heads: int) -> models.OPTConfig:
    return models.OPTConfig(
        hidden_size=size,
        word_embed_proj_dim=size,
        ffn_dim=4 * size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
    )


@dataclass(frozen=True)
class Model:
    """A published architecture: its class and configuration."""

    kind: Any
    config: Any

    def make(self, key: Any, **options: Any) -> Any:
        return self.kind(self.config, stacked=True, key=key, **options)

    @property
    def is_pair(self) -> bool:
        """True if it has an encoder."""
        return issubclass(self.kind, models.EncoderDecoder)

    def batch(self, size: int, length: int) -> Any:
        """Make an abstract batch. Source and target have the same length."""
        following = jax.ShapeDtypeStruct((size, length + 1), jnp.int32)
        source = jax.ShapeDtypeStruct((size, length), jnp.int32)
        return {"source": source, "target": following} if self.is_pair else following

    def loss(self, model: Any, batch: Any, key: Any) -> Any:
        return (sequence_to_sequence_loss if self.is_pair else next_token_loss)(
            model, batch, key
        )

    def loss_in_bfloat16(self, model: Any, batch: Any, key: Any) -> Any:
        """Compute the loss in bfloat16, over the same float32 parameters."""
        return self.loss(rx.cast(model, jnp.bfloat16), batch, key)


BART_LARGE = models.BartConfig(
    d_model=1024,
    encoder_layers=12,
    decoder_layers=12,
    encoder_attention_heads=16,
    decoder_attention_heads=16,
    encoder_ffn_dim=4096,
    decoder_ffn_dim=4096,
)
MODELS = {
    "BART-Large": Model(models.BartForConditionalGeneration, BART_LARGE),
    "GPT2-Large": Model(
        models.GPT2LMHeadModel, models.GPT2Config(n_embd=1280, n_layer=36, n_head=20)
    ),
    "LLaMA-7B": Model(models.LlamaForCausalLM, models.LlamaConfig()),
    "GPT-J-6B": Model(models.GPTJForCausalLM, models.GPTJConfig()),
    "OPT-2.7B": Model(models.OPTForCausalLM, opt(2560, 32, 32)),
    "OPT-13B": Model(models.OPTForCausalLM, opt(5120, 40, 40)),
    "OPT-66B": Model(models.OPTForCausalLM, opt(9216, 64, 72)),
    "T5-XXL": Model(
        models.T5ForConditionalGeneration,
        models.T5Config(
            d_model=1024, d_kv=128, d_ff=65536, num_layers=24, num_heads=128
        ),
    ),
}

HEADER = ["model", "on", "length", "batch", "mesh", "peak GiB", "of", "fits"]
HEADER += ["MiB sent", "seconds"]


def plan(
    name: str, on: str, length: int, batch: int, **options: Any
) -> tuple[list[str], Any]:
    """Return a row of a table, and the plan."""
    model, start = MODELS[name], time.monotonic()
    memory = {**TPUS, **GPUS}[on.partition(":")[0]].memory
    options = {
        "loss_fn": model.loss,
        "bytes_per_device": memory,
        "target": on,
        **options,
    }
    batches = model.batch(batch, length)
    try:
        found = rx.plan(
            model.make, optimizer=OPTIMIZER, batch=batches, progress=False, **options
        )
    except ImportError as error:
        return [
            name,
            on,
            str(length),
            str(batch),
            str(error).split(": ", 1)[1][:60],
            *"?????",
        ], None
    memory, sent = found.memory, found.best.communication
    # A step that was not compiled needs at least its arguments.
    peak = f"> {gib(memory.arguments)}" if memory.peak is None else gib(memory.peak)
    row = [
        *(
            name,
            on,
            str(length),
            str(batch),
            str(found.best),
            peak,
            gib(found.capacity),
        ),
        "yes" if found.fits else "no",
        "" if sent is None else f"{sent.total.sent_bytes / 2**20:,.0f}",
        f"{time.monotonic() - start:.0f}",
    ]
    print("  ".join(row), flush=True)
    return row, found


# Text and table of the paper have the lengths of the first two models swapped, so both
# readings are here.
PAPER = [
    *itertools.product(("BART-Large", "GPT2-Large"), (TWO,), (512, 1024), (2,)),
    ("LLaMA-7B", FOUR, 1024, 4),
    ("GPT-J-6B", FOUR, 1024, 4),
    ("T5-XXL", EIGHT, 512, 8),
    ("OPT-13B", EIGHT, 1024, 8),
    ("OPT-66B", MANY, 512, 64),
]


def paper() -> Iterator[list[str]]:
    """Yield the rows of Table 1 without FSDP, and with the mesh that `rx.plan`
    chooses."""
    for name, target, length, batch in PAPER:
        devices = {TWO: 2, FOUR: 4, EIGHT: 8, MANY: 64}[target]
        yield plan(
            name,
            target,
            length,
            batch,
            mesh={"tensor": devices},
            options={"remat": ["full"]},
        )[0]
        yield plan(name, target, length, batch, options=REMAT)[0]


def meshes() -> Iterator[list[str]]:
    """Yield OPT-66B and OPT-13B on fixed meshes: the heads do not divide by 16."""
    full: Any = {"options": {"remat": ["full"]}}
    for sizes in (
        {"tensor": 32},
        {"tensor": 8},
        {"tensor": 16, "fsdp": 4},
        {"tensor": 8, "fsdp": 8},
    ):
        yield plan("OPT-66B", MANY, 512, 8, mesh=sizes, **full)[0]
    for batch, parallel in ((4, False), (8, False), (8, True)):
        options: Any = {"options": {"remat": ["full"], "sequence_parallel": [parallel]}}
        yield plan("OPT-13B", EIGHT, 1024, batch, mesh={"tensor": 8}, **options)[0]


def figure3() -> Iterator[list[str]]:
    """Yield memory and bytes on fixed meshes, and on the one that `rx.plan` chooses; on
    that also with products in bfloat16. They replace the bars of Figure 3 for four
    A100, which are speeds."""
    sizes: tuple[dict[str, int] | None, ...] = (
        *(
            {"tensor": 4},
            {"fsdp": 4},
            {"data": 2, "tensor": 2},
            {"fsdp": 2, "tensor": 2},
        ),
        None,
    )
    for name, mesh in itertools.product(("OPT-2.7B", "GPT-J-6B"), sizes):
        remat = REMAT if mesh is None else {"remat": ["full"]}
        yield plan(name, FOUR, 1024, 8, mesh=mesh, options=remat)[0]
        if mesh is None:
            row, _ = plan(
                name,
                FOUR,
                1024,
                8,
                options=remat,
                loss_fn=MODELS[name].loss_in_bfloat16,
            )
            yield [f"{row[0]}, bfloat16", *row[1:]]


SERVERS = ((TWO, "GPT2-Large", 2), (FOUR, "LLaMA-7B", 4), (EIGHT, "LLaMA-7B", 8))


def longest() -> Iterator[list[str]]:
    """Yield the longest sequences, one for each device: FSDP, bfloat16, layers
    recomputed."""
    for target, name, devices in SERVERS:

        def of_length(
            length: int, name: str = name, target: str = target, devices: int = devices
        ) -> Any:
            model = MODELS[name]
            options: Any = {"mesh": {"fsdp": devices}, "options": {"remat": ["full"]}}
            return plan(
                name, target, length, devices, loss_fn=model.loss_in_bfloat16, **options
            )

        # The rows of a table of positions.
        limit = getattr(MODELS[name].config, "n_positions", None) or 8192
        yield from _largest(
            [n for n in (256, 512, 1024, 2048, 4096, 8192) if n <= limit], of_length
        )


def largest() -> Iterator[list[str]]:
    """Yield the deepest LLaMA with the width of the 7B model, at 1024 tokens."""
    for target, _, devices in SERVERS:

        def of_depth(
            num_layers: int, target: str = target, devices: int = devices
        ) -> Any:
            name = f"LLaMA of {num_layers} layers"
            config = models.LlamaConfig(num_hidden_layers=num_layers)
            model = MODELS[name] = Model(models.LlamaForCausalLM, config)
            options: Any = {"mesh": {"fsdp": devices}, "options": {"remat": ["full"]}}
            return plan(
                name, target, 1024, devices, loss_fn=model.loss_in_bfloat16, **options
            )

        yield from _largest([2, 4, 8, 16, 24, 32, 48, 64], of_depth)


def _largest(
    sizes: list[int], make: Callable[[int], tuple[list[str], Any]]
) -> Iterator[list[str]]:
    """Yield the row of the largest of ascending sizes that fits, by bisection."""
    largest_row = None
    while sizes:
        middle = len(sizes) // 2
        row, found = make(sizes[middle])
        if found is None:
            return  # the compiler is not installed
        if found.fits:
            largest_row, sizes = row, sizes[middle + 1 :]
        else:
            sizes = sizes[:middle]
    if largest_row is not None:
        yield largest_row


SMALL = {
    "LLaMA": Model(
        models.LlamaForCausalLM,
        models.LlamaConfig(
            vocab_size=8192,
            hidden_size=512,
            intermediate_size=1408,
            num_hidden_layers=4,
            num_attention_heads=8,
        ),
    ),
    "GPT-2": Model(
        models.GPT2LMHeadModel,
        models.GPT2Config(vocab_size=8192, n_embd=512, n_layer=4, n_head=8),
    ),
    "T5": Model(
        models.T5ForConditionalGeneration,
        models.T5Config(vocab_size=8192, num_layers=4),
    ),
}


def estimates(target: str) -> Iterator[list[str]]:
    """Yield memory by the CPU compiler over memory by the target's compiler. Each row
    has a model, a mesh and a policy."""
    MODELS.update(SMALL)
    sizes = (
        {"data": 8},
        {"fsdp": 8},
        {"tensor": 8},
        {"fsdp": 4, "tensor": 2},
        {"fsdp": 2, "tensor": 4},
    )
    ratios: list[float] = []
    for name, mesh, remat in itertools.product(SMALL, sizes, ("none", "full")):
        options: Any = {
            "mesh": mesh,
            "options": {"remat": [remat]},
            "bytes_per_device": 2**40,
        }
        run = functools.partial(plan, name, target, 512, 16, **options)
        row, real = run()
        if real is None or real.memory.peak is None:
            yield row
            continue
        ratios.append(run(target=jax.devices("cpu"))[1].memory.peak / real.memory.peak)
        print(f"  the CPU compiler's over that: {ratios[-1]:.3f}", flush=True)
        yield [*row[:-1], f"{ratios[-1]:.3f}"]
    if ratios:
        away = [abs(ratio - 1) for ratio in ratios]
        print(
            f"{target}: {len(ratios)} programs, {min(ratios):.3f} to "
            f"{max(ratios):.3f}; error {statistics.median(away):.1%} in the median, "
            f"{max(away):.1%} at worst"
        )


PARTS: dict[str, Callable[[], Iterator[list[str]]]] = {
    "paper": paper,
    "meshes": meshes,
    "figure3": figure3,
    "longest": longest,
    "largest": largest,
    "estimates-tpu": functools.partial(estimates, "v5e:2x4"),
    "estimates-gpu": functools.partial(estimates, "a100-40g:8"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts", nargs="*", choices=[*PARTS, []], help="all without any"
    )
    for name in parser.parse_args().parts or PARTS:
        rows = list(PARTS[name]())
        header = [*HEADER[:-1], "estimate"] if "estimates" in name else HEADER
        print(f"\n{name}\n\n{table([header, *rows], num_left=5)}\n", flush=True)


if __name__ == "__main__":
    main()
