"""Equinox models that other people published on PyPI, each with a loss, of the kinds
that exist.

Each is small, or with `published` as large as its authors made it: ESM2 650M, E1 150M,
CLIP's ViT-B/32, ConvNeXt-T, Swin-T, ResNet-50, Mamba 130M, and the defaults of flowjax.
GATv2 has no such size.

    pip install --no-deps esm2quinox e1jax jaxonmodels ftfy wcwidth flowjax paramax \\
        lineax gatv2-eqx

A package that is not installed, or does not run with this JAX, is named and left out.
"""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax


@dataclasses.dataclass(frozen=True)
class Foreign:
    """A published model.

    - `make`: key -> model, or the pair of a model and its `eqx.nn.State`.
    - `loss`: (model, batch, key) -> loss.
    """

    name: str
    kind: str
    make: Callable[[Any], Any]
    loss: Callable[..., Any]
    batch: Any


def _floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _pairs(published: bool) -> dict[str, Any]:
    """Tokens, and a label for each."""
    tokens = _ints(16, 128) if published else _ints(8, 64)
    return {"x": tokens, "y": tokens}


def _images(published: bool, side: int = 32) -> dict[str, Any]:
    rows, side = (16, 224) if published else (8, side)
    return {"x": _floats(rows, 3, side, side), "y": _ints(rows)}


def _num_labels(published: bool) -> int:
    return 1000 if published else 64


def _labels_loss(logits: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _tokens(model: Any, batch: Any, key: Any) -> Any:
    return _labels_loss(jax.vmap(model)(batch["x"]), batch["y"])


def _image(model: Any, batch: Any, key: Any) -> Any:
    logits = jax.vmap(lambda x: jax.tree.leaves(model(x))[0])(batch["x"])
    return _labels_loss(logits, batch["y"])


def _stateful_image(pair: Any, batch: Any, key: Any) -> Any:
    model, state = pair
    run = jax.vmap(
        model, axis_name="batch", in_axes=(0, None, None), out_axes=(0, None)
    )
    logits, state = run(batch["x"], state, key)
    return _labels_loss(logits, batch["y"]), {}, state


def _esm2(published: bool) -> Foreign:
    module = importlib.import_module("esm2quinox")
    depth, width, heads = (33, 1280, 20) if published else (4, 128, 8)

    def loss(model: Any, batch: Any, key: Any) -> Any:
        return _labels_loss(jax.vmap(lambda x: model(x).logits)(batch["x"]), batch["y"])

    return Foreign(
        "esm2quinox ESM2",
        "protein encoder, stacked",
        lambda key: module.ESM2(depth, width, heads, True, key),
        loss,
        _pairs(published),
    )


def _e1(published: bool) -> Foreign:
    module = importlib.import_module("e1jax")
    width, heads, inner, depth = (768, 12, 2304, 20) if published else (128, 8, 512, 3)

    def loss(model: Any, batch: Any, key: Any) -> Any:
        def one(x: Any) -> Any:
            order, same = jnp.arange(x.size), jnp.zeros(x.size, int)
            out = model(x, order, order, same, jnp.zeros(x.size, bool))
            return jax.tree.leaves(out)[-1] if not isinstance(out, jax.Array) else out

        return _labels_loss(jax.vmap(one)(batch["x"]), batch["y"])

    return Foreign(
        "e1jax E1",
        "protein encoder",
        lambda key: module.E1(width, heads, inner, depth, key=key),
        loss,
        _pairs(published),
    )


def _vit(published: bool) -> Foreign:
    module = importlib.import_module("jaxonmodels.models.vit")
    sizes = (224, 32, 768, 12, 12, 512) if published else (32, 4, 128, 4, 8, 64)
    return Foreign(
        "jaxonmodels ViT",
        "vision transformer",
        lambda key: module.VisionTransformer(*sizes, key=key, dtype=jnp.float32),
        _image,
        _images(published),
    )


class ChannelNorm(eqx.Module):
    """A LayerNorm over the channels of (channels, height, width). That of the package
    expects them last."""

    norm: eqx.nn.LayerNorm

    def __init__(self, shape: int, eps: float = 1e-5):
        self.norm = eqx.nn.LayerNorm(shape, eps=eps)

    def __call__(self, x: Any, *, key: Any = None) -> Any:
        return jax.vmap(jax.vmap(self.norm, 1, 1), 1, 1)(x)


def _convnext(published: bool) -> Foreign:
    module = importlib.import_module("jaxonmodels.models.convnext")
    sizes = ((96, 192, 3), (192, 384, 3), (384, 768, 9), (768, None, 3))
    sizes = sizes if published else ((32, 64, 2), (64, None, 2))
    settings = [module.CNBlockConfig(*each) for each in sizes]

    def make(key: Any) -> Any:
        return eqx.nn.make_with_state(module.ConvNeXt)(
            settings,
            0.0,
            1e-6,
            _num_labels(published),
            None,
            ChannelNorm,
            True,
            key,
            jnp.float32,
        )

    return Foreign(
        "jaxonmodels ConvNeXt", "ConvNet", make, _stateful_image, _images(published)
    )


def _swin(published: bool) -> Foreign:
    module = importlib.import_module("jaxonmodels.models.swin_transformer")
    width, depths, heads, window = (32, [2, 2], [4, 8], [4, 4])
    if published:
        width, depths, heads, window = (96, [2, 2, 6, 2], [3, 6, 12, 24], [7, 7])

    def make(key: Any) -> Any:
        parts = (
            module.SwinTransformerBlock,
            module.PatchMerging,
            module.ShiftedWindowAttention,
        )
        labels = _num_labels(published)
        return module._swin_transformer(
            key, True, labels, [4, 4], width, depths, heads, window, 0.0, *parts
        )

    batch = _images(published, side=64)
    return Foreign(
        "jaxonmodels Swin", "windowed vision transformer", make, _stateful_image, batch
    )


def _resnet(published: bool) -> Foreign:
    module = importlib.import_module("jaxonmodels.models.resnet")
    block, depths = (
        (module.Bottleneck, [3, 4, 6, 3])
        if published
        else (module.BasicBlock, [1, 1, 1, 1])
    )

    def loss(pair: Any, batch: Any, key: Any) -> Any:
        return _stateful_image((lambda x, s, k: pair[0](x, s), pair[1]), batch, key)

    def make(key: Any) -> Any:
        return eqx.nn.make_with_state(module.ResNet)(
            block,
            depths,
            _num_labels(published),
            zero_init_residual=False,
            groups=1,
            width_per_group=64,
            replace_stride_with_dilation=None,
            key=key,
        )

    return Foreign(
        "jaxonmodels ResNet", "ResNet with BatchNorm", make, loss, _images(published)
    )


def _mamba(published: bool) -> Foreign:
    module = importlib.import_module("jaxonmodels.models.mamba")
    width, vocabulary, depth = (768, 50280, 24) if published else (128, 256, 3)
    return Foreign(
        "jaxonmodels Mamba",
        "state-space model",
        lambda key: module.Mamba(width, vocabulary, depth, key=key),
        _tokens,
        _pairs(published),
    )


def _gat(published: bool) -> Foreign:
    module = importlib.import_module("gatv2_eqx")

    def loss(model: Any, batch: Any, key: Any) -> Any:
        out = jax.vmap(lambda x, a: model(x, a, 3, key=key))(batch["x"], batch["edges"])
        return jnp.mean((out - batch["y"]) ** 2)

    rows = 16 if published else 8
    nodes = _floats(rows, 32, 64)
    return Foreign(
        "gatv2-eqx GATv2",
        "graph attention",
        lambda key: module.GATv2(64, key=key),
        loss,
        {"x": nodes, "y": nodes, "edges": _floats(rows, 32, 32)},
    )


def _flow(name: str, kind: str) -> Callable[[bool], Foreign]:
    def build(published: bool) -> Foreign:
        flows = importlib.import_module("flowjax.flows")
        normal = importlib.import_module("flowjax.distributions").Normal
        paramax = importlib.import_module("paramax")

        sizes = {} if published else {"flow_layers": 4, "nn_width": 128}
        # Made without a trace, because functions of these models hold arrays.
        made = getattr(flows, name)(
            jax.random.key(0), base_dist=normal(jnp.zeros(16)), invert=True, **sizes
        )

        def make(key: Any) -> Any:
            return made

        def loss(model: Any, batch: Any, key: Any) -> Any:
            return -jnp.mean(paramax.unwrap(model).log_prob(batch["x"]))

        return Foreign(f"flowjax {name}", kind, make, loss, {"x": _floats(64, 16)})

    return build


BUILDERS: dict[str, Callable[[bool], Foreign]] = {
    "esm2quinox": _esm2,
    "e1jax": _e1,
    "jaxonmodels.vit": _vit,
    "jaxonmodels.convnext": _convnext,
    "jaxonmodels.swin": _swin,
    "jaxonmodels.resnet": _resnet,
    "jaxonmodels.mamba": _mamba,
    "gatv2_eqx": _gat,
    "flowjax.coupling": _flow("coupling_flow", "coupling flow"),
    "flowjax.autoregressive": _flow(
        "masked_autoregressive_flow", "autoregressive flow"
    ),
}


def foreign_models() -> tuple[list[Foreign], dict[str, str]]:
    """Return the models that are installed and run, and the reasons why others are
    missing."""
    found, missing = [], {}
    for name, build in BUILDERS.items():
        try:
            model = build(False)
            abstract = eqx.filter_eval_shape(model.make, jax.random.key(0))
            eqx.filter_eval_shape(model.loss, abstract, model.batch, jax.random.key(0))
            found.append(model)
        except Exception as error:
            missing[name] = (
                f"{type(error).__name__}: {str(error).partition(chr(10))[0][:150]}"
            )
    return found, missing
